"""ps-certs: certificates and a token that are good for a lab.

Imports beyond Typer are made where they are needed: --help answers at once.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...common.config.cli import make_app, run_app
from ...common.errors import OutputError, UsageError

if TYPE_CHECKING:
    from .authority import Identity, Validity

PROGRAM = "ps-certs"
_DAYS = 365
_MAX_DAYS = 3650
_PORT = 50051
_ANYWHERE = ("localhost", "127.0.0.1", "::1")

_HELP = """Certificates and a token for a server and its workers.

[bold]Examples[/bold]

  ps-certs init lab --host 10.0.0.5 --workers 4   a CA, the server's certificate, one for each rank, a token
  ps-certs init lab --host 10.0.0.5 --shards 3    one for each shard of the server too, for security.mutual
  ps-certs init lab --renew                       new certificates of the same CA; running servers take them
  ps-certs show lab                               names, and until when they are valid
"""

app = make_app(_HELP)

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="where the files are kept", show_default=False)]
HostOption = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="NAME_OR_IP", help="how workers reach the server; repeatable", show_default=False),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "-n", "--workers", min=1, max=4096, help="a certificate for each rank; none: one that all workers share"
    ),
]
ShardsOption = Annotated[
    int | None,
    typer.Option("--shards", min=1, max=256, help="a certificate for each shard of a server that has several"),
]
DaysOption = Annotated[int, typer.Option("--days", min=1, max=_MAX_DAYS, help="how long certificates are valid")]
RenewOption = Annotated[bool, typer.Option("--renew", help="new certificates, with the CA and token that are there")]
ForceOption = Annotated[bool, typer.Option("--force", help="replace everything; what the old CA signed is void")]


@app.command("init")
def init(
    directory: DirArgument,
    host: HostOption = None,
    workers: WorkersOption = None,
    shards: ShardsOption = None,
    days: DaysOption = _DAYS,
    renew: RenewOption = False,
    force: ForceOption = False,
) -> None:
    """Make a CA, certificates for server, shards and workers, and a token; then say how to use them."""
    from ...common.security import ANY_RANK, RANK_PREFIX, SHARD_PREFIX
    from .authority import CA_DAYS, Validity, host_name, load_ca, make_ca

    if renew and force:
        raise UsageError("--renew keeps the CA and --force replaces it", fix="give one of them")
    for name in host or []:
        host_name(name)
    if renew:
        ca = load_ca(_read(directory / "ca.crt"), _read(directory / "ca.key"))
        hosts = [*_hosts_of(directory / "server.crt"), *(host or [])]
        names = _worker_names(workers) if workers else _existing(directory, f"{RANK_PREFIX}*", ANY_RANK)
        names = names or _worker_names(None)
        shard_names = _shard_names(shards) if shards else _existing(directory, f"{SHARD_PREFIX}*")
    else:
        _check_free(directory, force)
        ca = make_ca(f"paramserver {socket.gethostname()}"[:64], Validity.days(CA_DAYS))
        hosts = [*_ANYWHERE, *_own_name(), *(host or [])]
        names, shard_names = _worker_names(workers), _shard_names(shards)
    files = _identities(ca, list(dict.fromkeys(hosts)), names, shard_names, Validity.days(days))
    if not renew:
        files |= _named("ca", ca) | {"token": (f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)}
    _write_all(directory, files, replaces_all=force)
    _say_next(directory, names, shard_names, host or [], renew)


@app.command("show")
def show(directory: DirArgument) -> None:
    """Names and expiry of the certificates in DIR."""
    from datetime import UTC, datetime

    from rich.table import Table

    from ...common.reporting.report import report_console
    from ...common.security import facts_of
    from .authority import is_signed_by

    paths = sorted(directory.glob("*.crt"), key=_by_rank)
    if not paths:
        raise UsageError(f"no certificates in {directory}", fix=f"{PROGRAM} init {directory}")
    ca = _read(directory / "ca.crt") if (directory / "ca.crt").exists() else None
    now = datetime.now(UTC)
    table = Table("file", "name", "for", "valid until (UTC)", "", box=None, header_style="bold", pad_edge=False)
    for path in paths:
        pem = _read(path)
        try:
            facts = facts_of(pem)
        except ValueError:
            table.add_row(path.name, "", "", "", "[red]no certificate[/red]")
            continue
        state = f"{(facts.not_after - now).days} days"
        if facts.problem(now) is not None:
            state = "[red]EXPIRED[/red]" if facts.not_after < now else "[red]not valid yet[/red]"
        if ca is not None and not is_signed_by(pem, ca):
            state += ", [red]not signed by ca.crt[/red]"
        table.add_row(path.name, facts.name, ", ".join(facts.names), f"{facts.not_after:%Y-%m-%d %H:%M}", state)
    report_console().print(table)


# ---- what is there ------------------------------------------------------------------------------


def _check_free(directory: Path, force: bool) -> None:
    ours = _ours(directory)
    if ours and not force:
        raise UsageError(
            f"{directory} holds {ours[0].name} already",
            fix="--renew makes new certificates with the CA that is there; --force replaces everything",
        )


def _ours(directory: Path) -> list[Path]:
    """Files in the directory that this command makes."""
    patterns = ("ca.*", "server.*", "worker.*", "rank-*.*", "shard-*.*")
    found = [path for pattern in patterns for path in directory.glob(pattern) if path.suffix in (".crt", ".key")]
    return sorted(found) + [path for path in [directory / "token"] if path.exists()]


def _hosts_of(path: Path) -> tuple[str, ...]:
    """What the certificate is for; the defaults when there is none."""
    from ...common.security import facts_of

    return facts_of(_read(path)).names if path.exists() else (*_ANYWHERE, *_own_name())


def _existing(directory: Path, *patterns: str) -> list[str]:
    found = [path for pattern in patterns for path in directory.glob(f"{pattern}.crt")]
    return [path.stem for path in sorted(found, key=_by_rank)]


def _by_rank(path: Path) -> tuple[str, int]:
    """rank-10 after rank-9."""
    stem, _, number = path.stem.partition("-")
    return stem, int(number) if number.isdigit() else -1


def _own_name() -> list[str]:
    """This machine's name, where a certificate can hold it."""
    from .authority import host_name

    try:
        host_name(socket.gethostname())
    except UsageError:
        return []
    return [socket.gethostname()]


def _worker_names(workers: int | None) -> list[str]:
    from ...common.security import ANY_RANK, RANK_PREFIX

    return [f"{RANK_PREFIX}{rank}" for rank in range(workers)] if workers else [ANY_RANK]


def _shard_names(shards: int | None) -> list[str]:
    from ...common.security import SHARD_PREFIX

    return [f"{SHARD_PREFIX}{shard}" for shard in range(shards or 0)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}", fix=f"{PROGRAM} init DIR makes a new set") from None


# ---- what is made -------------------------------------------------------------------------------

Files = dict[str, tuple[bytes, int]]  # name -> what it holds, its mode


def _identities(ca: Identity, hosts: list[str], names: list[str], shards: list[str], validity: Validity) -> Files:
    from .authority import make_server, make_shard, make_worker

    files = _named("server", make_server(ca, hosts, validity))
    for name in names:
        files |= _named(name, make_worker(ca, name, validity))
    for name in shards:
        files |= _named(name, make_shard(ca, name, hosts, validity))
    return files


def _named(name: str, identity: Identity) -> Files:
    """The key first: a server that looks in between finds an old certificate with a new key, and waits."""
    return {f"{name}.key": (identity.key_pem, 0o600), f"{name}.crt": (identity.certificate_pem, 0o644)}


def _write_all(directory: Path, files: Files, replaces_all: bool) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, (data, mode) in files.items():
            _write(directory / name, data, mode)
        if replaces_all:
            for path in _ours(directory):
                if path.name not in files:
                    path.unlink()
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror}", fix="choose another directory") from None


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others on the way."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- what to do with it ---------------------------------------------------------------------------


def _say_next(directory: Path, names: list[str], shards: list[str], hosts: list[str], renewed: bool) -> None:
    from ...common.security import SHARD_PREFIX, facts_of

    facts = facts_of(_read(directory / "server.crt"))
    who = ", ".join(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in (shards, names) if group)
    kept = "; the CA and the token are the old ones" if renewed else ", and a token"
    print(f"{directory}: certificates for a server ({', '.join(facts.names)}) and for {who}{kept}")
    print(f"valid until {facts.not_after:%Y-%m-%d}; {PROGRAM} init {directory} --renew makes new ones\n")
    if renewed:
        print("A running server takes the new files for new connections; workers read theirs when they reconnect.")
        print("Copy new worker certificates to the workers' machines.")
        return
    address = hosts[0] if hosts else socket.gethostname()
    address = f"[{address}]" if ":" in address and not address.startswith("[") else address
    first = names[0]
    mutual = ("--set", "security.mutual=true")
    places = ("--shards", str(len(shards))) if shards else ()
    own = shards[0] if shards else "server"
    server = ("ps-server", "--listen", f"0.0.0.0:{_PORT}", *places, *_flags(directory, own), *mutual)
    worker = ("ps-worker", "--server", f"{address}:{_PORT}", *_rank_flag(first), *_flags(directory, first))
    print(f"The server:\n  {shlex.join(server)}\n")
    if shards:
        print(f"Its other shards show {SHARD_PREFIX}N.crt, with --shard N --coordinator {address}:{_PORT}.\n")
    print(f"A worker (its machine needs ca.crt, {first}.crt, {first}.key and token):\n  {shlex.join(worker)}\n")
    print(f"{directory / 'ca.key'} signs new certificates: copy it nowhere.")


def _rank_flag(name: str) -> tuple[str, ...]:
    _, dash, rank = name.partition("-")
    return ("--rank", rank) if dash else ()


def _flags(directory: Path, name: str) -> tuple[str, ...]:
    return (
        "--ca", str(directory / "ca.crt"), "--cert", str(directory / f"{name}.crt"),
        "--key", str(directory / f"{name}.key"), "--token-file", str(directory / "token"),
    )  # fmt: skip


def main() -> None:
    """Entry point of `ps-certs`."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
