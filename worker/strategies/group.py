"""All-reduce peers: one group of torch.distributed for each generation.

A *generation* is a set of members in an order, and the store at which they find each other. A group is formed whenever
a member joins or leaves (13 ms on one host, against 72 ms for the first). Each has a prefix of the store and no global
process group, so nothing of torch's has to be torn down first, and a script's own `torch.distributed` is left alone.

`average` reads the tensors and writes to memory of its own. So a member that is killed in the middle costs the others
an error (`Broken`) and nothing else: they still have their tensors, and average them in the next generation. A member
that fails closes its group at once: another member may wait for it, and not for the dead one.

Averages go over NCCL where each member has a GPU of its own (`collectives/backends.py`), in memory on it. Metadata and
tensors for a new member go over Gloo. Metadata are exchanged with each step, so a death is found there. NCCL's
operations end when the group is closed, or `cut` by another thread that heard of the death from the server.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...common.errors import shown
from ...common.wire.json_text import read_json
from ..tensors.packed import put_together, take_apart
from .buckets import Plan, packed, unpack
from .collectives import backends
from .collectives.cut import Address, cut, listening
from .collectives.rendezvous import Broken, Generation, MemberInfo, Rendezvous, come_together, first_line, store_of

_MEET_S = 10.0  # for all members of a generation to come together
# For one collective. A member that waits longer for a slow one reports it to the server, which knows whether it lives.
_TIMEOUT_S = 30.0
_END_S = 0.2
_HOST = torch.device("cpu")


class Unsound(Exception):
    """The tensor of this index holds NaN or Inf, and so would the mean."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class _Closed(Exception):
    """The group was closed, or cut, by another thread."""


class Announced(NamedTuple):
    """What all members have announced of the tensors that they average."""

    samples: tuple[int, ...]  # by member
    present: tuple[int, ...]  # indices of the tensors that some member has


class Group:
    """The members of one generation, as one of them sees it. Used by one thread; `average` blocks."""

    num_broadcast = 0  # bytes of the newest `broadcast_values`
    metadata: Sequence[list[int]] = ()  # of the newest average: [word][member]
    like: Sequence[torch.Tensor] = ()  # for each tensor, one of its shape and dtype
    order: Sequence[int] = ()  # in which tensors leave; empty: as they are given
    of_lowest: Container[int] = ()  # tensors that are taken from the lowest rank
    of_sum: Container[int] = ()  # tensors that are summed, not averaged

    def __init__(
        self, generation: Generation, rank: int, rendezvous: Rendezvous, device: torch.device = _HOST,
        timeout_s: float = _TIMEOUT_S, meet_s: float = _MEET_S,
    ) -> None:  # fmt: skip
        """Blocks until all members are there. `rendezvous` is this member's; `device` is that of its model. Raises
        Broken when a member does not come within `meet_s` (the sentence names it), OutOfReach when one cannot be
        reached."""
        self.generation, self.index = generation, generation.members.index(rank)
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._under_way: list[Any] = []  # torch's works
        self._plan: Plan | None = None  # by which the next tensors leave, before all have announced their samples
        self._announced: Announced | None = None  # the last time
        self._has_missed = False
        self._num_left, self._ready = 0, dict[int, torch.Tensor]()  # buckets that left, tensors that are `ready`
        self.num_sent = 0.0  # bytes; in sums of many as a ring of the members would
        self._reason = ""  # why the group is over
        self._timeout_s = timeout_s
        self._ends: set[Address] = set()  # where members' devices listen
        rendezvous.admit(generation)
        store = self._store = store_of(generation, rank, meet_s)  # torch's groups keep no reference
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
        self._device = device if self.backend == "nccl" else _HOST  # of the averages
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
        """The mean over all members of each tensor, weighted by their samples. None where no member has the tensor; a
        member without it counts as zeros. Integers, and those in `of_lowest`, are the lowest rank's. Those in `of_sum`
        are summed. The given tensors stay as they are. The result lies in memory that the next `average` or `ready`
        overwrites.

        All members give tensors of the same shapes and dtypes, in the same order, and as many `metadata`, which
        `self.metadata` has of all afterwards. Where all announced the same samples before, announcement and tensors go
        at once. `is_right`: the tensors that were `ready` have not changed. Raises Broken when the group is over,
        Unsound when a tensor of this member is not finite.
        """
        by_index, guess = dict(enumerate(tensors)), self._plan
        is_right |= not self._num_left
        if guess is not None:
            self._leave_all(guess, by_index, is_right)
        announced, all_are_right = self._announce(tensors, num_samples, metadata, is_right)
        is_hit = guess is not None and all_are_right and announced == self._announced
        plan = guess if guess is not None and is_hit else self._plan_of(announced, by_index)
        if not is_hit:
            self._leave_all(plan, by_index)
            self._end_works()
        self._has_missed |= guess is not None and not is_hit
        # After a wrong guess only what was announced twice in a row is guessed. All members decide the same.
        self._plan = plan if not self._has_missed or announced == self._announced else None
        self._announced = announced
        return [plan.places.get(index) for index in range(len(tensors))]

    def announce(self, tensors: Sequence[torch.Tensor | None], num_samples: int, metadata: Sequence[int]) -> Announced:
        """Exchange the announcements of an average whose tensors go otherwise, as `gather_payloads`. Raises Broken."""
        return self._announce(tensors, num_samples, metadata, True)[0]

    def gather_payloads(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The payload of each member, uint8 [n], by its index; all have the same size. Raises Broken."""
        found = [torch.empty_like(payload) for _ in self.generation.members]
        self.num_sent += payload.nbytes * (len(found) - 1)
        self._wait(lambda: self._torch_group("_metadata").allgather([found], [payload]).wait())
        return found

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        """A tensor of the next average is complete: it leaves when its bucket is full."""
        plan = self._plan
        if plan is None or gradient.device != self._device:  # each copy from a GPU to the host would block
            return
        self._ready[index] = gradient
        with suppress(Broken):  # `average` raises it
            while self._num_left < len(plan.buckets) and self._ready.keys() >= set(plan.buckets[self._num_left][0]):
                self._leave(plan, self._ready)

    def _leave(self, plan: Plan, tensors: Mapping[int, torch.Tensor | None]) -> None:
        number, self._num_left = self._num_left, self._num_left + 1
        self._begin_sum(plan.gather(number, tensors))

    def _leave_all(self, plan: Plan, tensors: Mapping[int, torch.Tensor | None], is_right: bool = True) -> None:
        """While a bucket is under way the next one is gathered."""
        while self._num_left < len(plan.buckets):
            self._leave(plan, tensors)
        self._num_left, self._ready = 0, {}
        unsound = plan.unsound(tensors)
        if unsound is not None and is_right:
            raise Unsound(unsound)

    def _announce(
        self, tensors: Sequence[torch.Tensor | None], num_samples: int, metadata: Sequence[int], is_right: bool
    ) -> tuple[Announced, bool]:
        """After everything that is under way: what all announce, and whether all are right."""
        size = len(self.generation.members)
        words = [word * (index == self.index) for word in (num_samples, *metadata) for index in range(size)]
        sums = torch.tensor([not is_right, *(tensor is not None for tensor in tensors), *words], dtype=torch.int64)
        self._begin(lambda: self._sum_of(sums, "_metadata"))
        self._end_works()
        num_wrong, *found = sums.tolist()
        present = tuple(index for index, count in enumerate(found[: len(tensors)]) if count)
        found = found[len(tensors) :]
        samples, *self.metadata = (found[at : at + size] for at in range(0, len(found), size))
        return Announced(tuple(samples), present), not num_wrong

    def _plan_of(self, announced: Announced, tensors: Mapping[int, torch.Tensor | None]) -> Plan:
        present, like = set(announced.present), dict[int, torch.Tensor]()
        for index in self.order or range(len(tensors)):
            if index in present:
                tensor = tensors[index]
                like[index] = self.like[index] if tensor is None else tensor
        share = announced.samples[self.index] / sum(announced.samples)
        return Plan(like, share, self.index == 0, self._flat, self._device, self.of_lowest, self.of_sum)

    # ---- broadcasts ---------------------------------------------------------------------------

    def gather_numbers(self, number: int) -> list[int]:
        """The number of each member, by its index."""
        numbers = torch.zeros(len(self.generation.members), dtype=torch.int64)
        numbers[self.index] = number
        self._wait(lambda: self._sum_of(numbers, "_metadata").wait())
        return numbers.tolist()

    def broadcast_values(self, values: Mapping[str, Any] | None, source: int) -> dict[str, Any]:
        """Returns the values of the member of index `source`: tensors on the host, and JSON (`tensors/packed.py`). The
        source gets its own tensors back."""
        tree, tensors = take_apart(values) if values is not None else ({}, {})
        forms = {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()}
        head = bytearray(json.dumps([tree, forms], separators=(",", ":")).encode())
        num_bytes = self.gather_numbers(len(head))[source]
        if values is not None:
            text = torch.frombuffer(head, dtype=torch.uint8)
        else:
            text = torch.empty(num_bytes, dtype=torch.uint8)
        self._wait(lambda: self._torch_group("_metadata").broadcast([text], backends.broadcast_from(source)).wait())
        if values is None:
            tree, forms = read_json(text.numpy().tobytes(), nan=True, big=True)
            tensors = {name: torch.empty(shape, dtype=_dtype(dtype)) for name, (dtype, shape) in forms.items()}
        pieces: list[list[torch.Tensor]] = [[] for _ in self.generation.members]
        pieces[source] = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]  # for Gloo's dtypes
        self.num_sent += num_bytes * (source == self.index)
        self.num_broadcast = num_bytes + sum(piece.numel() for piece in pieces[source])
        self.broadcast_tensors(pieces)
        return put_together(tree, tensors)

    def broadcast_tensors(self, pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy the tensors of each member, `pieces[index]`, to those in the same place of all others."""
        packs = []
        for owner, tensors in enumerate(pieces):
            for flat, parts in packed(tensors, lambda tensor: tensor.device.type == "cpu", _HOST):
                self.num_sent += flat.nbytes * (owner == self.index)
                options = backends.broadcast_from(owner)
                self._begin(
                    lambda flat=flat, options=options: self._torch_group("_metadata").broadcast([flat], options)  # type: ignore[misc]
                )
                packs.append((flat, parts if owner != self.index else []))
        self._end_works()
        unpack(packs)

    # ---- torch's groups -----------------------------------------------------------------------

    def _begin_sum(self, tensor: torch.Tensor) -> None:
        self._begin(lambda: self._sum_of(tensor, "_data"))

    def _sum_of(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin a sum over the torch group of this name."""
        size, over = len(self.generation.members), self._torch_group(name)
        if over is self._torch_group("_metadata") and backends.is_small(tensor.nbytes, size):
            self.num_sent += tensor.nbytes * (1 if self.index else size - 1)
            return backends.Small(lambda: self._torch_group(name), tensor, self.index, size, self._timeout_s)
        self.num_sent += 2 * tensor.nbytes * (size - 1) / size
        return over.allreduce([tensor])

    def _begin(self, collective: Callable[[], Any]) -> None:
        self._wait(lambda: self._under_way.append(collective()))

    def _end_works(self) -> None:
        """Metadata too: they show that a member is gone, and NCCL's sums are queued until then."""
        while self._under_way:
            self._wait(lambda: self._oldest().wait())
        backends.computed(self._device)
        self._wait(lambda: self._torch_group("_data"))  # works that were aborted have ended as well

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
        """Raises Broken where torch or another thread has ended the group. Another error is a bug and passes."""
        try:
            collective()
        except (RuntimeError, _Closed) as error:
            message = "it was closed meanwhile" if isinstance(error, _Closed) else first_line(error)
            self._reason = self._reason or message
            self.close()
            raise Broken(f"generation {self.generation.number}: {self._reason}") from None

    def cut(self, reason: str) -> None:
        """From any thread: end every wait in this group with Broken, for this reason."""
        self._reason = self._reason or reason
        cut(self._ends)
        data = self.__dict__.get("_data")
        if data is not None and data is not self.__dict__.get("_metadata"):
            self.__dict__.pop("_data", None)
            data.abort()

    def close(self) -> None:
        """End its connections, and with them the waits of other members for this one."""
        self._under_way.clear()  # each of them would keep the connections
        groups = [self.__dict__.pop(name) for name in ("_data", "_metadata") if name in self.__dict__]
        groups = list({id(group): group for group in groups}.values())  # over Gloo alone they are one
        if groups:
            cut(self._ends)
            # A group's destructor waits for all collectives, and one of a broken connection may end with its timeout
            # only. So a thread has the last reference.
            ending = threading.Thread(target=_abort_all, args=(groups,), name="end of a group", daemon=True)
            ending.start()
            ending.join(_END_S)
        self._store.close()


def _abort_all(groups: list[Any]) -> None:
    while groups:
        groups.pop().abort()


def own_address(server: str) -> str:
    """The address of this machine on the way to the server (HOST:PORT); nothing is sent."""
    host, _, port = server.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])
        return str(probe.getsockname()[0])


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _dtype(name: str) -> torch.dtype:
    """A dtype of torch, by a name that another member has sent. Raises Broken."""
    if name not in _DTYPES:
        raise Broken(f"a member gives a tensor of dtype '{shown(str(name))}', which torch {torch.__version__} has not")
    return _DTYPES[name]
