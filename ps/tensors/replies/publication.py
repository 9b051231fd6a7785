"""Publications: versions of the weights that are sent to workers while the commit still computes them.

The event loop decides a commit, and the tensor thread computes it window by window. The publication of the version
exists from the decision on, and its readers follow `ready`. Workers on this host read the weights' own memory. For
other workers, frames are encoded once and shared.

A reader never sees two versions. While a version is being read, the next commit writes into the memory of an old
version. At most `limit` versions are being sent at once. A reader of a further version waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence

from ....common.tensors.layout import Kind, Layout
from ....common.wire.frames import CHUNK_BYTES, left_out_frame, payload_frames
from ....common.wire.segments import Segment

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
