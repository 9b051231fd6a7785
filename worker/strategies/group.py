"""All-reduce peers: one group of torch.distributed per generation.

A *generation* is an ordered set of members, and the store at which they find each other. A group forms whenever a
member joins or leaves (13 ms on one host; 72 ms for the first one). Each group has its own prefix in the store and no
global process group. So nothing of torch's has to be torn down, and a script's own `torch.distributed` is not touched.

`average` reads the tensors and writes to its own memory. If a member is killed during it, the others get an error
(`Broken`) and still have their tensors, which they average in the next generation. A member that fails closes its group
at once, because another member may be waiting for it instead of the dead one.

Averages use NCCL, in GPU memory, if each member has its own GPU (`collectives/backends.py`). Metadata and tensors for a
new member use Gloo. Metadata are exchanged in each step, so a death is noticed there. NCCL's operations end when the
group is closed, or when another thread calls `cut` after the server reported the death.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...common.config.addresses import split_address
from ...common.errors import shown
from ...common.wire.json_text import read_json
from ..tensors.packed import put_together, take_apart
from .buckets import Plan, packed, unpack
from .collectives import backends
from .collectives.backends import Broken, Generation, MemberInfo, Rendezvous, come_together, first_line, store_of
from .collectives.store import Address, cut, listening

_MEET_S = 10.0  # for all members of a generation to arrive
# For one collective. A member that waits longer reports it to the server, which knows whether the slow member is alive.
_TIMEOUT_S = 30.0
_END_S = 0.2
_HOST = torch.device("cpu")


class Unsound(Exception):
    """The tensor of this index has NaN or Inf, so the mean would have it too."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class _Closed(Exception):
    """Another thread closed or cut the group."""


class Announced(NamedTuple):
    """The announcements of all members for one average."""

    samples: tuple[int, ...]  # by member
    present: tuple[int, ...]  # indices of tensors that at least one member has


class Group:
    """One member's view of its generation's group. Used by one thread; `average` blocks."""

    num_broadcast = 0  # bytes of the newest `broadcast_values`
    metadata: Sequence[list[int]] = ()  # of the newest average: [word][member]
    like: Sequence[torch.Tensor] = ()  # for each tensor, a tensor of its shape and dtype
    order: Sequence[int] = ()  # in which tensors are sent; empty: as given
    of_lowest: Container[int] = ()  # tensors that come from the lowest rank
    of_sum: Container[int] = ()  # tensors that are summed, not averaged

    def __init__(
        self, generation: Generation, rank: int, rendezvous: Rendezvous, device: torch.device = _HOST,
        timeout_s: float = _TIMEOUT_S, meet_s: float = _MEET_S,
    ) -> None:  # fmt: skip
        """Form the group. Blocks until all members have arrived.

        `rendezvous` is this member's; `device` is its model's. Raises Broken if a member does not arrive within
        `meet_s` (the message names it), OutOfReach if a member cannot be reached.
        """
        self.generation, self.index = generation, generation.members.index(rank)
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._under_way: list[Any] = []  # running works of torch
        self._plan: Plan | None = None  # order of the next tensors, known before all members announce their samples
        self._announced: Announced | None = None  # of the newest average
        self._has_missed = False
        self._num_left, self._ready = 0, dict[int, torch.Tensor]()  # buckets that were sent; tensors that are `ready`
        self.num_sent = 0.0  # bytes; for sums of large tensors as in a ring
        self._reason = ""  # why the group ended
        self._timeout_s = timeout_s
        self._ends: set[Address] = set()  # addresses at which members' devices listen
        rendezvous.admit(generation.full_name, generation.secret)
        store = self._store = store_of(generation, rank, meet_s)  # kept here, because torch's groups keep no reference
        host = rendezvous.address[0]
        try:
            gloo, port = listening(lambda: dist.ProcessGroupGloo.create_device(hostname=host))
            local = MemberInfo(backends.device_name(device), rendezvous.address, (host, port))
            members = come_together(store, generation, rank, local, meet_s)
        except Broken:
            store.close()
            raise
        self._ends.update(member.listens for member in members)
        devices = [member.device for member in members]
        self.backend, self.not_over_nccl = backends.backend_of(devices), backends.why_not_nccl(devices)
        self._device = device if self.backend == "nccl" else _HOST  # for averages
        size = len(generation.members)
        try:
            self._metadata = backends.gloo(store, self.index, size, gloo, meet_s)
            self._metadata._set_default_timeout(timedelta(seconds=timeout_s))
            self._data = self._metadata
            if self.backend == "nccl":
                self._data = backends.nccl(dist.PrefixStore("data", store), self.index, size, device, timeout_s)
        except RuntimeError as error:
            self.close()
            raise Broken(f"generation {generation.number}: {first_line(error)}") from None

    # ---- averages -----------------------------------------------------------------------------

    def average(
        self,
        tensors: Sequence[torch.Tensor | None],
        num_samples: int,
        metadata: Sequence[int] = (),
        is_right: bool = True,
    ) -> list[torch.Tensor | None]:
        """Return the mean of each tensor over all members, weighted by samples; None: no member has the tensor.

        A member without a tensor counts as zeros. Integers, and tensors in `of_lowest`, come from the lowest rank.
        Tensors in `of_sum` are summed. The inputs stay unchanged. The next `average` or `ready` overwrites the result.

        All members pass tensors of the same shapes and dtypes in the same order, and equally many `metadata`.
        Afterwards `self.metadata` has those of all members. If all members announced the same samples before,
        announcement and tensors are sent together. `is_right`: the tensors given to `ready` have not changed since.
        Raises Broken if the group ended, and Unsound if a tensor of this member is not finite.
        """
        by_index, guess = dict(enumerate(tensors)), self._plan
        is_right |= not self._num_left
        if guess is not None:
            self._leave_all(guess, by_index, is_right)
        announced, all_are_right = self.announce(tensors, num_samples, metadata, is_right)
        plan = guess if all_are_right and announced == self._announced else None
        is_hit = plan is not None
        if plan is None:
            present, like = set(announced.present), dict[int, torch.Tensor]()
            for index in self.order or range(len(tensors)):
                if index in present:
                    tensor = by_index[index]
                    like[index] = self.like[index] if tensor is None else tensor
            share = announced.samples[self.index] / sum(announced.samples)
            plan = Plan(like, share, self.index == 0, self._flat, self._device, self.of_lowest, self.of_sum)
            self._leave_all(plan, by_index)
            self._end_works()
        self._has_missed |= guess is not None and not is_hit
        # After a wrong guess, guess only announcements that came twice in a row. All members decide alike.
        self._plan = plan if not self._has_missed or announced == self._announced else None
        self._announced = announced
        return [plan.places.get(index) for index in range(len(tensors))]

    def gather_payloads(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Gather the payload of each member, uint8 [n], by index; all have the same size. Raises Broken."""
        found = [torch.empty_like(payload) for _ in self.generation.members]
        self.num_sent += payload.nbytes * (len(found) - 1)
        self._wait(lambda: self._torch_group("_metadata").allgather([found], [payload]).wait())
        return found

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        """A tensor of the next average is finished. Its bucket is sent when it is full."""
        plan = self._plan
        if plan is None or gradient.device != self._device:  # copying each tensor from a GPU to the host would block
            return
        self._ready[index] = gradient
        with suppress(Broken):  # `average` raises it again
            while self._num_left < len(plan.buckets) and self._ready.keys() >= set(plan.buckets[self._num_left][0]):
                self._leave(plan, self._ready)

    def _leave(self, plan: Plan, tensors: Mapping[int, torch.Tensor | None]) -> None:
        number, self._num_left = self._num_left, self._num_left + 1
        self._begin_sum(plan.gather(number, tensors))

    def _leave_all(self, plan: Plan, tensors: Mapping[int, torch.Tensor | None], is_right: bool = True) -> None:
        """Send the remaining buckets. While one is being summed, the next is gathered."""
        while self._num_left < len(plan.buckets):
            self._leave(plan, tensors)
        self._num_left, self._ready = 0, {}
        unsound = plan.unsound(tensors)
        if unsound is not None and is_right:
            raise Unsound(unsound)

    def announce(
        self, tensors: Sequence[torch.Tensor | None], num_samples: int, metadata: Sequence[int], is_right: bool = True
    ) -> tuple[Announced, bool]:
        """Exchange announcements for an average. Raises Broken.

        Returns those of all members, and whether all members' early tensors are right.
        """
        size = len(self.generation.members)
        words = [word * (index == self.index) for word in (num_samples, *metadata) for index in range(size)]
        present = [tensor is not None for tensor in tensors]
        sums = torch.tensor([not is_right, *present, *words], dtype=torch.int64, device="cpu")
        self._begin(lambda: self._sum_of(sums, "_metadata"))
        self._end_works()
        num_wrong, *found = sums.tolist()
        with_any = tuple(index for index, count in enumerate(found[: len(tensors)]) if count)
        found = found[len(tensors) :]
        samples, *self.metadata = (found[at : at + size] for at in range(0, len(found), size))
        return Announced(tuple(samples), with_any), not num_wrong

    # ---- broadcasts ---------------------------------------------------------------------------

    def gather_numbers(self, number: int) -> list[int]:
        """The number of each member, by index."""
        numbers = torch.zeros(len(self.generation.members), dtype=torch.int64, device="cpu")
        numbers[self.index] = number
        self._wait(lambda: self._sum_of(numbers, "_metadata").wait())
        return numbers.tolist()

    def broadcast_values(self, values: Mapping[str, Any] | None, source: int) -> dict[str, Any]:
        """Return the values of member `source`: tensors on the host, and JSON (`tensors/packed.py`).

        The source gets its own tensors back.
        """
        tree, tensors = take_apart(values) if values is not None else ({}, {})
        forms = {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()}
        head = bytearray(json.dumps([tree, forms], separators=(",", ":")).encode())
        num_bytes = self.gather_numbers(len(head))[source]
        if values is not None:
            text = torch.frombuffer(head, dtype=torch.uint8)
        else:
            text = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._wait(lambda: self._broadcast(text, source).wait())
        if values is None:
            tree, forms = read_json(text.numpy().tobytes(), nan=True, big=True)
            tensors = {
                name: torch.empty(shape, dtype=_dtype(dtype), device="cpu") for name, (dtype, shape) in forms.items()
            }
        pieces: list[list[torch.Tensor]] = [[] for _ in self.generation.members]
        # Gloo does not support all dtypes
        pieces[source] = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        self.num_sent += num_bytes * (source == self.index)
        self.num_broadcast = num_bytes + sum(piece.numel() for piece in pieces[source])
        self.broadcast_tensors(pieces)
        return put_together(tree, tensors)

    def broadcast_tensors(self, pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy the tensors of each member, `pieces[index]`, to the corresponding tensors of all others."""
        packs = []
        for owner, tensors in enumerate(pieces):
            for flat, parts in packed(tensors, lambda tensor: tensor.device.type == "cpu", _HOST):
                self.num_sent += flat.nbytes * (owner == self.index)
                self._begin(partial(self._broadcast, flat, owner))
                packs.append((flat, parts if owner != self.index else []))
        self._end_works()
        unpack(packs)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        return self._torch_group("_metadata").broadcast([tensor], backends.broadcast_from(source))

    # ---- torch's groups -----------------------------------------------------------------------

    def _begin_sum(self, tensor: torch.Tensor) -> None:
        self._begin(lambda: self._sum_of(tensor, "_data"))

    def _sum_of(self, tensor: torch.Tensor, name: str) -> Any:
        """Start a sum over the torch group with this name."""
        size, over = len(self.generation.members), self._torch_group(name)
        if over is self._torch_group("_metadata") and backends.is_small(tensor.nbytes, size):
            self.num_sent += tensor.nbytes * (1 if self.index else size - 1)
            return backends.Small(lambda: self._torch_group(name), tensor, self.index, size, self._timeout_s)
        self.num_sent += 2 * tensor.nbytes * (size - 1) / size
        return over.allreduce([tensor])

    def _begin(self, collective: Callable[[], Any]) -> None:
        self._wait(lambda: self._under_way.append(collective()))

    def _end_works(self) -> None:
        """Wait for all running works. The metadata among them show whether a member is gone."""
        while self._under_way:
            self._wait(lambda: self._oldest().wait())
        backends.computed(self._device)
        self._wait(lambda: self._torch_group("_data"))  # aborted works have ended too

    def _oldest(self) -> Any:
        try:
            return self._under_way.pop(0)
        except IndexError:
            raise _Closed from None

    def _torch_group(self, name: str) -> Any:
        """The torch group in this attribute. Raises _Closed."""
        try:
            return self.__dict__[name]
        except KeyError:
            raise _Closed from None

    def _wait(self, collective: Callable[[], Any]) -> None:
        """Run a collective. Raises Broken if torch or another thread has ended the group; other errors are bugs."""
        try:
            collective()
        except (RuntimeError, _Closed) as error:
            message = "it was closed by another thread" if isinstance(error, _Closed) else first_line(error)
            self._reason = self._reason or message
            self.close()
            raise Broken(f"generation {self.generation.number}: {self._reason}") from None

    def cut(self, reason: str) -> None:
        """End every wait in this group with Broken and this reason. Any thread may call it."""
        self._reason = self._reason or reason
        cut(self._ends)
        data = self.__dict__.get("_data")
        if data is not None and data is not self.__dict__.get("_metadata"):
            self.__dict__.pop("_data", None)
            data.abort()

    def close(self) -> None:
        """End the group's connections, so that other members do not wait for this one."""
        self._under_way.clear()  # a work would keep the connections open
        groups = [self.__dict__.pop(name) for name in ("_data", "_metadata") if name in self.__dict__]
        groups = list({id(group): group for group in groups}.values())  # without NCCL both names are the same group

        def abort_all() -> None:
            while groups:
                groups.pop().abort()

        if groups:
            cut(self._ends)
            # A group's destructor waits for all collectives. One with a broken connection may end only at its timeout,
            # so a separate thread holds the last reference.
            ending = threading.Thread(target=abort_all, name="end of a group", daemon=True)
            ending.start()
            ending.join(_END_S)
        self._store.close()


def own_address(server: str) -> str:
    """The address of this machine on the route to the server (HOST:PORT[,...]). Sends nothing."""
    found = socket.getaddrinfo(*split_address(server.partition(",")[0]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])
        return str(probe.getsockname()[0])


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _dtype(name: str) -> torch.dtype:
    """The torch dtype with a name that another member sent. Raises Broken."""
    if name not in _DTYPES:
        raise Broken(f"a member sends a tensor of dtype '{shown(str(name))}', unknown to torch {torch.__version__}")
    return _DTYPES[name]
