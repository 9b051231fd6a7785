"""Finds the real reason when a connection fails.

gRPC reports "unavailable" for a mistake in the TLS settings, for another program at the address, and for a server that
has not started. After a failed connection, this module therefore connects once with Python's socket and ssl. For a
mistake the caller (a worker, or a shard of the server) exits at once with the cause and the fix. The caller retries
only if waiting may help.
"""

from __future__ import annotations

import socket
import ssl
import time
from datetime import UTC, datetime

from .config.addresses import split_address
from .errors import AuthError, ParamServerError, UnreachableError
from .security import RANK_PREFIX, SHARD_PREFIX, Credentials, client_context, facts_of

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
