"""Versions on their way: nobody ever reads two, whoever leaves whenever, and memory stays bounded.

The tensor thread is played step by step: a commit writes its version's number into every byte, window
by window, into the memory the publisher gave it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.wire.frames import parse
from paramserver.common.wire.segments import Segment, private_segment
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.tensors import replies as module
from paramserver.ps.tensors.replies import Publication, Publisher

NUM_BYTES, WINDOW = 48, 8


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_STRIDE_BYTES", 2 * WINDOW)
        patch.setattr(module, "CHUNK_BYTES", 7)
        yield


class Reader:
    """One worker that gets a version: from the segment itself or as frames."""

    def __init__(self, world: World, as_frames: bool) -> None:
        self.publisher = world.publisher
        self.as_frames = as_frames
        self.min_version = world.publisher.latest.version
        self.publication: Publication | None = None
        self.seen: list[tuple[int, int]] = []
        self.frames: list[bytes] = []
        self.is_whole = False
        self.may_go = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        self.publication = publication = await self.publisher.acquire(self.min_version, self.as_frames)
        try:
            if self.as_frames:
                async for raw in publication.frames():
                    self.frames.append(raw)
                    await asyncio.sleep(0)
            else:
                async for start, end in publication.progress():
                    self.seen.append((start, end))
                    self.check()
                    await asyncio.sleep(0)
            self.is_whole = True
            await self.may_go.wait()
        finally:
            self.check()
            self.publisher.release(publication, self.as_frames)

    def check(self) -> None:
        """All that it was told of is of one version, as long as it may read."""
        if self.publication is None:
            return
        assert self.publication.version >= self.min_version
        value = self.publication.version % 251
        at = 0
        for start, end in self.seen:
            assert (start, end) == (at, max(end, start + 1))
            assert bytes(self.publication.segment.bytes[start:end]) == bytes([value]) * (end - start)
            at = end
        for raw in self.frames:
            piece = parse(pb.ServerMessage, raw)
            assert bytes(piece.data) == bytes([value]) * len(piece.data)
        if self.is_whole:
            offsets = [parse(pb.ServerMessage, raw) for raw in self.frames]
            assert at == NUM_BYTES or [b for p in offsets for b in range(p.offset, p.offset + len(p.data))] == list(
                range(NUM_BYTES)
            )


class World:
    """A publisher, the tensor thread's work not done yet, and readers."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.memories = [private_segment(NUM_BYTES)]
        first = Publication(0, self.memories[0], NUM_BYTES, lambda wake: wake())
        self.publisher = Publisher(first, limit, self._new_memory)
        self.weights = self.memories[0]  # the store's
        self.work: deque[Callable[[], None]] = deque()
        self.readers: list[Reader] = []

    def _new_memory(self) -> Segment:
        self.memories.append(private_segment(NUM_BYTES))
        return self.memories[-1]

    def commit(self) -> Publication:
        old = self.publisher.latest
        is_read = old.num_readers > 0
        new = self.publisher.next(old.version + 1)
        assert (new.segment is old.segment) == (not is_read)
        for start in range(0, NUM_BYTES, WINDOW):
            self.work.append(lambda start=start: self._make(new, start))
        return new

    def _make(self, new: Publication, start: int) -> None:
        window = slice(start, start + WINDOW)
        if new.segment is not self.weights:
            new.segment.bytes[window] = self.weights.bytes[window]
        assert set(new.segment.bytes[window]) == {(new.version - 1) % 251}, "not made from the version before"
        new.segment.bytes[window] = bytes([new.version % 251]) * WINDOW
        new.made(window.stop)
        if window.stop == NUM_BYTES:
            self.weights = new.segment

    def read(self, as_frames: bool) -> Reader:
        self.readers.append(Reader(self, as_frames))
        return self.readers[-1]

    def work_on(self, count: int = 1000) -> None:
        for _ in range(min(count, len(self.work))):
            self.work.popleft()()

    async def check(self) -> None:
        for reader in self.readers:
            if reader.task.done() and not reader.task.cancelled():
                reader.task.result()
            if not reader.task.done():
                reader.check()
        publisher = self.publisher
        assert len(publisher._used) <= self.limit
        free = [id(segment) for segment in publisher._free]
        assert len(set(free)) == len(free), "free twice"
        versions = {id(p.segment): p.version for p in publisher._used if p.num_readers > 0}
        versions[id(publisher.latest.segment)] = publisher.latest.version
        assert versions.keys().isdisjoint(free), "free, and being read"

    async def end(self) -> None:
        """Everything decided is made, everybody gets what it asked for and goes: nothing is held any more."""
        self.work_on()
        for _ in range(50):
            for reader in self.readers:
                reader.may_go.set()
            await turns()
        assert all(reader.task.done() for reader in self.readers), "somebody waits for ever"
        await self.check()
        assert all(reader.is_whole or reader.task.cancelled() for reader in self.readers)
        publisher = self.publisher
        assert not publisher._used
        assert publisher.latest.num_readers == publisher.latest.num_users == 0
        assert len(publisher._free) + 1 == len(self.memories), "memory is lost"
        before = publisher.latest.segment
        assert publisher.next(publisher.latest.version + 1).segment is before


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---- one thing at a time ---------------------------------------------------------------------------


async def test_encoded_versions_leave_their_memory_alone() -> None:
    """Frames are copies: a slow connection keeps none of the weights' memory."""
    world = World(limit=1)
    reader = world.read(as_frames=True)
    await turns()
    assert reader.is_whole
    world.commit()
    assert len(world.memories) == 1
    assert reader.publication is not None
    reader.may_go.set()
    await turns()
    assert not reader.publication._frames, "frames that nobody wants are kept"
    await world.end()


async def test_frames_are_made_once_for_all() -> None:
    world = World(limit=3)
    first, second = world.read(as_frames=True), world.read(as_frames=True)
    await turns()
    third = world.read(as_frames=True)
    await turns()
    assert all(a is b is c for a, b, c in zip(first.frames, second.frames, third.frames, strict=True))
    await world.end()


async def test_when_too_many_versions_are_on_their_way_others_wait_for_a_newer_one() -> None:
    world = World(limit=2)
    readings = [world.read(as_frames=False)]
    await turns()
    world.commit()
    readings.append(world.read(as_frames=True))
    await turns()
    world.commit()
    late = world.read(as_frames=False)
    await turns()
    assert late.publication is None
    world.commit()
    world.work_on()
    readings[0].may_go.set()
    await turns()
    assert late.publication is not None
    assert late.publication.version == 3, "not the version it asked for, but the newest"
    assert len(world.memories) <= 3
    await world.end()


# ---- anything in any order -------------------------------------------------------------------------


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "work", "work", "read", "frames", "go", "cancel", "turns", "a turn"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@given(limit=st.integers(1, 3), actions=ACTIONS, stays=st.booleans())
@settings(max_examples=150, deadline=None)
def test_nobody_reads_two_versions_and_memory_is_bounded(
    limit: int, actions: list[tuple[str, int]], stays: bool
) -> None:
    """One memory for each version on its way, and one to write to, where no reader of frames is cancelled (`stays`)."""

    async def play() -> None:
        world = World(limit)
        for kind, pick in actions:
            match kind:
                case "commit":
                    world.commit()
                case "work":
                    world.work_on(pick)
                case "read" | "frames":
                    world.read(kind == "frames")
                case "go" if world.readers:
                    world.readers[pick % len(world.readers)].may_go.set()
                case "cancel" if world.readers:
                    reader = world.readers[pick % len(world.readers)]
                    if not (stays and reader.as_frames):
                        reader.task.cancel()
                case "turns":
                    await turns()
                case "a turn":
                    await asyncio.sleep(0)
            if stays:
                await turns()
                assert len(world.memories) <= limit + 1
            await world.check()
        await world.end()

    asyncio.run(play())


async def test_frames_are_made_as_the_payload_is_and_say_what_is_left_out() -> None:
    segment = private_segment(100)
    segment.bytes[:] = bytes(range(100))
    publication = Publication(1, segment, 100, lambda wake: wake())
    publication.num_users = 1
    publication.encode(lambda _: None)
    progress = asyncio.ensure_future(collect(publication))
    for made in (20, 50, 100):
        publication.ready = made  # as little as no stride is
        publication._wake()
        await turns()
    assert await progress == [(0, 20), (20, 50), (50, 100)]
    found = [parse(pb.ServerMessage, raw) async for raw in publication.frames()]
    at = [offset for item in found for offset in range(item.offset, item.offset + len(item.data))]
    assert at == [*range(100)] == list(b"".join(bytes(item.data) for item in found))
    found = [parse(pb.ServerMessage, raw) async for raw in publication.frames([(0, 20)])]
    assert [(item.offset, item.left_out) for item in found if item.left_out] == [(0, 7), (7, 7), (14, 6)]


async def collect(publication: Publication) -> list[tuple[int, int]]:
    return [item async for item in publication.progress()]
