"""A directory of credentials of a lab: a small CA, certificates for a server, its shards and its workers, and a token.

Keys are EC P-256.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shlex
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rich.table import Table
from rich.text import Text

from ...common.config.addresses import join_address
from ...common.config.schema import DEFAULT_PORT
from ...common.errors import AuthError, OutputError, UsageError
from ...common.reporting.output import write_whole
from ...common.reporting.report import report_console
from ...common.security import ANY_RANK, RANK_PREFIX, SHARD_PREFIX, facts_of

_CLOCK_SKEW = timedelta(minutes=10)  # clocks of a lab differ a little
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(\*\.)?({_LABEL}\.)*{_LABEL}")
_OURS = ("ca.*", "server.*", "serve.*", "worker.*", "rank-*.*", "shard-*.*")


def make(directory: Path, hosts: list[str], workers: int, shards: int, days: int, *, renew: bool, force: bool) -> None:
    """Make certificates, of a new CA or the existing one, and print how to use them.

    0 workers or shards: the same number as before, or one certificate for all workers. Raises UsageError, AuthError and
    OutputError.
    """
    if renew and force:
        raise UsageError("--renew keeps the CA and --force replaces it", fix="give one of them")
    for name in hosts:
        host_name(name)
    ranks = [f"{RANK_PREFIX}{rank}" for rank in range(workers)]
    shard_names = [f"{SHARD_PREFIX}{shard}" for shard in range(shards)]
    if renew:
        ca = load_ca(_read(directory / "ca.crt"), _read(directory / "ca.key"))
        server = directory / "server.crt"
        known = facts_of(_read(server)).names if server.exists() else _local_names()
        ranks = ranks or _existing(directory, f"{RANK_PREFIX}*.crt", f"{ANY_RANK}.crt")
        shard_names = shard_names or _existing(directory, f"{SHARD_PREFIX}*.crt")
    else:
        if (ours := _ours(directory)) and not force:
            raise UsageError(
                f"{directory} holds {ours[0].name} already",
                fix="--renew makes new certificates with the CA that is there; --force replaces everything",
            )
        ca, known = make_ca(f"paramserver {socket.gethostname()}"[:64]), _local_names()
    ranks = ranks or [ANY_RANK]
    files: dict[str, bytes] = {}  # by name
    for name in ("server", "serve", *ranks, *shard_names):
        files |= _pair(name, issue(ca, name, days, dict.fromkeys([*known, *hosts])))
    if not renew:
        files |= _pair("ca", ca) | {"token": f"{secrets.token_urlsafe(32)}\n".encode()}
    _write(directory, files, replaces_all=force)
    facts = facts_of(_read(directory / "server.crt"))
    groups = [group for group in (shard_names, ranks) if group]
    who = ", ".join(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups)
    kept = "; the CA and the token are the old ones" if renew else ", and a token"
    print(f"{directory}: certificates for a server ({', '.join(facts.names)}) and for {who}{kept}")
    print(f"valid until {facts.not_after:%Y-%m-%d}; ps-certs init {directory} --renew makes new ones\n")
    if renew:
        print("A running server takes the new files for new connections; workers read theirs when they reconnect.")
        print("Copy new worker certificates to the workers' machines.")
    else:
        _print_commands(directory, ranks[0], shard_names, hosts[0] if hosts else socket.gethostname())


def show(directory: Path) -> None:
    """Print a table of the certificates: name, hosts and expiry."""
    paths = sorted(directory.glob("*.crt"), key=_by_rank)
    if not paths:
        raise UsageError(f"no certificates in {directory}", fix=f"ps-certs init {directory}")
    ca = _read(directory / "ca.crt") if (directory / "ca.crt").exists() else None
    now = datetime.now(UTC)
    table = Table("file", "name", "for", "valid until (UTC)", "", box=None, header_style="bold", pad_edge=False)
    for path in paths:
        pem = _read(path)
        try:
            facts = facts_of(pem)
        except ValueError:
            table.add_row(path.name, "", "", "", Text("no certificate", "red"))
            continue
        state = Text(f"{(facts.not_after - now).days} days")
        if facts.problem(now) is not None:
            state = Text("EXPIRED" if facts.not_after < now else "not valid yet", "red")
        if ca is not None and not is_signed_by(pem, ca):
            state.append(", ").append("not signed by ca.crt", "red")
        table.add_row(path.name, facts.name, ", ".join(facts.names), f"{facts.not_after:%Y-%m-%d %H:%M}", state)
    report_console().print(table)


def _local_names() -> tuple[str, ...]:
    """Returns the names of this machine, with its host name where a certificate can have it."""
    names: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    with suppress(UsageError):
        host_name(socket.gethostname())
        names = (*names, socket.gethostname())
    return names


def _existing(directory: Path, *patterns: str) -> list[str]:
    found = [path for pattern in patterns for path in directory.glob(pattern)]
    return [path.stem for path in sorted(found, key=_by_rank)]


def _by_rank(path: Path) -> tuple[str, int]:
    """Sorts rank-10 after rank-9."""
    stem, _, number = path.stem.partition("-")
    return stem, int(number) if number.isdigit() else -1


def _ours(directory: Path) -> list[Path]:
    """Returns the files in the directory that this command has made."""
    found = [path for pattern in _OURS for path in directory.glob(pattern) if path.suffix in (".crt", ".key")]
    return sorted(found) + [path for path in [directory / "token"] if path.exists()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}", fix="ps-certs init DIR makes a new set") from None


def _pair(name: str, identity: Identity) -> dict[str, bytes]:
    """The key comes first: a server that reads in between finds an old certificate with a new key, and waits."""
    return {f"{name}.key": identity.key_pem, f"{name}.crt": identity.certificate_pem}


def _write(directory: Path, files: dict[str, bytes], replaces_all: bool) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(directory / name, data, 0o644 if name.endswith(".crt") else 0o600, is_synced=False)
        if replaces_all:
            for path in _ours(directory):
                if path.name not in files:
                    path.unlink()
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror}", fix="choose another directory") from None


def _print_commands(directory: Path, first: str, shard_names: list[str], host: str) -> None:
    address = join_address(host, DEFAULT_PORT)
    name = shard_names[0] if shard_names else "server"
    num_shards = ("--shards", str(len(shard_names))) if shard_names else ()
    rank = ("--rank", first.removeprefix(RANK_PREFIX)) if first.startswith(RANK_PREFIX) else ()
    listen = ("--listen", f"0.0.0.0:{DEFAULT_PORT}", *num_shards)
    server = ("ps-server", *listen, *_flags(directory, name), "--set", "security.mutual=true")
    worker = ("ps-worker", "--server", address, *rank, *_flags(directory, first))
    print(f"The server:\n  {shlex.join(server)}\n")
    if shard_names:
        print(f"Its other shards show {SHARD_PREFIX}N.crt, with --shard N --coordinator {address}.\n")
    print(f"A worker (its machine needs ca.crt, {first}.crt, {first}.key and token):\n  {shlex.join(worker)}\n")
    print(f"{directory / 'ca.key'} signs new certificates: copy it nowhere.")


def _flags(directory: Path, name: str) -> tuple[str, ...]:
    return (
        "--ca", str(directory / "ca.crt"), "--cert", str(directory / f"{name}.crt"),
        "--key", str(directory / f"{name}.key"), "--token-file", str(directory / "token"),
    )  # fmt: skip


# ---- the certificate authority


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


def make_ca(name: str, days: int = 3650) -> Identity:
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
