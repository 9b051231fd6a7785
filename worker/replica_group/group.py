"""The process group of one worker's processes, with torch.distributed: NCCL if each has its own GPU, else Gloo.

The torch groups use a store of our own (see "rendezvous" below). So a script's `init_process_group()` is not affected,
and may come before or after.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...common.config.addresses import join_address
from ...common.errors import AuthError, MismatchError, ParamServerError, UnreachableError, UsageError
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_whole
from ...common.wire.json_text import read_json
from ..conversation.channel import check_plaintext
from ..strategies.buckets import Plan, packed, unpack
from ..strategies.collectives import backends
from ..strategies.collectives.backends import collected, first_line
from ..strategies.collectives.store import Address, Find, Kind, Store, StoreServer, connect
from ..strategies.group import own_address
from .watch import Watch

log = get_logger()

_HEAD_BYTES = 2048  # first part of a message of group rank 0; a longer message takes a second broadcast
WATCH_S = 1.0  # in which the watch ends this process with a message that names a lost one
# For one collective. The watch notices a dead process much earlier.
_TIMEOUT_S = 6 * 3600.0


class Channel:
    """Messages and collectives over `torch_group`, a process group of torch.

    Blocks. Raises UnreachableError when the group has ended.
    """

    def __init__(self, torch_group: Any, rank: int, size: int) -> None:
        self._torch_group, self.rank, self.size = torch_group, rank, size

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather equally many numbers from each process. Numbers are exact up to 2^53."""
        local = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        found = [torch.empty_like(local) for _ in range(self.size)]
        self.wait([self._begin(lambda: self._torch_group.allgather([found], [local]))])
        return [item.tolist() for item in found]

    def send_all(self, message: Mapping[str, Any]) -> None:
        """Send a message from group rank 0 to all others."""
        payload = json.dumps(message).encode()
        payload = len(payload).to_bytes(8, "little") + payload.ljust(_HEAD_BYTES - 8)
        for part in filter(None, (payload[:_HEAD_BYTES], payload[_HEAD_BYTES:])):
            self.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), self._torch_group)

    def receive_message(self) -> dict[str, Any]:
        """Receive the next message of group rank 0. If the message is an error, raise it."""
        first = torch.zeros(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
        self.broadcast(first, self._torch_group)
        begin = first.numpy().tobytes()
        size = int.from_bytes(begin[:8], "little")
        payload = begin[8 : 8 + size]
        if len(payload) < size:
            rest = torch.empty(size - len(payload), dtype=torch.uint8, device="cpu")
            self.broadcast(rest, self._torch_group)
            payload += rest.numpy().tobytes()
        message: dict[str, Any] = read_json(payload, nan=True)
        if "error" in message:
            ended = ParamServerError(f"group rank {self.rank}: group rank 0 has ended: {message['error']}")
            ended.exit_code = message["exit_code"]
            raise ended
        return message

    def send_error(self, error: ParamServerError) -> None:
        """Send the error that ends group rank 0, so that the others end too."""
        self.send_all({"error": error.message, "exit_code": error.exit_code})

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start sending a contiguous host tensor. Returns a work for `wait`."""
        return self._begin(lambda: self._torch_group.send([tensor], rank, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start receiving into a tensor. Returns a work for `wait`."""
        return self._begin(lambda: self._torch_group.recv([tensor], source, tag))

    def broadcast(self, tensor: torch.Tensor, torch_group: Any) -> None:
        """Copy group rank 0's tensor to all others."""
        self.wait([self._begin(lambda: torch_group.broadcast([tensor], backends.broadcast_from(0)))])

    def wait(self, works: Iterable[Any]) -> None:
        """Block until all works are done."""
        for work in works:
            self._begin(work.wait)

    def _begin(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:
            time.sleep(WATCH_S)
            message = f"the {self.size} processes of this worker lost each other: {first_line(error)}"
            raise UnreachableError(f"group rank {self.rank}: {message}") from None


class Group(Channel):
    """One process's view of its replica group. Used by the training thread only.

    Blocks. Raises UnreachableError when the group has ended.
    """

    def __init__(
        self, member: Member, device: str, settings: Mapping[str, Any], wait_s: float,
        token: str | None = None, trusts_network: bool = False,
    ) -> None:  # fmt: skip
        """Form the group. Blocks until all processes have arrived.

        `device`: this process's. `settings`, with dotted keys, must be equal in all processes. `token`: the run's.
        Raises UnreachableError (it names missing processes), MismatchError, AuthError.
        """
        if not (dist.is_available() and dist.is_gloo_available()):
            message = f"worker.group: torch {torch.__version__} is without Gloo"
            raise UsageError(message, fix="install a torch with Gloo")
        self._memory: dict[int, dict[torch.dtype, torch.Tensor]] = {}  # for averages, by the number of tensors
        self.rank, self.size = member.rank, member.size
        self.device = torch.device(device)
        self.watch = Watch(self.rank, self.size)
        until = time.monotonic() + wait_s
        rendezvous = Rendezvous(member, token)
        self._host = host = rendezvous.host
        check_plaintext(host, "the processes of this worker", trusts_network, "or keep them on one host")
        self._server = server = StoreServer(host) if member.rank == 0 else None
        try:
            info = {"device": backends.device_name(self.device), "settings": settings}
            found = self._meet(member, rendezvous, json.dumps(info, default=str), wait_s)
            _compare([item["settings"] for item in found], self.rank)
            left_s = max(1.0, until - time.monotonic())
            if server is not None:
                self.watch.accept(server.peers, left_s)
            else:
                find = partial(rendezvous.look_up, left_s)
                self.watch.begin({0: connect(find, Kind.PEER, self.rank, member.name, left_s)})
        except (OSError, queue.Empty) as error:
            raise UnreachableError(f"group rank {self.rank}: no connection with group rank 0: {error}") from None
        finally:
            rendezvous.leave()
        self.backend = backends.backend_of([item["device"] for item in found])
        # for tensors that travel between processes
        self._device = torch.device(device if self.backend == "nccl" else "cpu")
        at = dist.ProcessGroupGloo.create_device(hostname=host)
        part_of = partial(dist.PrefixStore, store=self._store)  # that no other torch group uses
        self._open = lambda name: backends.gloo(part_of(name), self.rank, self.size, at, _TIMEOUT_S)
        self._torch_group = self._data = self._open("metadata")
        if self.backend == "nccl":
            undo = backends.without_watchdog()
            try:
                self._data = backends.nccl(part_of("data"), self.rank, self.size, self._device, _TIMEOUT_S)
            except RuntimeError as error:
                message = f"group rank {self.rank}: NCCL could not group {self.size} processes: {first_line(error)}"
                fix = "NCCL_DEBUG=WARN in the environment shows more; each process needs its own GPU"
                raise UnreachableError(message, fix=fix) from None
            finally:
                undo()
        if reason := backends.why_not_nccl([item["device"] for item in found]):
            log.info("not_over_nccl", group_rank=self.rank, reason=reason)
        log.routine("worker_group", group_rank=self.rank, of=self.size, backend=self.backend)

    def _meet(self, member: Member, rendezvous: Rendezvous, info: str, wait_s: float) -> list[dict[str, Any]]:
        """Connect to group rank 0's store. Returns the info of each process, by group rank. Raises UnreachableError."""
        until = time.monotonic() + wait_s
        find: Find = partial(rendezvous.look_up, wait_s)
        try:
            if self._server is not None:
                address = self._server.address, rendezvous.publish(self._server.address)
                self._server.admit(member.name, address[1])
                find = lambda: address  # noqa: E731
            store = self._store = Store(find, member.name, member.rank, wait_s)
        except (OSError, RuntimeError) as error:
            at = f"{member.store[0]}:{member.store[1]} (MASTER_ADDR, MASTER_PORT) for {wait_s:g} s"
            message = f"group rank {member.rank}: no reply from group rank 0 at {at}: {first_line(error)}"
            raise UnreachableError(message, fix="start all processes of the worker, including group rank 0") from None
        try:
            store.set(f"here/{self.rank}", info)
            found, missing = collected(store, "here", range(self.size), self.rank, until - time.monotonic())
        except RuntimeError as error:  # also if group rank 0 found a difference and ended with its store
            message = f"group rank {self.rank}: the other processes ended: {first_line(error)}"
            raise UnreachableError(message, fix="see their own log lines") from None
        if missing:
            late = f"group rank {', '.join(map(str, missing))} of {self.size} did not come in {wait_s:g} s"
            message = f"{late} (worker.give_up_s), so group rank {self.rank} gives up"
            fix = "see that each process reaches connect(), and what the missing one logs"
            raise UnreachableError(message, fix=fix)
        return [read_json(item, nan=True) for item in found]

    # ---- tensors ------------------------------------------------------------------------------

    def average(self, tensors: Sequence[torch.Tensor], share: float) -> None:
        """Replace each tensor by its weighted sum over all processes. `share`: this process's weight."""
        by_index, memory = dict(enumerate(tensors)), self._memory.setdefault(len(tensors), {})
        plan = Plan(by_index, share, True, memory, self._device, checks=False)
        buckets = (plan.gather(number, by_index) for number in range(len(plan.buckets)))
        works = [self._begin(partial(self._data.allreduce, [bucket])) for bucket in buckets]
        for work, (indices, _) in zip(works, plan.buckets, strict=True):
            self.wait([work])
            for index in indices:
                tensors[index].copy_(plan.places[index])

    def sum_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, on the tensor's device."""
        found = tensor.detach().to(self._device, copy=True).contiguous()
        self.wait([self._begin(lambda: self._data.allreduce([found]))])
        return found.to(tensor.device)

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy group rank 0's tensors to those of the others."""
        packs = packed(tensors, lambda tensor: tensor.device == self._device, self._device)
        for flat, _ in packs:
            self.broadcast(flat, self._data)
        if self.rank:
            unpack(packs)

    def channel(self, name: str) -> Channel:
        """Open another channel, for another thread. All processes must call it."""
        return Channel(self._open(name), self.rank, self.size)

    def init_torch(self, timeout: timedelta | None = None) -> None:
        """Let torch's default process group be of these processes, if the script has made none. Main thread only."""
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, hook, variable = dist.PrefixStore("model", self._store), sys.excepthook, "GLOO_SOCKET_IFNAME"
        # It listens on this group's address, not on the host name's.
        interface = None if variable in os.environ else interface_of(self._host)
        if interface is not None:
            os.environ[variable] = interface
        try:
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        finally:
            if interface is not None:
                del os.environ[variable]
        sys.excepthook = hook  # torch's would lose what ours says: it ends the process


def _compare(settings: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raises MismatchError, in every process, if settings differ."""
    first = settings[0]
    for other, theirs in enumerate(settings):
        if key := next((key for key in sorted({*theirs, *first}) if theirs.get(key) != first.get(key)), None):
            message = f"group rank {rank}: the processes of one worker have different settings: {key} is"
            message += f" {theirs.get(key)} in group rank {other} and {first.get(key)} in group rank 0"
            raise MismatchError(message, fix="give all of them the same options and variables")


# ---- rendezvous ----------------------------------------------------------------------------------
# How the processes of one worker find each other: the address of group rank 0's rendezvous store, and its secret.
#
# On one host both are in a file that only this user can read. Over several hosts the address is in the store that the
# environment names (MASTER_ADDR, MASTER_PORT). This is torch's store, which everybody may read and write. So the
# secret is derived from the run's token, which each process has. Without a token the secret is in that store too.


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
