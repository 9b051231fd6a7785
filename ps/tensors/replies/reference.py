"""References: the weights as workers have them if replies are encoded differences. Each difference is encoded once.

    weights (exact)  --difference, at times-->  reference  --the same bytes for all-->  every worker's copy

Only commits and replies decide which versions are published. They are equal on all shards, so all parts of a reply have
one version. The tensor thread does the work, in its order. After the server starts or goes back to a snapshot, a new
reference is a copy of the weights. `encoded_weights` is for replies that are weights and not differences.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....common.codecs.base import Codec, FreeBuffers, encode_payload, payload_bytes
from ....common.codecs.shared.by_tensor import ByTensor, only_rest
from ....common.codecs.shared.reference import approach, check_sum, distance
from ....common.errors import Reason, refusal
from ....common.tensors.layout import Kind, Layout, as_bytes, new_payload
from ..store import Store
from ..thread import TensorThread

_CHECKED_EVERY = 64  # differences between checksums; a checksum reads the model once on both sides


@dataclass(eq=False)
class Difference:
    """Bytes that lead to reference `number`: an encoded difference, or the whole reference. They exist before they are
    sent."""

    number: int
    without: frozenset[str] = frozenset()  # tensors that it leaves out
    payload: torch.Tensor | None = None
    check: int | None = None


@dataclass(frozen=True, slots=True)
class ReferenceUpdate:
    """Leads one worker to reference `number`, which approximates the weights of `version`."""

    number: int
    version: int
    codec: str  # of the differences; empty: a whole reference
    made: tuple[Difference, ...]
    checked: Difference | None = None  # the newest difference with a checksum

    @property
    def left_out(self) -> list[frozenset[str]]:
        """The tensors that each difference leaves out. The list is empty if all differences are complete."""
        without = [item.without for item in self.made]
        return without if any(without) else []

    @property
    def pieces(self) -> list[memoryview]:
        """The bytes to send."""
        return [as_bytes(item.payload) for item in self.made if item.payload is not None]


class Reference:
    """The reference of one codec. Its methods run on the event loop, and submit the tensor work."""

    def __init__(self, codec: ByTensor, store: Store, tensors: TensorThread, version: int) -> None:
        self.number, self.version = 1, version
        self.distance = 0.0  # norm(weights - reference) / norm(weights), as last measured
        self._codec, self._store, self._tensors = codec, store, tensors
        layout = store.layout
        self._num_encoded = payload_bytes(codec, layout)
        # The newest differences, as long as their sum is smaller than a whole reference.
        self._ring: deque[Difference] = deque(maxlen=max(1, (layout.exchange_bytes - 1) // max(1, self._num_encoded)))
        self._payload = new_payload(layout.exchange_bytes)
        self._encoder = codec.encoder(layout)
        self._whole: Callable[[], Difference | None] = lambda: None
        tensors.submit(lambda: self._payload.copy_(store.weights[: layout.exchange_bytes]))

    def publish(self, version: int, without: frozenset[str] = frozenset()) -> None:
        """Move the reference towards the weights of `version`. Tensors in `without` stay unchanged."""
        self.number, self.version = self.number + 1, version
        difference, codec = Difference(self.number, without), only_rest(self._codec, without)
        self._ring.append(difference)

        def work() -> None:
            layout = self._store.layout
            encoded = new_payload(payload_bytes(codec, layout))
            approach(codec, self._encoder, self._store.weights, self._payload, encoded)
            if difference.number % _CHECKED_EVERY == 0:
                difference.check = check_sum(layout, self._payload)
                self.distance = distance(layout, self._store.weights, self._payload)
            difference.payload = encoded

        self._tensors.submit(work)

    def update_from(self, known: int) -> ReferenceUpdate:
        """Return the update for a worker that has reference `known`; 0: none."""
        first = self._ring[0].number - 1 if self._ring else self.number
        if not first <= known <= self.number:
            # A copy of the reference, which workers that need it at the same time share.
            found = self._whole()
            if found is None or found.number != self.number:
                whole = found = Difference(self.number)
                self._whole = weakref.ref(whole)

                def work() -> None:
                    whole.payload = self._payload.clone()

                self._tensors.submit(work)
            return ReferenceUpdate(self.number, self.version, "", (found,))
        made = tuple(difference for difference in self._ring if difference.number > known)
        checked = [difference for difference in made if difference.number % _CHECKED_EVERY == 0]
        return ReferenceUpdate(self.number, self.version, self._codec.name, made, checked[-1] if checked else None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the reference and its differences."""
        return len(self._payload) + self._num_encoded * len(self._ring)


class References:
    """One reference for each reply codec.

    `has_rounds`: all workers get every version. `has_fragments`: each version changes only some tensors. References of
    one shard (`is_part`) have the versions of those on other shards, so all shards follow versions from the first one.
    """

    def __init__(
        self, store: Store, tensors: TensorThread, has_rounds: bool, has_fragments: bool = False, is_part: bool = False
    ) -> None:
        self._store, self._tensors, self._has_rounds = store, tensors, has_rounds
        self._has_fragments = has_fragments
        self._unchanged: frozenset[str] | None = None  # tensors unchanged since the last publication; None: all
        self._of_codec: dict[str, Reference] = {}
        self.is_used = is_part  # versions are followed: there is a reference, perhaps on another shard
        self._version = store.version  # the newest published version
        self._num_since, self._num_live = 0, 0  # contributions since the last publication; live workers

    def committed(self, num_contributions: int, num_live: int, without: frozenset[str] | None = None) -> None:
        """Record a new version. Tensors in `without` are unchanged in it; None: nothing was folded."""
        if self._has_fragments and without is not None:
            self._unchanged = without if self._unchanged is None else self._unchanged & without
        self._num_since, self._num_live = self._num_since + num_contributions, num_live

    def replies(self, version: int, is_start: bool) -> None:
        """Publish `version`, the newest, if a reply with weights needs it.

        Modes with rounds publish every version. Other modes publish once after as many contributions as there are
        workers, because otherwise each reply would carry as many differences. A START always gets the newest weights.
        """
        is_due = self._has_rounds or is_start or self._num_since >= self._num_live
        if version == self._version or not is_due:
            return
        self._version, self._num_since = version, 0
        unchanged, self._unchanged = self._unchanged, None
        for reference in self._of_codec.values():
            reference.publish(version, unchanged or frozenset())

    def of(self, codec: ByTensor, version: int) -> Reference:
        """Return the reference of a codec. A new reference starts at `version`, the newest."""
        if not self.is_used:
            self.is_used, self._version = True, version
        if codec.name not in self._of_codec:
            self._of_codec[codec.name] = Reference(codec, self._store, self._tensors, version)
        return self._of_codec[codec.name]

    @property
    def distances(self) -> dict[str, float]:
        """The distance of each reference to the weights, by codec."""
        return {name: reference.distance for name, reference in self._of_codec.items()}

    @property
    def num_bytes(self) -> int:
        return sum(reference.num_bytes for reference in self._of_codec.values())


def encoded_weights(codec: Codec, layout: Layout, free_buffers: FreeBuffers, weights: torch.Tensor) -> torch.Tensor:
    """Encode weights, uint8 [>= exchange_bytes], into a buffer of `free_buffers`, uint8 [payload_bytes].

    Raises a LIMIT_EXCEEDED refusal for weights that would become infinite.
    """
    for run in layout.runs_of(Kind.PARAMETER):
        if codec.largest < torch.finfo(run.dtype).max and run.num_elements:
            largest = max(abs(float(end)) for end in run.view(weights).aminmax())
            if largest > codec.largest:
                problem = f"weights up to {largest:g}, which worker.reply_codec {codec.name} cannot encode"
                fix = "--set worker.reply_codec=bf16, whose range is float32's"
                raise refusal(Reason.LIMIT_EXCEEDED, f"{problem} (at most {codec.largest:,.0f})", fix=fix)
    return encode_payload(codec, layout, weights, free_buffers)
