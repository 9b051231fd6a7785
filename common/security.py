"""Credentials: certificates and keys from PEM files, the token from a file or the environment. Rules:

* A server with `security.cert` and `security.key` speaks TLS 1.2 or 1.3, a worker with `security.ca` too.
  With `security.mutual` the server also asks for the worker's certificate, signed by `security.ca`.
* The common name of a certificate decides what it permits: `rank-3` is rank 3 only, `worker` is any
  rank, `shard-1` is shard 1 of the server. Other names may only read (Pull, Status).
* A run has one token, from the file `security.token_file` or from PS_TOKEN in the environment. The token is
  never a flag or a setting, so that no process list, log or `--print-config` shows it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import ssl
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from .config.addresses import is_loopback, split_address
from .config.schema import Config, SecurityConfig
from .errors import AuthError, ParamServerError, UnreachableError, shown
from .reporting.log import get_logger

log = get_logger()

TOKEN_VARIABLE = "PS_TOKEN"
WEB_TOKEN_VARIABLE = "PS_WEB_TOKEN"  # of the dashboard; ps-launch sets one, which a restarted server keeps
WEB_LOGS_VARIABLE = "PS_WEB_LOGS"  # a folder where ps-launch keeps the last lines of each worker, for the dashboard
_MAX_TOKEN = 4096  # characters: all metadata of a call must fit into 8 KiB
ANY_RANK = "worker"  # the common name that may join as any rank
RANK_PREFIX = "rank-"
SHARD_PREFIX = "shard-"
# The missing protection of a connection that has TLS and a token, or not.
_LACKS = {
    (False, False): "the connection is neither encrypted nor authenticated: no security.cert (--cert, --key), no token "
    "(--token-file, or PS_TOKEN)",
    (False, True): "the connection is not encrypted: no security.cert and security.key (--cert, --key)",
    (True, False): "the connection is not authenticated: no token (--token-file, or PS_TOKEN)",
}


def exposure(address: str, security: SecurityConfig, *, has_token: bool) -> str | None:
    """Returns the missing protection of an address that other machines can reach, as a phrase, or None."""
    is_here = is_loopback(split_address(address)[0])
    return None if is_here else _LACKS.get((security.cert is not None, has_token))


def check_exposure(name: str, address: str, config: Config, *, has_token: bool, otherwise: str = "") -> None:
    """Raise AuthError for an address that other machines can reach, and that lacks TLS, a token and `--insecure`.

    `name`: of what listens there. `otherwise`: another way out.
    """
    lacks = exposure(address, config.security, has_token=has_token)
    if lacks is not None and not config.server.insecure:
        fixes = ("ps-certs init makes certificates and a token", otherwise, "on a network you trust add --insecure")
        message = f"{name} at {address} can be reached by other machines, and {lacks}"
        raise AuthError(message, fix="; ".join(filter(None, fixes)))


def read_token(config: SecurityConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the run's token, or None without one. Raises AuthError for an unusable token.

    An empty PS_TOKEN means no token; an empty file is an error. If both sources are set, they must agree,
    so that no order of precedence is needed.
    """
    texts = {TOKEN_VARIABLE: environ[TOKEN_VARIABLE]} if environ.get(TOKEN_VARIABLE) else {}
    if config.token_file is not None:
        texts[config.token_file] = _read(config.token_file, "security.token_file").decode("utf-8", errors="replace")
    tokens = [text.strip() for text in texts.values()]
    for source, token in zip(texts, tokens, strict=True):  # no message shows the token
        problem = ""
        if not token:
            problem = "holds no token: it is empty"
        elif len(token) > _MAX_TOKEN:
            problem = f"the token has {len(token)} characters, {_MAX_TOKEN} are possible"
        elif not all("!" <= character <= "~" for character in token):
            problem = "the token holds a space, a line break or a character that is not ASCII"
        if problem:
            raise AuthError(f"{source}: {problem}", fix="ps-certs init makes a token")
    if len(tokens) == 2 and not hmac.compare_digest(*tokens):
        message = f"{TOKEN_VARIABLE} and {config.token_file} hold different tokens"
        raise AuthError(message, fix=f"unset {TOKEN_VARIABLE}, or give no security.token_file")
    return tokens[0] if tokens else None


def shows_token(value: str | bytes, token: str) -> bool:
    """Returns whether the `authorization` header has the token. The comparison takes constant time."""
    header = value if isinstance(value, bytes) else value.encode("utf-8", errors="replace")
    scheme, _, rest = header.partition(b" ")
    return hmac.compare_digest(rest, token.encode()) and scheme.lower() == b"bearer"


_MOST_SHOWN = 200  # characters of a name in a certificate


@dataclass(frozen=True)
class Facts:
    """The names and validity of one certificate."""

    name: str  # common name, "" without one
    issuer: str
    names: tuple[str, ...]  # host names and addresses for which it is valid
    not_before: datetime
    not_after: datetime

    def problem(self, now: datetime) -> str | None:
        """Returns `expired on 2027-01-01 00:00 UTC`, `is valid only from ...`, or None."""
        if now > self.not_after:
            return f"expired on {utc_text(self.not_after)}"
        if now < self.not_before:
            return f"is valid only from {utc_text(self.not_before)}, and this machine's clock says {utc_text(now)}"
        return None


def utc_text(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"


def facts_of(pem: bytes) -> Facts:
    """Returns the facts of the first certificate. Raises ValueError when there is none."""
    from cryptography import x509  # only here and below: most runs have no certificates
    from cryptography.x509.oid import NameOID

    def common_name(name: x509.Name) -> str:
        found = next((str(found.value) for found in name.get_attributes_for_oid(NameOID.COMMON_NAME)), "")
        return shown(found, _MOST_SHOWN)

    certificate = x509.load_pem_x509_certificates(pem)[0]
    names = [name for extension in certificate.extensions
             if isinstance(extension.value, x509.SubjectAlternativeName) for name in extension.value]  # fmt: skip
    return Facts(
        name=common_name(certificate.subject),
        issuer=common_name(certificate.issuer) or shown(certificate.issuer.rfc4514_string(), _MOST_SHOWN),
        names=tuple(
            shown(str(name.value), _MOST_SHOWN) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)
        ),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
    )


@dataclass(frozen=True)
class Credentials:
    """Certificates and a key as PEM, and the token; None if not set.

    The default is plaintext without a token. The repr shows no secrets.
    """

    config: SecurityConfig = field(default_factory=SecurityConfig)
    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    trusts_network: bool = False  # `server.insecure`: plaintext may leave this machine

    @classmethod
    def read(cls, config: SecurityConfig) -> Credentials:
        """Read the files and PS_TOKEN. Raises AuthError if one is unusable."""
        return replace(read_pem(config), token=read_token(config))

    def renewed(self) -> Credentials:
        """Returns credentials with the current files, or itself if they are unusable, as during a replacement."""
        try:
            return replace(read_pem(self.config), token=self.token)
        except AuthError:
            return self

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The gRPC metadata that every call sends."""
        return [("authorization", f"Bearer {self.token}")] if self.token is not None else []


PLAINTEXT = Credentials()


def read_pem(config: SecurityConfig) -> Credentials:
    """Read certificates and key. Raises AuthError if one is missing, not PEM, expired, or does not match."""
    ca = cert = key = None
    if config.ca is not None:
        ca = _read(config.ca, "security.ca")
        _check_certificate(config.ca, ca, is_bundle=ca.count(b"BEGIN CERTIFICATE") > 1)
    if config.cert is not None and config.key is not None:
        cert, key = _read(config.cert, "security.cert"), _read(config.key, "security.key")
        _check_certificate(config.cert, cert)
        _check_key(config.key, key, config.cert, cert)
    return Credentials(config, ca, cert, key)


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """Returns a TLS context that trusts the same certificates as gRPC. Raises ssl.SSLError, OSError."""
    context = ssl.create_default_context(cadata=(credentials.ca or b"").decode("ascii", errors="ignore"))
    context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN  # no stricter than gRPC, in newer Pythons too
    if credentials.config.cert is not None:
        context.load_cert_chain(credentials.config.cert, credentials.config.key)
    return context


def _check_certificate(path: str, data: bytes, is_bundle: bool = False) -> None:
    try:
        facts = facts_of(data)
    except ValueError:
        raise AuthError(f"{path} holds no certificate in PEM form", fix="ps-certs init makes certificates") from None
    if (problem := facts.problem(datetime.now(UTC))) is not None and not is_bundle:
        fix = "set the clock, or make new ones with the same CA: ps-certs init DIR --renew"
        raise AuthError(f"the certificate {path} ('{facts.name}') {problem}", fix=fix)


def _check_key(path: str, data: bytes, cert_path: str, cert: bytes) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        plain = f"openssl pkey -in {path} -out plain.key; chmod 600 plain.key"
        raise AuthError(f"the key {path} is encrypted", fix=plain) from None
    except Exception:  # cryptography raises several kinds, UnsupportedAlgorithm is no ValueError
        raise AuthError(f"{path} holds no private key in PEM form", fix="ps-certs init makes keys") from None
    if key.public_key() != x509.load_pem_x509_certificates(cert)[0].public_key():
        message = f"the key {path} does not belong to the certificate {cert_path}"
        raise AuthError(message, fix="give the key of this certificate; ps-certs writes both with the same file name")


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        fix = "ps-certs init makes certificates and a token"
        raise AuthError(f"{setting}: cannot read {path}: {error.strerror}", fix=fix) from None


def warn_of_readable_secrets(config: SecurityConfig) -> None:
    """Log a warning for each key or token file that every user of the machine can read."""
    for path in (config.key, config.token_file):
        with contextlib.suppress(OSError):
            if path is not None and os.stat(path).st_mode & stat.S_IROTH:
                log.warning("secret_readable", path=path, by="every user of this machine", fix=f"chmod 600 {path}")


# ---- tls probe -----------------------------------------------------------------------------------
# Finds the real reason when a connection fails.
#
# gRPC reports "unavailable" for a mistake in the TLS settings, for another program at the address, and for a server
# that has not started. After a failed connection, `diagnose` therefore connects once with Python's socket and ssl.
# For a mistake the caller (a worker, or a shard of the server) exits at once with the cause and the fix. The caller
# retries only if waiting may help.


_PROBE_S = 1.0  # for one connection
_SURE_AFTER_S = 0.1  # a server that is shutting down looks like a refusal: try twice
# The HTTP/2 connection preface of a client, with an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4  # type of the first frame from a server, in its fourth byte
_SHOWN = 40  # characters of another program's reply

# X509_V_ERR_... of OpenSSL
_NOT_YET_VALID, _EXPIRED, _NAME_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 62, 64
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)
# TLS alerts about this client's certificate. gRPC's own server closes the connection without an alert.
_REFUSED = ("ALERT_BAD_CERT", "ALERT_CERT", "ALERT_UNKNOWN_CA", "ALERT_UNSUPPORTED_CERT", "ALERT_ACCESS_DENIED")
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def diagnose(address: str, credentials: Credentials, caller: str = "worker") -> ParamServerError | None:
    """Returns the mistake that prevents a connection to `address`; None if it finds none.

    Raises OSError if nothing listens, since a server may start later. `caller` is "worker" or "shard". The call blocks
    for a few milliseconds if something replies, and otherwise for at most a few times `_PROBE_S`.
    """
    server = f"the server at {address}"
    host, port = split_address(address)
    try:
        if credentials.ca is None:
            return _in_the_clear(server, host, port, caller)
        if _is_served(host, port, credentials):
            return None
        time.sleep(_SURE_AFTER_S)
        return None if _is_served(host, port, credentials) else _refused(server, credentials, caller)
    except ssl.SSLCertVerificationError as error:
        certificate = ssl.get_server_certificate((host, port), timeout=_PROBE_S)
        ca = str(credentials.config.ca)
        facts, whose, code = facts_of(certificate.encode()), f"the certificate of {server}", error.verify_code
        if code in (_NAME_MISMATCH, _ADDRESS_MISMATCH):
            message = f"{whose} is for {', '.join(facts.names) or 'no address at all'}; not for {host}"
            fix = f"connect to a name it has; or, where the CA is: ps-certs init DIR --renew --host {host}"
            return AuthError(message, fix=fix)
        problem = facts.problem(datetime.now(UTC))
        if code in (_EXPIRED, _NOT_YET_VALID) and problem is not None:
            renew = "where the CA is: ps-certs init DIR --renew; a running server takes the new one by itself"
            clocks = "set the clocks of both machines (NTP)"
            return AuthError(f"{whose} {problem}", fix=renew if code == _EXPIRED else clocks)
        if code in _UNKNOWN_ISSUER:
            fix = "copy ca.crt from the directory that ps-certs init made the server's certificate in"
            return AuthError(f"{whose} was signed by '{facts.issuer}', and not by the CA in {ca}", fix=fix)
        return AuthError(f"{whose} cannot be trusted: {error.verify_message}", fix=f"compare it with {ca}")
    except ssl.SSLError as error:
        return _failed(server, credentials, caller, str(error.reason))


def _is_served(host: str, port: int, credentials: Credentials) -> bool:
    """Connect as gRPC does, and return whether the server sends data after the handshake.

    A server that refuses the certificate closes the connection instead. Raises SSLError, OSError.
    """
    context = client_context(credentials)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=_PROBE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        try:
            connection.sendall(_PREFACE)
            return connection.recv(1) != b""
        except (ConnectionError, ssl.SSLEOFError):
            return False


def _in_the_clear(server: str, host: str, port: int, caller: str) -> ParamServerError | None:
    """Check for an HTTP/2 server: it replies to the preface with SETTINGS. A TLS server sends no readable reply."""
    with socket.create_connection((host, port), timeout=_PROBE_S) as connection:
        try:
            connection.sendall(_PREFACE)
            reply = connection.recv(1024)
        except (ConnectionError, TimeoutError):
            reply = b""
    if reply[3:4] == bytes([_SETTINGS]):
        return None
    line = reply.partition(b"\n")[0].decode("ascii", errors="replace").strip()
    if line.isprintable() and len(line) > 3:
        fix = "give the address that ps-server says it is listening on (--server HOST:PORT)"
        return UnreachableError(f"{server} is no ps-server: it says '{line[:_SHOWN]}'", fix=fix)
    # Check whether the server speaks TLS although this caller has no TLS settings.
    try:
        ssl.get_server_certificate((host, port), timeout=_PROBE_S)
    except ssl.SSLError as error:
        if "ALERT" not in str(error.reason):
            return None
    message = f"{server} speaks TLS, and this {caller} has no CA certificate (security.ca)"
    return AuthError(message, fix="add --ca FILE: ca.crt of ps-certs init, from the server's machine")


def _failed(server: str, credentials: Credentials, caller: str, reason: str) -> AuthError | None:
    if any(word in reason for word in _REFUSED):
        return _refused(server, credentials, caller)
    if "ALERT" in reason:
        return AuthError(f"{server} broke off the TLS handshake: {reason}")
    if reason in _NO_TLS:
        message = f"{server} speaks no TLS, and security.ca of this {caller} requires it"
        return AuthError(message, fix="start ps-server with --cert and --key; or drop --ca here")
    return None


def _refused(server: str, credentials: Credentials, caller: str) -> AuthError:
    if credentials.cert is None:
        name = f"{SHARD_PREFIX if caller == 'shard' else RANK_PREFIX}N"
        fix = f"add --cert and --key: {name}.crt and {name}.key of ps-certs init, from the server's machine"
        return AuthError(f"{server} asks for a {caller}'s certificate (security.mutual), and there is none", fix=fix)
    facts = facts_of(credentials.cert)
    whose = f"{credentials.config.cert} ('{facts.name}', signed by '{facts.issuer}')"
    fix = f"use one that the server's CA (its security.ca) has signed for {caller}s: ps-certs init"
    return AuthError(f"{server} refused the certificate {whose}", fix=fix)
