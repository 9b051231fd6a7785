"""Workers that average among themselves: one group of torch.distributed for each generation.

An *generation* is a set of members in an order, and the store at which they find each other. It is formed anew whenever
somebody comes or goes (13 ms on one host, against 72 ms for the first): a prefix of the store for each generation, no
global
process group, so nothing of torch's has to be torn down first, and a script's own `torch.distributed` is left alone.

`average` reads what is to be averaged and writes to memory of its own. So a member that is killed in the middle costs
the others an error (`Broken`) and nothing else: they still hold what they brought, and bring it to the next
generation. Who
fails closes its group at once, for a member that waits for it and not for the dead one hears of it only so.

What is averaged goes over NCCL where each member has a GPU of its own (`among/backends.py`), in memory on it; metadata,
and what is given to who comes, over Gloo. Words go at once with each step, so a death is found there; what NCCL has
under way ends when the group is closed, or `cut` by another thread that heard of it from the server.
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
from .buckets import Plan
from .collectives import backends, small
from .collectives.cut import Address, cut, listening
from .collectives.rendezvous import Broken, Generation, Here, Rendezvous, come_together, first_line, store_of

_MEET_S = 10.0  # for all members of a generation to come together
# For one collective. Who waits longer for a slow member says so to the server, which knows whether that one is alive.
_TIMEOUT_S = 30.0
_WHOLE_BYTES = 256 << 10  # tensors of fewer travel together
_END_S = 0.2
_HOST = torch.device("cpu")


class Unsound(Exception):
    """The tensor of this index holds NaN or Inf, and so would the mean."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class _Closed(Exception):
    """The group was closed, or cut, by another thread."""


class Said(NamedTuple):
    """By all members of what they average."""

    samples: tuple[int, ...]  # by member
    held: tuple[int, ...]  # tensors that somebody has


class Group:
    """The members of one generation, as one of them sees it. Used by one thread; `average` blocks."""

    def __init__(
        self, generation: Generation, rank: int, rendezvous: Rendezvous, device: torch.device = _HOST,
        timeout_s: float = _TIMEOUT_S, meet_s: float = _MEET_S,
    ) -> None:  # fmt: skip
        """`own`: this member's; other members reach its host. `device`: of its model. Blocks until all
        members are there. Broken when one does not come within `meet_s` (which ones: in the sentence), OutOfReach when
        one cannot be reached."""
        self.generation, self.index = generation, generation.members.index(rank)
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._under_way: list[Any] = []  # torch's works
        self._plan: Plan | None = None  # by which the next are averaged before all have said their samples
        self._said: Said | None = None  # by all, the last time
        self._has_missed = False
        self._num_left, self._there = 0, dict[int, torch.Tensor]()  # buckets, and tensors that are `ready`
        self.num_sent = 0.0  # bytes; in sums of many as a ring of the members would
        self._reason = ""  # why the group is over
        self._timeout_s = timeout_s
        self._ends: set[Address] = set()  # where members' devices listen
        rendezvous.admit(generation)
        store = self._store = store_of(generation, rank, meet_s)  # torch's groups keep none
        host = rendezvous.address[0]
        try:
            gloo, port = listening(lambda: dist.ProcessGroupGloo.create_device(hostname=host))
            here = Here(backends.device_name(device), rendezvous.address, (host, port))
            members = come_together(store, generation, rank, here, meet_s)
        except Broken:
            store.close()
            raise
        self._ends.update(member.listens for member in members)
        self.backend = backends.backend_of([member.device for member in members])
        self.not_over_nccl = backends.why_not_nccl([member.device for member in members])
        self._device = device if self.backend == "nccl" else _HOST  # of what is averaged
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

    def average(
        self,
        tensors: Sequence[torch.Tensor | None],
        num_samples: int,
        metadata: Sequence[int] = (),
        is_right: bool = True,
    ) -> list[torch.Tensor | None]:
        """The mean over all members, weighted by their samples, of each tensor; None where nobody has one, and zeros
        for who has none while others do. Integers, and those in `of_lowest`, are of the lowest rank; of those in
        `of_sum` it is the sum, not the mean. The tensors given stay as they are.

        What is returned lies in memory that the next call writes, or the next `ready`.

        All members give tensors of the same shapes and dtypes, in the same order. Each says as many `metadata`, and
        `self.metadata` has everyone's afterwards, [word][index]. Where all said the same samples before, what they say
        and what they average goes at once. `is_right`: what was `ready` is what is given. Broken when the group is
        over, Unsound when this member's are not finite.
        """
        mine, guess = dict(enumerate(tensors)), self._plan
        is_right |= not self._num_left
        if guess is not None:
            self._leave_all(guess, mine, is_right)
        said, all_are_right = self._said_by_all(tensors, num_samples, metadata, is_right)
        is_hit = guess is not None and all_are_right and said == self._said
        plan = guess if guess is not None and is_hit else self._plan_of(said, mine)
        if not is_hit:
            self._leave_all(plan, mine)
            self._end_sums()
        self._has_missed |= guess is not None and not is_hit
        # Who had to average twice goes by nothing but what was said twice in a row. All members decide the same.
        self._plan = plan if not self._has_missed or said == self._said else None
        self._said = said
        return [plan.places.get(index) for index in range(len(tensors))]

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        """Of the tensors that will be averaged next, this one is there: it leaves when its bucket is full."""
        plan = self._plan
        if plan is None or gradient.device != self._device:  # from a GPU to the host each would be waited for
            return
        self._there[index] = gradient
        with suppress(Broken):  # said by `average`
            while self._num_left < len(plan.buckets) and self._there.keys() >= set(plan.buckets[self._num_left][0]):
                self._leave(plan, self._there)

    def _leave(self, plan: Plan, tensors: Mapping[int, torch.Tensor | None]) -> None:
        number, self._num_left = self._num_left, self._num_left + 1
        self._begin_sum(plan.gather(number, tensors))

    def _leave_all(self, plan: Plan, tensors: Mapping[int, torch.Tensor | None], is_right: bool = True) -> None:
        """While a bucket is under way the next one is gathered."""
        while self._num_left < len(plan.buckets):
            self._leave(plan, tensors)
        self._num_left, self._there = 0, {}
        unsound = plan.unsound(tensors)
        if unsound is not None and is_right:
            raise Unsound(unsound)

    def _said_by_all(
        self, tensors: Sequence[torch.Tensor | None], num_samples: int, metadata: Sequence[int], is_right: bool
    ) -> tuple[Said, bool]:
        """After everything that is under way."""
        num_members = len(self.generation.members)
        told = [word * (index == self.index) for word in (num_samples, *metadata) for index in range(num_members)]
        sums = torch.tensor([not is_right, *(tensor is not None for tensor in tensors), *told], dtype=torch.int64)
        self._begin(lambda: self._sum_of(sums, "_metadata"))
        self._end_sums()
        num_wrong, *found = sums.tolist()
        held = tuple(index for index, count in enumerate(found[: len(tensors)]) if count)
        found = found[len(tensors) :]
        samples, *self.metadata = (found[at : at + num_members] for at in range(0, len(found), num_members))
        return Said(tuple(samples), held), not num_wrong

    def _plan_of(self, said: Said, tensors: Mapping[int, torch.Tensor | None]) -> Plan:
        like: dict[int, torch.Tensor] = {}
        held = set(said.held)
        for index in self.order or range(len(tensors)):
            if index in held:
                tensor = tensors[index]
                like[index] = self.like[index] if tensor is None else tensor
        share = said.samples[self.index] / sum(said.samples)
        return Plan(like, share, self.index == 0, self._flat, self._device, self.of_lowest, self.of_sum)

    given_bytes = 0  # by the newest `give`
    metadata: Sequence[list[int]] = ()
    like: Sequence[torch.Tensor] = ()  # in the place of each, something of its shape and dtype: parameters
    order: Sequence[int] = ()  # in which they leave; none: as they are given
    of_lowest: Container[int] = ()  # of which no mean is made
    of_sum: Container[int] = ()  # of which a sum is made

    def told(self, number: int) -> list[int]:
        """What each member says, by its index."""
        said = torch.zeros(len(self.generation.members), dtype=torch.int64)
        said[self.index] = number
        self._wait(lambda: self._sum_of(said, "_metadata").wait())
        return said.tolist()

    def give(self, values: Mapping[str, Any] | None, giver: int) -> dict[str, Any]:
        """What the member of this index has, tensors and JSON (`tensors/packed.py`), to all, tensor by tensor. On the
        host; the giver gets its own back."""
        tree, tensors = take_apart(values) if values is not None else ({}, {})
        forms = {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()}
        head = bytearray(json.dumps([tree, forms], separators=(",", ":")).encode())
        num_bytes = self.told(len(head))[giver]
        text = (
            torch.frombuffer(head, dtype=torch.uint8)
            if values is not None
            else torch.empty(num_bytes, dtype=torch.uint8)
        )
        self._wait(lambda: self._torch("_metadata").broadcast([text], _from(giver)).wait())
        if values is None:
            tree, forms = read_json(text.numpy().tobytes(), nan=True, big=True)
            tensors = {name: torch.empty(shape, dtype=_dtype(dtype)) for name, (dtype, shape) in forms.items()}
        pieces: list[list[torch.Tensor]] = [[] for _ in self.generation.members]
        pieces[giver] = [
            tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()
        ]  # Gloo has not every dtype
        self.num_sent += num_bytes * (giver == self.index)
        self.given_bytes = num_bytes + sum(piece.numel() for piece in pieces[giver])
        self.spread(pieces)
        return put_together(tree, tensors)

    def spread(self, pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """Of each member, by index, what it has in these, to all: written where the others have them."""
        scattered: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for owner, tensors in enumerate(pieces):
            small: dict[torch.dtype, list[torch.Tensor]] = {}
            for tensor in tensors:
                if (
                    tensor.numel() * tensor.itemsize >= _WHOLE_BYTES
                    and tensor.device.type == "cpu"
                    and tensor.is_contiguous()
                ):
                    self._begin_giving(tensor, owner)
                else:
                    small.setdefault(tensor.dtype, []).append(tensor)
            for several in small.values():
                flat = torch.cat([item.reshape(-1).cpu() for item in several])
                self._begin_giving(flat, owner)
                scattered.append((flat, several if owner != self.index else []))
        self._end_sums()
        for flat, several in scattered:
            at = 0
            for tensor in several:
                tensor.copy_(flat[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()

    def _begin_giving(self, tensor: torch.Tensor, giver: int) -> None:
        self.num_sent += tensor.nbytes * (giver == self.index)
        self._begin(lambda: self._torch("_metadata").broadcast([tensor], _from(giver)))

    def _begin_sum(self, tensor: torch.Tensor) -> None:
        self._begin(lambda: self._sum_of(tensor, "_data"))

    def _sum_of(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin it over the group of torch's that has this name here."""
        size, over = len(self.generation.members), self._torch(name)
        if over is self._torch("_metadata") and small.is_small(tensor.nbytes, size):
            self.num_sent += tensor.nbytes * (1 if self.index else size - 1)
            return small.Small(lambda: self._torch(name), tensor, self.index, size, self._timeout_s)
        self.num_sent += 2 * tensor.nbytes * (size - 1) / size
        return over.allreduce([tensor])

    def _begin(self, collective: Callable[[], Any]) -> None:
        self._wait(lambda: self._under_way.append(collective()))

    def _end_sums(self) -> None:
        """Words too: where a member is gone it is they that say so, and NCCL's sums are queued until then."""
        while self._under_way:
            self._wait(lambda: self._oldest().wait())
        backends.computed(self._device)
        self._wait(lambda: self._torch("_data"))  # those that were aborted have ended as well

    def _oldest(self) -> Any:
        try:
            return self._under_way.pop(0)
        except IndexError:
            raise _Closed from None

    def _torch(self, name: str) -> Any:
        """The group of torch's that has this name here. _Closed."""
        try:
            return self.__dict__[name]
        except KeyError:
            raise _Closed from None

    def _wait(self, collective: Callable[[], Any]) -> None:
        """Broken where torch or another thread has ended the group. Any other error is a bug, and stays what it is."""
        try:
            collective()
        except (RuntimeError, _Closed) as error:
            message = "it was closed meanwhile" if isinstance(error, _Closed) else first_line(error)
            self._reason = self._reason or message
            self.close()
            raise Broken(f"generation {self.generation.number}: {self._reason}") from None

    def cut(self, reason: str) -> None:
        """From any thread: whatever is waited for here ends, as Broken for this reason."""
        self._reason = self._reason or reason
        cut(self._ends)
        data = self.__dict__.get("_data")
        if data is not None and data is not self.__dict__.get("_metadata"):
            self.__dict__.pop("_data", None)
            data.abort()

    def close(self) -> None:
        """Its connections end, and with them whatever others wait for from this member."""
        self._under_way.clear()  # each of them would keep the connections
        groups = [self.__dict__.pop(name) for name in ("_data", "_metadata") if name in self.__dict__]
        groups = list({id(group): group for group in groups}.values())  # over Gloo alone they are one
        if not groups:
            self._store.close()
            return
        cut(self._ends)
        # Its own end waits for all collectives, and one of a broken connection may be over with its timeout only. So
        # nobody else holds a group: it would end where the last one lets go.
        ending = threading.Thread(target=_end_all, args=(groups,), name="end of a group", daemon=True)
        ending.start()
        ending.join(_END_S)
        self._store.close()


def _end_all(groups: list[Any]) -> None:
    while groups:
        groups.pop().abort()


def own_address(server: str) -> str:
    """Of this machine, as it is seen on the way to the server (HOST:PORT); nothing is sent."""
    host, _, port = server.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as asking:
        asking.connect(found[4])
        return str(asking.getsockname()[0])


_DTYPES = {str(var).removeprefix("torch."): var for var in vars(torch).values() if isinstance(var, torch.dtype)}


def _dtype(name: str) -> torch.dtype:
    """One of torch's, by a name that another member has said. Broken."""
    if name not in _DTYPES:
        raise Broken(f"a member gives a tensor of dtype '{shown(str(name))}', which torch {torch.__version__} has not")
    return _DTYPES[name]


def _from(giver: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = giver
    return options
