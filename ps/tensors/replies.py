"""Weights for replies: publications of whole versions, and references that are updated by differences."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...common.codecs.base import Codec, FreeBuffers, encode_payload, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.codecs.shared.reference import approach, check_sum, distance
from ...common.errors import Reason, refusal
from ...common.tensors.layout import Kind, Layout, as_bytes, new_payload
from ...common.wire.frames import CHUNK_BYTES, left_out_frame, payload_frames
from ...common.wire.segments import Segment
from .store import Store
from .thread import TensorThread

# ---- publication ---------------------------------------------------------------------------------
# Publications: versions of the weights that are sent to workers while the commit still computes them.
#
# The event loop decides a commit, and the tensor thread computes it window by window. The publication of the version
# exists from the decision on, and its readers follow `ready`. Workers on this host read the weights' own memory. For
# other workers, frames are encoded once and shared.
#
# A reader never sees two versions. While a version is being read, the next commit writes into the memory of an old
# version. At most `limit` versions are being sent at once. A reader of a further version waits.


# Bytes between two wake-ups of the readers. A wake-up costs as much as copying 1 MiB.
_STRIDE_BYTES = 8 << 20
_LEAST_LEFT_OUT = 64 << 10  # a shorter range is sent although the worker has it

Range = tuple[int, int]  # bytes [start, end) of a payload


class Changes:
    """Records in which version each trained tensor changed last, so that a worker gets only changed tensors.

    It is used on the event loop, when versions are decided.
    """

    def __init__(self, layout: Layout, version: int) -> None:
        self._entries = [entry for entry in layout.entries if entry.spec.kind is Kind.PARAMETER]
        self._changed_in = [version] * len(self._entries)
        self._all_in = version  # the last version in which all tensors changed

    def made(self, version: int, without: Collection[str]) -> None:
        """Record a version in which all tensors changed except those in `without`."""
        if not without:
            self._all_in = version
            return
        for index, entry in enumerate(self._entries):
            if entry.spec.name not in without:
                self._changed_in[index] = version

    def kept(self, base: int) -> list[Range]:
        """Return the ranges of the newest weights that have not changed since version `base`, in order."""
        found: list[Range] = []
        if self._all_in > base:
            return found
        was_kept = False
        for entry, version in zip(self._entries, self._changed_in, strict=True):
            if is_kept := version <= base:
                found.append((found.pop()[0] if was_kept else entry.offset, entry.end))
            was_kept = is_kept
        return [(start, end) for start, end in found if end - start >= _LEAST_LEFT_OUT]


def cut(start: int, end: int, left_out: Sequence[Range]) -> Iterator[tuple[int, int, bool]]:
    """Divide bytes [start, end) of a payload at the ranges in `left_out`. Yields (start, end, is_left_out)."""
    for first, last in left_out:
        first, last = max(first, start), min(last, end)
        if first < last:
            if start < first:
                yield start, first, False
            yield first, last, True
            start = last
    if start < end:
        yield start, end, False


class Publication:
    """One version of the weights in `segment`. The first `ready` of its `num_bytes` bytes are finished."""

    def __init__(
        self, version: int, segment: Segment, num_bytes: int, notify: Callable[[Callable[[], None]], None]
    ) -> None:
        self.version = version
        self.segment = segment
        self.num_bytes = num_bytes
        self.ready = 0
        self.notify = notify  # calls a function on the loop, from the tensor thread
        self.owns_segment = True
        self.num_users = 0  # workers that receive it
        self.num_readers = 0  # readers of the segment: workers without frames, and the encoder
        self._frames: list[tuple[bytes, int, int]] = []  # frame, and its range [start, end) of the payload
        self._encoder: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def made(self, num_bytes: int) -> None:
        """Report that the first `num_bytes` are finished. Called on the tensor thread."""
        if num_bytes - self.ready >= _STRIDE_BYTES or num_bytes == self.num_bytes:
            self.ready = num_bytes
            self.notify(self._wake)

    async def progress(self) -> AsyncIterator[tuple[int, int]]:
        """Yield the ranges (start, end) of the payload as they are finished."""
        done = 0
        while done < self.num_bytes:
            while self.ready <= done:
                await self._changed.wait()
            start, done = done, self.ready
            yield start, done

    async def frames(self, left_out: Sequence[Range] = ()) -> AsyncIterator[bytes]:
        """Yield the frames of the payload, which all readers share. A short message replaces a left-out frame."""
        num_sent = end = 0
        while end < self.num_bytes:
            while num_sent == len(self._frames):
                await self._changed.wait()
            raw, start, end = self._frames[num_sent]
            is_left_out = any(first <= start and end <= last for first, last in left_out)
            yield left_out_frame(start, end - start) if is_left_out else raw
            num_sent += 1

    def encode(self, done: Callable[[Publication], None]) -> None:
        """Start to make frames, unless this has started. `done` is called once the whole segment has been read."""
        if self._encoder is None:
            self.num_readers += 1
            self._encoder = asyncio.create_task(self._encode(done))

    async def _encode(self, done: Callable[[Publication], None]) -> None:
        """Make frames as fast as the weights are finished, independent of the speed of connections."""
        try:
            async for start, end in self.progress():
                for at in range(start, end, CHUNK_BYTES):
                    part = self.segment.bytes[at : min(at + CHUNK_BYTES, end)]
                    (raw,) = payload_frames([part], offset=at)
                    self._frames.append((raw, at, at + len(part)))
                    self._wake()
                    await asyncio.sleep(0)  # a frame takes 0.1 ms, so let other tasks run
        finally:
            self.num_readers -= 1
            done(self)

    def _wake(self) -> None:
        if self.num_users or self.num_readers:  # the encoder continues after its users have left
            self._changed.set()
            self._changed = asyncio.Event()

    def forget_frames(self) -> None:
        """Drop the frames, unless they are still being made."""
        if self._encoder is not None and self._encoder.done():
            self._encoder, self._frames = None, []


class Publisher:
    """Gives every commit its memory, and every worker a version to read. It is used only on the event loop.

    `first` is complete. `new_memory` makes memory in which the bytes that commits never write are set.
    """

    def __init__(self, first: Publication, limit: int, new_memory: Callable[[], Segment]) -> None:
        self.latest = first
        self.latest.ready = first.num_bytes
        self._limit = limit
        self._new_memory = new_memory
        self._free: list[Segment] = []
        self._used: set[Publication] = set()
        self._released = asyncio.Event()

    def next(self, version: int) -> Publication:
        """Return the publication of a new commit. It reuses its predecessor's memory unless that is being read."""
        old = self.latest
        if old.num_readers == 0:
            segment, old.owns_segment = old.segment, False
        elif self._free:
            segment = self._free.pop()
        else:
            segment = self._new_memory()
        self.latest = Publication(version, segment, old.num_bytes, old.notify)
        self._tidy(old)
        return self.latest

    async def acquire(self, min_version: int, as_frames: bool) -> Publication:
        """Return the latest version, at least `min_version`. The caller gives it back with `release`."""
        while self.latest not in self._used and len(self._used) >= self._limit:
            self._released.clear()
            await self._released.wait()
        assert self.latest.version >= min_version
        return self.hold(as_frames)

    def hold(self, as_frames: bool) -> Publication:
        """Return the latest version without regard to the limit. The caller gives it back with `release`."""
        publication = self.latest
        self._used.add(publication)
        publication.num_users += 1
        if as_frames:
            publication.encode(self._tidy)
        else:
            publication.num_readers += 1
        return publication

    def release(self, publication: Publication, as_frames: bool) -> None:
        """Give a version back, because the worker has received it or is gone."""
        publication.num_users -= 1
        if not as_frames:
            publication.num_readers -= 1
        if publication.num_users == 0:
            self._used.remove(publication)
            self._released.set()
        self._tidy(publication)

    def _tidy(self, publication: Publication) -> None:
        """Free the memory of an old version if nobody reads it."""
        if publication is self.latest:
            return
        if publication.num_users == 0:
            publication.forget_frames()
        if publication.num_readers == 0 and publication.owns_segment:
            publication.owns_segment = False
            self._free.append(publication.segment)


# ---- reference -----------------------------------------------------------------------------------
# References: the weights as workers have them if replies are encoded differences. Each difference is encoded once.
#
#     weights (exact)  --difference, at times-->  reference  --the same bytes for all-->  every worker's copy
#
# Only commits and replies decide which versions are published. They are equal on all shards, so all parts of a reply
# have one version. The tensor thread does the work, in its order. After the server starts or goes back to a snapshot,
# a new reference is a copy of the weights. `encoded_weights` is for replies that are weights and not differences.


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
