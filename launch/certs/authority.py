"""A small certificate authority for a lab: a CA, and certificates for server, shards and workers.

Keys are EC P-256. `kit.py` writes the files.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...common.errors import AuthError, UsageError
from ...common.security import SHARD_PREFIX

_CA_DAYS = 3650
_CLOCK_SKEW = timedelta(minutes=10)  # clocks of a lab differ a little
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(\*\.)?({_LABEL}\.)*{_LABEL}")


@dataclass(frozen=True)
class Identity:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def host_name(text: str) -> x509.GeneralName:
    """Returns a host name or an address in the form of certificates. Raises UsageError for any other text."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(text) or len(text) > 253 or text.replace(".", "").isdigit():
        raise UsageError(
            f"--host {text}: neither a host name nor an address", fix="e.g. --host gpu-box or --host 10.0.0.5; no port"
        )
    return x509.DNSName(text)


def make_ca(name: str, days: int = _CA_DAYS) -> Identity:
    """A CA that signs certificates of hosts and workers, and no other CA."""
    return issue(None, name, days)


def issue(
    ca: Identity | None, name: str, days: int, hosts: Iterable[str] = (), begins: datetime | None = None
) -> Identity:
    """Returns a new key and its certificate, valid from now or from `begins`, and no longer than its CA.

    `ca`: None for a self-signed CA. `name`: `server`, reached by `hosts`; `shard-N` and `serve`, which are also clients
    of the run's servers; `rank-N`, or `worker` for any rank. A worker's certificate cannot be used by a server.
    """
    key, is_ca = ec.generate_private_key(ec.SECP256R1()), ca is None
    is_server = name in ("server", "serve") or name.startswith(SHARD_PREFIX)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH] if is_server else []
    usages += [ExtendedKeyUsageOID.CLIENT_AUTH] if name != "server" else []
    common_name = f"ps-{name}" if name in ("server", "serve") else name
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    begins = begins or datetime.now(UTC)
    last = begins + timedelta(days=days)
    builder = (
        x509.CertificateBuilder(
            issuer_name=subject if ca is None else ca.certificate.subject,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=begins - _CLOCK_SKEW,
            not_valid_after=last if ca is None else min(last, ca.certificate.not_valid_after_utc),
        )
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if ca is not None:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if is_server and (names := [host_name(host) for host in hosts]):
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Identity(builder.sign(ca.key if ca is not None else key, hashes.SHA256()), key)


def load_ca(certificate_pem: bytes, key_pem: bytes) -> Identity:
    """Raises AuthError if the files are no CA of this program, or if the CA has expired."""
    again = "--force makes a new CA and new certificates"
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        raise AuthError("ca.crt and ca.key hold no CA", fix=again) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise AuthError("ca.key is not the key of ca.crt", fix=again)
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise AuthError(f"the CA expired on {certificate.not_valid_after_utc:%Y-%m-%d}", fix=again)
    return Identity(certificate, key)


def is_signed_by(certificate_pem: bytes, ca_pem: bytes) -> bool:
    """Whether the first certificate of one file was signed by that of the other."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem))
    except Exception:  # cryptography raises several exceptions, which all mean that it was not
        return False
    return True
