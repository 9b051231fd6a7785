"""The process group of one worker's processes, with torch.distributed: NCCL if each has its own GPU, else Gloo.

The torch groups use a store of our own (`rendezvous.py`). So a script's `init_process_group()` is not affected, and may
come before or after.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...common.errors import MismatchError, ParamServerError, UnreachableError, UsageError
from ...common.reporting.log import get_logger
from ...common.wire.json_text import read_json
from ..conversation.security import check_plaintext
from ..strategies.buckets import Plan, packed, unpack
from ..strategies.collectives import backends
from ..strategies.collectives.rendezvous import collected, first_line
from ..strategies.collectives.store import Find, Kind, Store, StoreServer, connect
from .rendezvous import Member, Rendezvous, interface_of
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
