"""The weights as workers have them whose replies are encoded differences: one reference for all, and the newest of its
differences, each encoded once.

    weights (exact)  --difference, now and then-->  reference  --the same bytes for everyone-->  every worker's copy

Which versions are published is decided by commits and replies alone, which are the same on all shards, so that the
parts of a reply are of one version; the work is done on the tensor thread, in its order. A new reference, in a server
that has begun or gone back, is a copy of the weights.
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
    """That leads to `number`; its bytes, uint8 [payload_bytes], are made by the time that it is sent."""

    number: int
    without: frozenset[str] = frozenset()  # tensors that it has nothing of
    encoded: torch.Tensor | None = None
    check: int | None = None


@dataclass(eq=False)
class Whole:
    """A copy of the reference, uint8 [exchange_bytes], made by the time that it is sent."""

    number: int
    payload: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class News:
    """What leads one worker to reference `number`, which was made of `version`."""

    number: int
    version: int
    codec: str  # of the differences; empty: it is whole
    made: tuple[Difference | Whole, ...]
    checked: Difference | None = None  # one of these that has a check

    @property
    def left_out(self) -> list[frozenset[str]]:
        """By each difference; none where all are whole."""
        found = [item.without for item in self.made if isinstance(item, Difference)]
        return found if any(found) else []

    @property
    def pieces(self) -> list[memoryview]:
        """Its bytes."""
        payloads = [item.encoded if isinstance(item, Difference) else item.payload for item in self.made]
        return [as_bytes(payload) for payload in payloads if payload is not None]


class Reference:
    """In one codec. All but the work is done on the event loop."""

    def __init__(self, codec: ByTensor, store: Store, tensors: TensorThread, version: int) -> None:
        self.number, self.version = 1, version
        self.distance = 0.0  # when it was looked at last: norm(weights - reference) / norm(weights)
        self._codec, self._store, self._tensors = codec, store, tensors
        layout = store.layout
        self._num_encoded = payload_bytes(codec, layout)
        # Those that come to less than the whole.
        self._ring: deque[Difference] = deque(maxlen=max(1, (layout.exchange_bytes - 1) // max(1, self._num_encoded)))
        self._payload = new_payload(layout.exchange_bytes)
        self._encoder = codec.encoder(layout)
        self._whole: Callable[[], Whole | None] = lambda: None
        tensors.submit(lambda: self._payload.copy_(store.weights[: layout.exchange_bytes]))

    def publish(self, version: int, without: frozenset[str] = frozenset()) -> None:
        """The reference comes nearer to the weights, which are those of `version` when the work is done; tensors
        `without` a change stay as they are."""
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

    def news(self, held: int) -> News:
        """For a worker that has number `held`, 0: none."""
        first = self._ring[0].number - 1 if self._ring else self.number
        if not first <= held <= self.number:
            return News(self.number, self.version, "", (self._make_whole(),))
        made = tuple(difference for difference in self._ring if difference.number > held)
        checked = [difference for difference in made if difference.number % _CHECKED_EVERY == 0]
        return News(self.number, self.version, self._codec.name, made, checked[-1] if checked else None)

    def _make_whole(self) -> Whole:
        """Shared by all who want it while it is on its way."""
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
        """Held here."""
        return len(self._payload) + self._num_encoded * len(self._ring)


class References:
    """One for each codec that some worker gets its reply in. `has_rounds`: versions are everybody's, who all get them;
    `has_fragments`: each changes a part of the tensors."""

    def __init__(self, store: Store, tensors: TensorThread, has_rounds: bool, has_fragments: bool = False) -> None:
        self._store, self._tensors, self._has_rounds = store, tensors, has_rounds
        self._has_fragments = has_fragments
        self._unchanged: frozenset[str] | None = None  # since the newest that was published; None: all tensors
        self._of_codec: dict[str, Reference] = {}
        self._version = store.version  # the newest that was published
        self._num_since, self._num_live = 0, 0  # contributions in versions since; workers

    def committed(self, num_contributions: int, num_live: int, without: frozenset[str] | None = None) -> None:
        """A version is decided; tensors `without` a part in it are as before; None: nothing was folded."""
        if self._has_fragments and without is not None:
            self._unchanged = without if self._unchanged is None else self._unchanged & without
        self._num_since, self._num_live = self._num_since + num_contributions, num_live

    def replies(self, version: int, is_start: bool) -> None:
        """Somebody gets its reply with weights, `version` being the newest. It is published where it is everybody's;
        else
        once in as many contributions as there are workers: each would get as many differences with every reply. Who
        starts may not begin on old ones."""
        is_due = self._has_rounds or is_start or self._num_since >= self._num_live
        if version == self._version or not is_due:
            return
        self._version, self._num_since = version, 0
        unchanged, self._unchanged = self._unchanged, None
        for reference in self._of_codec.values():
            reference.publish(version, unchanged or frozenset())

    def of(self, codec: ByTensor, version: int) -> Reference:
        """A new one is of `version`, the newest."""
        if codec.name not in self._of_codec:
            self._of_codec[codec.name] = Reference(codec, self._store, self._tensors, version)
        return self._of_codec[codec.name]

    @property
    def distances(self) -> dict[str, float]:
        """By codec, see Reference."""
        return {name: reference.distance for name, reference in self._of_codec.items()}

    @property
    def num_bytes(self) -> int:
        return sum(reference.num_bytes for reference in self._of_codec.values())
