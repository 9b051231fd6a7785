"""How the processes of one worker find each other: the address of group rank 0's rendezvous store, and its secret.

On one host both are in a file that only this user can read. Over several hosts the address is in the store that the
environment names (MASTER_ADDR, MASTER_PORT). This is torch's store, which everybody may read and write. So the secret
is derived from the run's token, which each process has. Without a token the secret is in that store too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ...common.config.addresses import join_address
from ...common.errors import AuthError, UsageError
from ...common.reporting.output import write_whole
from ...common.wire.json_text import read_json
from ..strategies.collectives.cut import Address
from ..strategies.group import own_address

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST = 254
_KEY = "rendezvous"
_SIOCGIFADDR = 0x8915  # sockios.h


class Member(NamedTuple):
    """This process's position in its replica group."""

    rank: int  # group rank; 0 has the session with the server
    size: int
    store: Address
    attempt: str  # torchrun's attempt
    is_host: bool  # whether this process serves `store`
    is_on_one_host: bool = False  # whether all processes are

    @property
    def name(self) -> str:
        """A name for this group that is unique on this host."""
        of_host = f"{os.uname().nodename}/{self.store[1]}/" if self.is_on_one_host else ""
        return f"group/{of_host}{self.attempt}"


def find_member(environ: Mapping[str, str]) -> Member:
    """Read torchrun's variables. Raises UsageError if they are missing or wrong."""
    missing = [name for name in _VARIABLES if not environ.get(name)]
    fix = "torchrun --nproc-per-node G -m paramserver.worker --group, or ps-launch --group G"
    if missing:
        raise UsageError(f"worker.group, but {', '.join(missing)} not in the environment: the group rank of this "
                         "process is unknown", fix=fix)  # fmt: skip
    try:
        rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        values = ", ".join(f"{name}={environ[name]}" for name in _VARIABLES)
        raise UsageError(f"worker.group: {values} are not whole numbers", fix=fix) from None
    if not 0 <= rank < size <= _MOST:
        raise UsageError(f"worker.group: RANK is {rank} and WORLD_SIZE {size}; 0..{_MOST} processes, from 0", fix=fix)
    is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = "/".join([environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0")])
    is_on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
    is_host = rank == 0 and not is_agents
    return Member(rank, size, (environ["MASTER_ADDR"], port), attempt, is_host, is_on_one_host)


class Rendezvous:
    """The meeting point of the processes of this worker. Group rank 0 calls `publish`, the others `look_up`."""

    def __init__(self, member: Member, token: str | None) -> None:
        """`token`: the run's."""
        self._member = member
        self._secret = b""  # derived from the token; empty without a token, or on one host
        if token is not None and not member.is_on_one_host:
            self._secret = hmac.digest(token.encode(), member.name.encode(), "sha256")
        self._file = Path()
        if member.is_on_one_host:
            self._file = _folder() / hashlib.sha256(member.name.encode()).hexdigest()[:24]
        self._store: dist.Store | None = None  # the store that the environment names

    @property
    def host(self) -> str:
        """The address of this process that the others can reach."""
        return "127.0.0.1" if self._member.is_on_one_host else own_address(join_address(*self._member.store))

    def publish(self, address: Address) -> bytes:
        """Publish the rendezvous store's address. Returns its secret. Raises RuntimeError."""
        secret = self._secret or secrets.token_bytes(32)
        value = json.dumps({"address": address, "secret": "" if self._secret else secret.hex()})
        if self._member.is_on_one_host:
            write_whole(self._file, value.encode(), mode=0o600, is_synced=False)
        else:
            self._named_store(timeout_s=60.0).set(_KEY, value)
        return secret

    def look_up(self, timeout_s: float) -> tuple[Address, bytes]:
        """Return the address and the secret of the rendezvous store.

        Raises OSError if they are not published yet, and RuntimeError if the environment's store is not reached in
        `timeout_s`.
        """
        if self._member.is_on_one_host:
            value = read_json(self._file.read_text())
        else:
            store = self._named_store(timeout_s)
            if not store.check([_KEY]):
                raise FileNotFoundError("group rank 0 has not published its address")
            value = read_json(store.get(_KEY))
        host, port = value["address"]
        return (str(host), int(port)), self._secret or bytes.fromhex(value["secret"])

    def leave(self) -> None:
        """All processes have arrived: remove what was published."""
        self._store = None
        if self._member.rank == 0 and self._member.is_on_one_host:
            self._file.unlink(missing_ok=True)

    def _named_store(self, timeout_s: float) -> dist.Store:
        """Connect to the store that the environment names, and serve it if this process should.

        It listens on this process's own address, where a script's `init_process_group()` finds it.
        """
        if self._store is None:
            member, address, options = self._member, self.host, dict[str, Any]()
            host, port = member.store
            if member.is_host:  # the script may have created it before
                with contextlib.suppress(OSError):
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    options = {"master_listen_fd": socket.create_server((address, port), family=family).detach()}
            found = dist.TCPStore(
                host, port, is_master=member.is_host, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
                multi_tenant=True, **options,
            )  # fmt: skip
            self._store = dist.PrefixStore(f"paramserver/{member.attempt}", found)
        return self._store


def interface_of(host: str) -> str | None:
    """Name of the network interface with this address; None: unknown (Linux, IPv4)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    return None


def _folder() -> Path:
    """A folder that only this user can access. Raises AuthError if another user can."""
    folder = Path(tempfile.gettempdir()) / f"paramserver-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        message = f"{folder}: {error.strerror}; the processes of a worker find each other there"
        raise AuthError(message, fix="set TMPDIR to a folder of your own") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        message = f"{folder}, where the processes of a worker find each other, can be read or written by other users"
        raise AuthError(message, fix="remove it, or set TMPDIR to a folder of your own")
    return folder
