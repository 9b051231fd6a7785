"""The processes of a worker among themselves, by torch.distributed: NCCL where each has a GPU of its own, else Gloo.

The groups are our own, made of a store of our own (`rendezvous.py`): a script's `init_process_group()` is left alone,
and may come before or after.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ...common.errors import MismatchError, UnreachableError, UsageError
from ...common.reporting.log import get_logger
from ...common.wire.json_text import read_json
from ..conversation.security import check_plaintext
from ..strategies.collectives import backends
from ..strategies.collectives.cut import Address
from ..strategies.collectives.handshake import Kind, connect
from ..strategies.collectives.store import Store, StoreServer
from .channel import Channel, first_line
from .rendezvous import Member, Place, interface_of
from .watch import Watch

log = get_logger()

_BUCKET_BYTES = 25 << 20  # that are reduced at once, as in DDP
# For one collective: nobody waits so long for one that is dead, which the watch says.
_TIMEOUT_S = 6 * 3600.0


class Group(Channel):
    """This process's side of it, used by the training thread alone. Blocking; UnreachableError when it is over."""

    def __init__(
        self, member: Member, device: str, settings: Mapping[str, Any], wait_s: float,
        token: str | None = None, trusts_network: bool = False,
    ) -> None:  # fmt: skip
        """Returns when all are here. `device` is this process's; `settings`, dotted, must be the same in all; `token`
        is the run's. Raises UnreachableError (who is missing), MismatchError, AuthError."""
        if not (dist.is_available() and dist.is_gloo_available()):
            raise UsageError(f"worker.group: torch {torch.__version__} is without Gloo", fix="install one that has it")
        self._flat: dict[tuple[Any, ...], torch.Tensor] = {}
        self.rank, self.size = member.rank, member.size
        self._watch = Watch(self.rank, self.size)
        until = time.monotonic() + wait_s
        place = Place(member, token)
        self._host = host = place.host
        check_plaintext(host, "the processes of this worker", trusts_network, "or keep them on one host")
        self._server = server = StoreServer(host) if member.is_leader else None
        try:
            self._store = self._store_of(member, place, server, wait_s)
            told = {"device": backends.device_name(torch.device(device)), "settings": settings}
            found = self._all(self._store, json.dumps(told, default=str), until, wait_s)
            _compare([text["settings"] for text in found], self.rank)
            left_s = max(1.0, until - time.monotonic())
            if server is not None:
                self._watch.accept(server.peers, left_s)
            else:
                find = partial(place.look_up, left_s)
                self._watch.begin({0: connect(find, Kind.PEER, self.rank, member.name, left_s)})
        except (OSError, queue.Empty) as error:
            raise UnreachableError(f"group rank {self.rank}: no connection with group rank 0: {error}") from None
        finally:
            place.leave()
        self.backend = backends.backend_of([text["device"] for text in found])
        self._device = torch.device(device if self.backend == "nccl" else "cpu")  # of what goes from one to another
        at = dist.ProcessGroupGloo.create_device(hostname=host)
        self._open = lambda name: backends.gloo(self.apart(name), self.rank, self.size, at, _TIMEOUT_S)
        super().__init__(self._open("words"), self.rank, self.size)
        self._data = self._words
        if self.backend == "nccl":
            apart = self.apart("data")
            undo = backends.without_watchdog()
            try:
                self._data = backends.nccl(apart, self.rank, self.size, self._device, _TIMEOUT_S)
            except RuntimeError as error:
                raise UnreachableError(
                    f"group rank {self.rank}: NCCL makes no group of the {self.size} processes: {first_line(error)}",
                    fix="NCCL_DEBUG=WARN in the environment says more; each process needs a GPU of its own",
                ) from None
            finally:
                undo()
        if reason := backends.why_not_nccl([text["device"] for text in found]):
            log.info("not_over_nccl", inner=self.rank, reason=reason)
        log.routine("worker_group", inner=self.rank, of=self.size, backend=self.backend)

    def _store_of(self, member: Member, place: Place, server: StoreServer | None, wait_s: float) -> Store:
        """Of group rank 0. UnreachableError."""
        find: Callable[[], tuple[Address, bytes]] = partial(place.look_up, wait_s)
        try:
            if server is not None:
                found = server.address, place.publish(server.address)
                server.admit(member.name, found[1])
                find = lambda: found  # noqa: E731
            return Store(find, member.name, member.rank, wait_s)
        except (OSError, RuntimeError) as error:
            raise UnreachableError(
                f"group rank {member.rank}: group rank 0 did not come: nobody at {member.store[0]}:{member.store[1]} "
                f"(MASTER_ADDR, MASTER_PORT) for {wait_s:g} s: {first_line(error)}",
                fix="let all processes of the worker be started, group rank 0 among them",
            ) from None

    def _all(self, store: Store, told: str, until: float, wait_s: float) -> list[dict[str, Any]]:
        """What each said."""
        missing = list(range(self.size))
        try:
            store.set(f"here/{self.rank}", told)
            while missing and time.monotonic() < until:
                with suppress(dist.DistStoreError):
                    left_s = min(1.0, max(0.001, until - time.monotonic()))
                    store.wait([f"here/{number}" for number in missing], timedelta(seconds=left_s))
                missing = [number for number in missing if not store.check([f"here/{number}"])]
            found = [store.get(f"here/{item}") for item in range(self.size) if item not in missing]
        except RuntimeError as error:  # also where group rank 0 has read all, found fault, and gone with its store
            raise UnreachableError(
                f"group rank {self.rank}: the others are gone: {first_line(error)}", fix="their own lines say why"
            ) from None
        if missing:
            raise UnreachableError(
                f"group rank {', '.join(map(str, missing))} of {self.size} did not come in {wait_s:g} s "
                f"(worker.give_up_s), and group rank {self.rank} waits no longer",
                fix="see that each process gets as far as connect(), and what the missing one says",
            )
        return [read_json(item, nan=True) for item in found]

    # ---- tensors ------------------------------------------------------------------------------

    def average(self, tensors: Sequence[torch.Tensor], share: float) -> None:
        """In their place the sum over all processes, each multiplied by its `share`."""
        works: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []
        for number, bucket in enumerate(_buckets(tensors)):
            flat = self._flat_of(("mean", number), bucket)
            for view, item in zip(_views(flat, bucket), bucket, strict=True):
                _put(view, item, share)
            works.append((self._begin(lambda flat=flat: self._data.allreduce([flat])), flat, bucket))  # type: ignore[misc]
        for work, flat, bucket in works:
            self._wait(lambda work=work: work)  # type: ignore[misc]
            for view, item in zip(_views(flat, bucket), bucket, strict=True):
                item.copy_(view)

    def sum_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all processes, on the device of this one's."""
        found = tensor.detach().to(self._device, copy=True).contiguous()
        self._wait(lambda: self._data.allreduce([found]))
        return found.to(tensor.device)

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Group rank 0's, to the others, in the place of theirs."""
        for bucket in _buckets(tensors):
            flat = self._flat_of(("give",), bucket)
            if self.rank == 0:
                for view, number in zip(_views(flat, bucket), bucket, strict=True):
                    view.copy_(number)
            self._broadcast(flat, self._data)
            if self.rank:
                for view, number in zip(_views(flat, bucket), bucket, strict=True):
                    number.copy_(view)

    def _flat_of(self, place: tuple[Any, ...], bucket: Sequence[torch.Tensor]) -> torch.Tensor:
        """Memory for them where this group's tensors go from, kept."""
        dtype, size = bucket[0].dtype, sum(tensor.numel() for tensor in bucket)
        key = (*place, dtype)
        if len(self._flat.get(key, ())) < size:
            self._flat[key] = torch.empty(size, dtype=dtype, device=self._device)
        return self._flat[key][:size]

    def channel(self, name: str) -> Channel:
        """Another one, for another thread. All processes ask for it."""
        return Channel(self._open(name), self.rank, self.size)

    def apart(self, name: str) -> dist.Store:
        """Keys that no other group of torch's uses."""
        return dist.PrefixStore(name, self._store)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Groups that torch makes meanwhile listen on this group's address; without it, on that of the host's name.
        On the main thread."""
        name = "GLOO_SOCKET_IFNAME"
        found = None if name in os.environ else interface_of(self._host)
        if found is not None:
            os.environ[name] = found
        try:
            yield
        finally:
            if found is not None:
                del os.environ[name]

    def expect(self, lease_s: float) -> None:
        """Group rank 0's: nobody may be silent for longer from here on."""
        self._watch.expect(lease_s)

    def end(self) -> None:
        """Each may go when it likes."""
        self._watch.end()


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device; in all processes the same."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        cuts, size = [0], 0
        for index, tensor in enumerate(same):
            size += tensor.nbytes
            if size >= _BUCKET_BYTES:
                cuts.append(index + 1)
                size = 0
        cuts += [len(same)] if cuts[-1] < len(same) else []
        yield from (same[start:end] for start, end in pairwise(cuts))


def _put(view: torch.Tensor, tensor: torch.Tensor, share: float) -> None:
    if tensor.device == view.device:
        torch.mul(tensor, share, out=view)
    else:
        view.copy_(tensor).mul_(share)


def _views(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    at = 0
    for tensor in bucket:
        yield flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()


def _compare(settings: Sequence[Mapping[str, Any]], rank: int) -> None:
    """MismatchError, in every process, where not all were told the same."""
    for other, theirs in enumerate(settings):
        for key in sorted({*theirs, *settings[0]}):
            if theirs.get(key) != settings[0].get(key):
                raise MismatchError(
                    f"group rank {rank}: the processes of one worker were told different things: {key} is "
                    f"{theirs.get(key)} in group rank {other} and {settings[0].get(key)} in group rank 0",
                    fix="give all of them the same options and variables",
                )
