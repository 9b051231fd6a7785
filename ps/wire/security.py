"""The server's side of secure connections: TLS with renewable certificates, the token, and the caller's identity.

An interceptor checks the token of every call before it reads any message. Only gRPC's health checks need no token. The
identity is checked with the first message, which names the caller's rank or shard.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from ...common.config.schema import Config, SecurityConfig
from ...common.errors import AuthError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.security import (
    ANY_RANK,
    RANK_PREFIX,
    SHARD_PREFIX,
    exposure,
    facts_of,
    read_pem,
    read_token,
    shows_token,
    utc_text,
    warn_of_readable_secrets,
)
from ...common.wire.protocol import refusal_to_status
from .stream import LogThrottle

log = get_logger()

_HEALTH = "/grpc.health.v1.Health/"
_RANK_NAME = re.compile(rf"{RANK_PREFIX}(0|[1-9][0-9]{{0,5}})")
_GIVE_TOKEN = "give the worker the server's token: --token-file FILE, or PS_TOKEN in its environment"


# ---- before start -----------------------------------------------------------------------------


def check_security(config: Config) -> None:
    """Raise AuthError for unusable files, and settings without effect."""
    security = config.security
    pem = read_pem(security)
    warn_of_readable_secrets(security)
    if security.cert is None and (security.ca is not None or security.mutual):
        setting = "security.mutual" if security.mutual else "security.ca"
        problem = f"{setting} is set, but the server has no certificate of its own and would not use TLS"
        raise AuthError(problem, fix="add --cert and --key (ps-certs init makes them), or leave the others out")
    if config.server.shards > 1 and security.cert is not None and security.ca is None:
        problem = "a server of several shards uses TLS and has no security.ca: its shards would not trust each other"
        raise AuthError(problem, fix="add --ca: ca.crt of ps-certs init")
    if config.server.shards > 1 and security.mutual and pem.cert is not None:
        name, expected = facts_of(pem.cert).name, f"{SHARD_PREFIX}{config.server.shard}"
        if name != expected:  # the other shards would refuse it later
            problem = f"{security.cert} is the certificate of '{name}', and this is shard {config.server.shard}"
            fix = f"use {expected}.crt and .key: ps-certs init DIR --renew --shards {config.server.shards} makes them"
            raise AuthError(f"{problem}: with security.mutual, shards check each other's names", fix=fix)


def insecurity(config: Config) -> str | None:
    """Return what the server's address lacks, as `exposure` does. Raises AuthError for an unusable token."""
    return exposure(config.server.listen, config.security, has_token=read_token(config.security) is not None)


def security_text(config: Config) -> str:
    """Return the protection of connections for the log, such as `mutual TLS, token`."""
    kinds = []
    if config.security.cert is not None:
        kinds.append("mutual TLS" if config.security.mutual else "TLS")
    if read_token(config.security) is not None:
        kinds.append("token")
    return ", ".join(kinds) or "none"


# ---- TLS ----------------------------------------------------------------------------------------


class Certificates:
    """The server's certificates, renewed when their files change. Open connections keep theirs.

    Expired files, and files that do not match, for example while only one of two is replaced, are ignored.
    """

    def __init__(self, security: SecurityConfig) -> None:
        self._security = security
        self._seen = self._stamps()
        self._context: ssl.SSLContext | None = None

    def current(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificates that the files have now, for gRPC. Raises AuthError."""
        pem = read_pem(self._security)
        facts = facts_of(pem.cert or b"")
        log.info("certificate", names=list(facts.names), valid_until=utc_text(facts.not_after))
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates, or None. gRPC calls this at every new connection, on a separate thread."""
        if not self._have_changed():
            return None
        try:
            return self.current()
        except AuthError as error:
            log.warning("certificate_not_renewed", reason=error.message)
            return None

    def context(self) -> ssl.SSLContext:
        """Return the newest TLS context, for connections without gRPC.

        Raises OSError if there is none yet and the files are not usable.
        """
        security = self._security
        assert security.cert is not None
        if self._context is None or self._have_changed():
            try:
                read_pem(security)
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(security.cert, security.key)
                if security.mutual and security.ca is not None:
                    context.load_verify_locations(security.ca)
                    context.verify_mode = ssl.CERT_REQUIRED
                self._context = context
            except (AuthError, OSError) as error:
                if self._context is None:
                    raise OSError(str(error)) from None
        return self._context

    def _have_changed(self) -> bool:
        """Whether the files have changed since the last call."""
        before, self._seen = self._seen, self._stamps()
        return self._seen != before

    def _stamps(self) -> list[tuple[int, int, int]] | None:
        """Return time, size and inode of each file, or None while a file is missing."""
        paths = (self._security.ca, self._security.cert, self._security.key)
        try:
            found = [os.stat(path) for path in paths if path is not None]
        except OSError:
            return None
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found]


# ---- the token ----------------------------------------------------------------------------------


class TokenCheck(grpc.aio.ServerInterceptor):
    """Ends every call without the token with UNAUTHENTICATED, before it reads any message."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._throttle = LogThrottle()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        header = dict(handler_call_details.invocation_metadata).get("authorization")
        has_token = header is not None and shows_token(header, self._token)
        if has_token or handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        message = "the call's token is not the server's"
        if header is None:
            message = "the server asks for a token, and the call has none"
        status = refusal_to_status(refusal(Reason.UNAUTHENTICATED, message, fix=_GIVE_TOKEN))

        async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            fields = {"reason": Reason.UNAUTHENTICATED, "message": message}
            self._throttle.log(log.warning, "refused", peer=context.peer(), **fields)
            await context.abort(*status)

        # The handler of a stream refuses without reading. A unary handler would read the request first.
        return grpc.stream_stream_rpc_method_handler(refuse)


# ---- identity -------------------------------------------------------------------------------------


def certificate_name(context: grpc.aio.ServicerContext) -> str | None:
    """Return the common name of the caller's certificate, or None if certificates are not required."""
    facts = context.auth_context()
    if "x509_pem_cert" not in facts:
        return None
    return b"".join(facts.get("x509_common_name", ())).decode("utf-8", errors="replace")


def check_rank(context: grpc.aio.ServicerContext, requested: int | None) -> int | None:
    """Return the rank to join as: the requested rank, or the rank of the certificate.

    Raises a PERMISSION_DENIED refusal for another rank's certificate, and for a name other than `rank-N` and `worker`.
    """
    name = certificate_name(context)
    if name is None or name == ANY_RANK:
        return requested
    found = _RANK_NAME.fullmatch(name)
    if found is None:
        problem = f"the certificate's common name '{name[:100]}' may not join: it is neither {RANK_PREFIX}N nor"
        fix = "ps-certs init --workers N makes one for each rank"
        raise refusal(Reason.PERMISSION_DENIED, f"{problem} {ANY_RANK}", fix=fix)
    allowed = int(found[1])
    if requested is not None and requested != allowed:
        problem = f"the certificate is for rank {allowed}, and the worker asks to be rank {requested}"
        fix = f"use {RANK_PREFIX}{requested}.crt and {RANK_PREFIX}{requested}.key, or --rank {allowed}"
        raise refusal(Reason.PERMISSION_DENIED, problem, fix=fix)
    return allowed


def check_shard(context: grpc.aio.ServicerContext, shard: int) -> None:
    """Raise a PERMISSION_DENIED refusal if certificates are required and the caller's is not `shard-N` of this shard.

    The coordinator checks this before its first order, which contains the run's configuration. Workers later send their
    gradients to this shard.
    """
    name, expected = certificate_name(context), f"{SHARD_PREFIX}{shard}"
    if name is not None and name != expected:
        problem = f"the certificate is '{name[:100]}', and the process asks to be shard {shard}"
        fix = f"start it with {expected}.crt and .key: ps-certs init DIR --renew --shards S makes them"
        raise refusal(Reason.PERMISSION_DENIED, problem, fix=fix)
