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
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from .config.addresses import is_loopback, split_address
from .config.schema import Config, SecurityConfig
from .errors import AuthError, shown
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
