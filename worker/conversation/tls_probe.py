"""The real reason when a connection fails because of TLS.

To gRPC every mistake in the TLS settings is "unavailable", as a server that is not there yet. So when a
connection has failed, the same is tried once by hand, with Python's ssl. A mistake ends the worker at once with
what is wrong and what to do; only what may heal by waiting is tried again.
"""

from __future__ import annotations

import socket
import ssl
import time
from datetime import UTC, datetime
from typing import NoReturn

from ...common.config.schema import SecurityConfig
from ...common.errors import AuthError, UsageError
from ...common.security import Facts, Pem, facts_of, split_address

_PROBE_S = 1.0  # for one connection by hand
_SURE_AFTER_S = 0.1  # a server that is just ending looks like one that refuses: ask twice
# The beginning of HTTP/2: a client's first words, and empty SETTINGS.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

# X509_V_ERR_... of OpenSSL
_NOT_YET_VALID, _EXPIRED, _NAME_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 62, 64
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)
# Parts of the alerts that are about our certificate. gRPC's own server sends none, it hangs up.
_REFUSED = ("ALERT_BAD_CERT", "ALERT_CERT", "ALERT_UNKNOWN_CA", "ALERT_UNSUPPORTED_CERT", "ALERT_ACCESS_DENIED")


def diagnose(address: str, config: SecurityConfig, pem: Pem) -> AuthError | None:
    """The mistake in the TLS settings that keeps `address` from being reached; None when none is to be seen.

    Takes a few milliseconds where something answers, at most a few times `_PROBE_S` otherwise.
    """
    try:
        _Probe(address, config, pem).run()
    except AuthError as mistake:
        return mistake
    except (OSError, UsageError):  # not there, or no HOST:PORT that we could try by hand
        pass
    return None


class _Probe:
    """One look at a server. `run` raises AuthError for a mistake, OSError when nothing can be said."""

    def __init__(self, address: str, config: SecurityConfig, pem: Pem) -> None:
        self._address = address
        self._place = split_address(address)
        self._config = config
        self._pem = pem

    def run(self) -> None:
        if self._pem.ca is None:
            self._expect_plaintext()
            return
        try:
            if self._is_served():
                return
            time.sleep(_SURE_AFTER_S)
            if not self._is_served():
                self._refused()
        except ssl.SSLCertVerificationError as error:
            self._distrusted(error)
        except ssl.SSLError as error:
            self._failed(error)

    def _expect_plaintext(self) -> None:
        try:
            self._shake_hands(self._trusting()).close()
        except ssl.SSLError as error:
            if "ALERT" not in str(error.reason):
                return  # no TLS there
        raise AuthError(
            f"the server at {self._address} speaks TLS, and this worker was told nothing of it",
            fix="add --ca FILE: ca.crt of ps-certs init, from the server's machine",
        )

    def _is_served(self) -> bool:
        """After the handshake the server's first word follows. One that wants another certificate hangs up."""
        with self._shake_hands(self._context()) as connection:
            try:
                connection.sendall(_PREFACE)
                return connection.recv(1) != b""
            except (ConnectionError, ssl.SSLEOFError):
                return False
            except ssl.SSLError as error:
                if any(word in str(error.reason) for word in _REFUSED):
                    return False
                raise

    def _shake_hands(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        plain = socket.create_connection(self._place, timeout=_PROBE_S)
        try:
            return context.wrap_socket(plain, server_hostname=self._place[0])
        except BaseException:
            plain.close()
            raise

    def _context(self) -> ssl.SSLContext:
        """As gRPC would: our CA only, a name that fits, and our own certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self._pem.ca is not None:
            context.load_verify_locations(cadata=self._pem.ca.decode("ascii", errors="ignore"))
        if self._config.cert is not None:
            context.load_cert_chain(self._config.cert, self._config.key)
        return context

    def _trusting(self) -> ssl.SSLContext:
        """To look at a certificate, not to talk."""
        context = self._context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context

    def _server_facts(self) -> Facts:
        with self._shake_hands(self._trusting()) as connection:
            return facts_of(connection.getpeercert(binary_form=True) or b"")

    # ---- the mistakes, in words ---------------------------------------------------------------

    def _distrusted(self, error: ssl.SSLCertVerificationError) -> NoReturn:
        facts, ca = self._server_facts(), self._config.ca
        whose = f"the certificate of the server at {self._address}"
        code = error.verify_code
        if code in (_NAME_MISMATCH, _ADDRESS_MISMATCH):
            host, names = self._place[0], ", ".join(facts.names) or "no address at all"
            raise AuthError(
                f"{whose} is for {names}; not for {host}",
                fix=f"connect to a name it has; or, where the CA is: ps-certs init DIR --renew --host {host}",
            )
        problem = facts.problem(datetime.now(UTC))
        if code in (_EXPIRED, _NOT_YET_VALID) and problem is not None:
            raise AuthError(
                f"{whose} {problem}",
                fix="where the CA is: ps-certs init DIR --renew; a running server takes the new one by itself"
                if code == _EXPIRED
                else "set the clocks of both machines (NTP)",
            )
        if code in _UNKNOWN_ISSUER:
            raise AuthError(
                f"{whose} was signed by '{facts.issuer}', and not by the CA in {ca}",
                fix="copy ca.crt from the directory that ps-certs init made the server's certificate in",
            )
        raise AuthError(f"{whose} cannot be trusted: {error.verify_message}", fix=f"compare it with {ca}")

    def _failed(self, error: ssl.SSLError) -> NoReturn:
        reason = str(error.reason)
        if any(word in reason for word in _REFUSED):
            self._refused()
        if "ALERT" in reason:
            raise AuthError(f"the server at {self._address} broke off the TLS handshake: {reason}")
        if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
            raise AuthError(
                f"the server at {self._address} speaks no TLS, and this worker was told to (security.ca)",
                fix="start ps-server with --cert and --key; or drop --ca here",
            )
        raise error

    def _refused(self) -> NoReturn:
        config, pem = self._config, self._pem
        if pem.cert is None:
            raise AuthError(
                f"the server at {self._address} asks for a worker's certificate (security.mutual), and there is none",
                fix="add --cert and --key: rank-N.crt and rank-N.key of ps-certs init, from the server's machine",
            )
        facts = facts_of(pem.cert)
        raise AuthError(
            f"the server at {self._address} refused the certificate {config.cert} ('{facts.name}', signed by "
            f"'{facts.issuer}')",
            fix="use one that the server's CA (its security.ca) has signed for workers: ps-certs init",
        )
