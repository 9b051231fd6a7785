"""The reference: the weights as all workers have them whose replies are encoded differences. Each difference is encoded
once.

    weights (exact)  --difference, now and then-->  reference  --the same bytes for everyone-->  every worker's copy

Commits and replies alone decide which versions are published. They are the same on all shards, so the parts of a reply
are of one version. The work is done on the tensor thread, in its order. A new reference, in a server that has begun or
gone back, is a copy of the weights.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....common.codecs.base import payload_bytes
from ....common.codecs.shared.by_tensor import ByTensor, only_rest
from ....common.codecs.shared.reference import approach, check_sum, distance
from ....common.tensors.layout import as_bytes, new_payload
from ..store import Store
from ..thread import TensorThread

_CHECKED_EVERY = 64  # numbers; the check reads the model once, on both sides


@dataclass(eq=False, slots=True)
class Difference:
    """Leads to reference `number`; its bytes, uint8 [payload_bytes], are made by the time that it is sent."""

    number: int
    without: frozenset[str] = frozenset()  # tensors that are not in it
    encoded: torch.Tensor | None = None
    check: int | None = None


@dataclass(eq=False)
class Whole:
    """A copy of the reference, uint8 [exchange_bytes], made by the time that it is sent."""

    number: int
    payload: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ReferenceUpdate:
    """Leads one worker to reference `number`, which was made of `version`."""

    number: int
    version: int
    codec: str  # of the differences; empty: the reference is whole
    made: tuple[Difference | Whole, ...]
    checked: Difference | None = None  # the newest of these with a check sum

    @property
    def left_out(self) -> list[frozenset[str]]:
        """The tensors that each difference leaves out; empty where none does."""
        without = [item.without for item in self.made if isinstance(item, Difference)]
        return without if any(without) else []

    @property
    def pieces(self) -> list[memoryview]:
        """The bytes."""
        payloads = [item.encoded if isinstance(item, Difference) else item.payload for item in self.made]
        return [as_bytes(payload) for payload in payloads if payload is not None]


class Reference:
    """The reference of one codec. All but the tensor work runs on the event loop."""

    def __init__(self, codec: ByTensor, store: Store, tensors: TensorThread, version: int) -> None:
        self.number, self.version = 1, version
        self.distance = 0.0  # norm(weights - reference) / norm(weights), when it was last measured
        self._codec, self._store, self._tensors = codec, store, tensors
        layout = store.layout
        self._num_encoded = payload_bytes(codec, layout)
        # The newest differences, while they are less than the whole.
        self._ring: deque[Difference] = deque(maxlen=max(1, (layout.exchange_bytes - 1) // max(1, self._num_encoded)))
        self._payload = new_payload(layout.exchange_bytes)
        self._encoder = codec.encoder(layout)
        self._whole: Callable[[], Whole | None] = lambda: None
        tensors.submit(lambda: self._payload.copy_(store.weights[: layout.exchange_bytes]))

    def publish(self, version: int, without: frozenset[str] = frozenset()) -> None:
        """Move the reference towards the weights of `version`; tensors `without` a change stay as they are."""
        self.number, self.version = self.number + 1, version
        difference, codec = Difference(self.number, without), only_rest(self._codec, without)
        self._ring.append(difference)

        def work() -> None:
            layout = self._store.layout
            encoded = new_payload(payload_bytes(codec, layout))
            approach(codec, self._encoder, layout, self._store.weights, self._payload, encoded)
            if difference.number % _CHECKED_EVERY == 0:
                difference.check = check_sum(layout, self._payload)
                self.distance = distance(layout, self._store.weights, self._payload)
            difference.encoded = encoded

        self._tensors.submit(work)

    def update_from(self, known: int) -> ReferenceUpdate:
        """The news for a worker that has reference `known`, 0: none."""
        first = self._ring[0].number - 1 if self._ring else self.number
        if not first <= known <= self.number:
            return ReferenceUpdate(self.number, self.version, "", (self._make_whole(),))
        made = tuple(difference for difference in self._ring if difference.number > known)
        checked = [difference for difference in made if difference.number % _CHECKED_EVERY == 0]
        return ReferenceUpdate(self.number, self.version, self._codec.name, made, checked[-1] if checked else None)

    def _make_whole(self) -> Whole:
        """A copy of the reference, shared by all workers that receive it at this time."""
        found = self._whole()
        if found is None or found.number != self.number:
            whole = found = Whole(self.number)
            self._whole = weakref.ref(whole)

            def work() -> None:
                whole.payload = self._payload.clone()

            self._tensors.submit(work)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the reference and its differences."""
        return len(self._payload) + self._num_encoded * len(self._ring)


class References:
    """One reference for each codec of replies. `has_rounds`: all workers get every version. `has_fragments`: each
    version changes a part of the tensors."""

    def __init__(self, store: Store, tensors: TensorThread, has_rounds: bool, has_fragments: bool = False) -> None:
        self._store, self._tensors, self._has_rounds = store, tensors, has_rounds
        self._has_fragments = has_fragments
        self._unchanged: frozenset[str] | None = None  # since the newest that was published; None: all tensors
        self._of_codec: dict[str, Reference] = {}
        self._version = store.version  # the newest that was published
        self._num_since, self._num_live = 0, 0  # contributions in versions since; workers

    def committed(self, num_contributions: int, num_live: int, without: frozenset[str] | None = None) -> None:
        """A version is decided. Tensors `without` a part in it are unchanged; None: nothing was folded."""
        if self._has_fragments and without is not None:
            self._unchanged = without if self._unchanged is None else self._unchanged & without
        self._num_since, self._num_live = self._num_since + num_contributions, num_live

    def replies(self, version: int, is_start: bool) -> None:
        """A worker gets a reply with weights; `version` is the newest. Modes with rounds publish it. Other modes
        publish a version once in as many contributions as there are workers, or each reply would have as many
        differences. A worker that starts may not begin on old weights."""
        is_due = self._has_rounds or is_start or self._num_since >= self._num_live
        if version == self._version or not is_due:
            return
        self._version, self._num_since = version, 0
        unchanged, self._unchanged = self._unchanged, None
        for reference in self._of_codec.values():
            reference.publish(version, unchanged or frozenset())

    def of(self, codec: ByTensor, version: int) -> Reference:
        """The reference of a codec. A new one is of `version`, the newest."""
        if codec.name not in self._of_codec:
            self._of_codec[codec.name] = Reference(codec, self._store, self._tensors, version)
        return self._of_codec[codec.name]

    @property
    def distances(self) -> dict[str, float]:
        """`Reference.distance` by codec."""
        return {name: reference.distance for name, reference in self._of_codec.items()}

    @property
    def num_bytes(self) -> int:
        return sum(reference.num_bytes for reference in self._of_codec.values())
