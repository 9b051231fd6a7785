"""The real reason when a connection fails because of TLS.

To gRPC every mistake in the TLS settings is "unavailable", as a server that is not there yet. So when a
connection has failed, the same is tried once by hand, with Python's ssl. A mistake ends the caller (a worker, or a
shard of the server) at once with what is wrong and what to do; only what may heal by waiting is tried again.
"""

from __future__ import annotations

import socket
import ssl
import time
from datetime import UTC, datetime

from .config.schema import SecurityConfig
from .errors import AuthError, UsageError
from .security import RANK_PREFIX, SHARD_PREFIX, Credentials, Pem, facts_of, split_address

_PROBE_S = 1.0  # for one connection by hand
_SURE_AFTER_S = 0.1  # a server that is just ending looks like one that refuses: ask twice
# The beginning of HTTP/2: a client's first words, and empty SETTINGS.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

# X509_V_ERR_... of OpenSSL
_NOT_YET_VALID, _EXPIRED, _NAME_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 62, 64
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)
# Parts of the alerts that are about our certificate. gRPC's own server sends none, it hangs up.
_REFUSED = ("ALERT_BAD_CERT", "ALERT_CERT", "ALERT_UNKNOWN_CA", "ALERT_UNSUPPORTED_CERT", "ALERT_ACCESS_DENIED")
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def diagnose(address: str, credentials: Credentials, caller: str = "worker") -> AuthError | None:
    """The mistake in the TLS settings that keeps `address` from being reached; None when none is to be seen.

    `caller` is who asks: "worker" or "shard". It blocks: for a few milliseconds where something answers, at most a
    few times `_PROBE_S` otherwise.
    """
    config, pem = credentials.config, credentials.pem
    try:
        place = split_address(address)
        if pem.ca is None:
            return _speaks_tls(address, place, caller)
        try:
            if _is_served(place, config, pem.ca):
                return None
            time.sleep(_SURE_AFTER_S)
            return None if _is_served(place, config, pem.ca) else _refused(address, config, pem, caller)
        except ssl.SSLCertVerificationError as error:
            return _distrusted(address, place, config, error)
        except ssl.SSLError as error:
            return _failed(address, config, pem, caller, str(error.reason))
    except (OSError, UsageError):  # not there, or no HOST:PORT that we could try by hand
        return None


def _is_served(place: tuple[str, int], config: SecurityConfig, ca: bytes) -> bool:
    """Connect as gRPC would. After the handshake the server's first word follows; one that wants another
    certificate hangs up. Raises SSLError, OSError."""
    context = ssl.create_default_context(cadata=ca.decode("ascii", errors="ignore"))
    context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN  # no stricter than gRPC, in newer Pythons too
    context.set_alpn_protocols(["h2"])
    if config.cert is not None:
        context.load_cert_chain(config.cert, config.key)
    with (
        socket.create_connection(place, timeout=_PROBE_S) as plain,
        context.wrap_socket(plain, server_hostname=place[0]) as connection,
    ):
        try:
            connection.sendall(_PREFACE)
            return connection.recv(1) != b""
        except (ConnectionError, ssl.SSLEOFError):
            return False


# ---- the mistakes, in words -----------------------------------------------------------------------


def _speaks_tls(address: str, place: tuple[str, int], caller: str) -> AuthError | None:
    """Of a server that should not, as nobody told this caller."""
    try:
        ssl.get_server_certificate(place, timeout=_PROBE_S)
    except ssl.SSLError as error:
        if "ALERT" not in str(error.reason):
            return None
    return AuthError(
        f"the server at {address} speaks TLS, and this {caller} was told nothing of it",
        fix="add --ca FILE: ca.crt of ps-certs init, from the server's machine",
    )


def _distrusted(
    address: str, place: tuple[str, int], config: SecurityConfig, error: ssl.SSLCertVerificationError
) -> AuthError:
    facts = facts_of(ssl.get_server_certificate(place, timeout=_PROBE_S).encode())
    whose, code = f"the certificate of the server at {address}", error.verify_code
    if code in (_NAME_MISMATCH, _ADDRESS_MISMATCH):
        return AuthError(
            f"{whose} is for {', '.join(facts.names) or 'no address at all'}; not for {place[0]}",
            fix=f"connect to a name it has; or, where the CA is: ps-certs init DIR --renew --host {place[0]}",
        )
    problem = facts.problem(datetime.now(UTC))
    if code in (_EXPIRED, _NOT_YET_VALID) and problem is not None:
        renew = "where the CA is: ps-certs init DIR --renew; a running server takes the new one by itself"
        clocks = "set the clocks of both machines (NTP)"
        return AuthError(f"{whose} {problem}", fix=renew if code == _EXPIRED else clocks)
    if code in _UNKNOWN_ISSUER:
        return AuthError(
            f"{whose} was signed by '{facts.issuer}', and not by the CA in {config.ca}",
            fix="copy ca.crt from the directory that ps-certs init made the server's certificate in",
        )
    return AuthError(f"{whose} cannot be trusted: {error.verify_message}", fix=f"compare it with {config.ca}")


def _failed(address: str, config: SecurityConfig, pem: Pem, caller: str, reason: str) -> AuthError | None:
    if any(word in reason for word in _REFUSED):
        return _refused(address, config, pem, caller)
    if "ALERT" in reason:
        return AuthError(f"the server at {address} broke off the TLS handshake: {reason}")
    if reason in _NO_TLS:
        return AuthError(
            f"the server at {address} speaks no TLS, and this {caller} was told to (security.ca)",
            fix="start ps-server with --cert and --key; or drop --ca here",
        )
    return None


def _refused(address: str, config: SecurityConfig, pem: Pem, caller: str) -> AuthError:
    if pem.cert is None:
        own = f"{SHARD_PREFIX if caller == 'shard' else RANK_PREFIX}N"
        return AuthError(
            f"the server at {address} asks for a {caller}'s certificate (security.mutual), and there is none",
            fix=f"add --cert and --key: {own}.crt and {own}.key of ps-certs init, from the server's machine",
        )
    facts = facts_of(pem.cert)
    return AuthError(
        f"the server at {address} refused the certificate {config.cert} ('{facts.name}', signed by '{facts.issuer}')",
        fix=f"use one that the server's CA (its security.ca) has signed for {caller}s: ps-certs init",
    )
