"""Payloads of a model of which each process of a worker has a part: between the connections of group rank 0 and where
the
bytes lie.

    group rank 0    a window of the payload  <- its own rows, the others' -> frames of its transport, while the next
    one fills
    group rank 1    follows: sends its rows of that window, or takes them

So what is on its way is nowhere whole: each process has its part, and group rank 0 two windows more.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...common.errors import ParamServerError
from ...common.kinds import ContributionKind
from ...common.tensors.layout import as_bytes
from ..tensors.transfer import DirectTransfer, Indices, ModelTensors, Stretch
from .channel import Channel

_WINDOW_BYTES = 8 << 20  # a multiple of what a message holds

# Where a tensor's bytes of this process lie; None: zeros, as of a gradient that did not come. Of a source, or "": the
# tensor itself; its index in the model.
Lying = Callable[[str, int], torch.Tensor | None]
Finish = Callable[[], None]


class Range(NamedTuple):
    """Bytes [first, end) of a tensor of the model, by its index, which begin at byte `at` of a window."""

    tensor: int
    first: int
    end: int
    at: int


class Redistribution:
    """`borders`: of each tensor, by index, where the bytes of each process begin, and those of the last end; None: all
    have all of it. Group rank 0 asks (from any thread, between `begin` and `end`), the others `follow`."""

    lying: Lying

    def __init__(self, channel: Channel, borders: Sequence[Sequence[int] | None]) -> None:
        self._channel, self._borders = channel, borders
        self._lock = threading.Lock()
        self._is_open = False
        self._num_asked = 0
        # What has begun, by when it was asked: torch would break off what nobody holds, and its peer wait for ever.
        self._under_way: dict[int, list[Any]] = {}

    @property
    def rank(self) -> int:
        return self._channel.rank

    # ---- group rank 0 -------------------------------------------------------------------------

    def begin(self) -> None:
        """The others follow from here on."""
        self._is_open = True

    def end(self, told: Mapping[str, Any]) -> None:
        with self._lock:
            self._is_open = False
            for asked in list(self._under_way):  # by a connection that was lost
                self._done(asked)
            self._channel.tell({"do": "end", **told})

    def fail(self, error: ParamServerError) -> None:
        """The others raise it too."""
        with self._lock:
            self._is_open = False
            self._channel.tell_error(error)

    def fill(self, window: torch.Tensor, ranges: Sequence[Range], kind: str) -> Finish | None:
        """Begin to fill it, uint8; what is returned waits for that. None where the others follow no more: a connection
        that was lost may still be asked for more."""
        with self._lock:
            if not self._is_open:
                return None
            tag, coming = self._ask("fill", ranges, kind), []
            for rank in range(1, self._channel.size):
                if pieces := self._pieces(ranges, rank, is_down=False):
                    flat = _row(pieces, window)
                    there = torch.empty(_num_bytes(pieces), dtype=torch.uint8) if flat is None else flat
                    self._under_way[tag].append(self._channel.receive(there, rank, tag))
                    coming.append((there, pieces if flat is None else []))
        for piece in self._pieces(ranges, 0, is_down=False):
            self._copy(window[piece.at :][: piece.end - piece.first], piece, kind)

        def finish() -> None:
            self._done(tag)
            for there, pieces in coming:
                for here, piece in zip(_split(there, pieces), pieces, strict=False):
                    window[piece.at :][: len(here)].copy_(here)

        return finish

    def spread(self, window: torch.Tensor, ranges: Sequence[Range]) -> Finish:
        """Begin to bring its bytes to where they belong; it may be filled again when what is returned has."""
        with self._lock:
            tag = self._ask("spread", ranges)
            for rank in range(1, self._channel.size):
                if pieces := self._pieces(ranges, rank, is_down=True):
                    flat = _row(pieces, window)
                    if flat is None:
                        flat = torch.cat([window[piece.at :][: piece.end - piece.first] for piece in pieces])
                    self._under_way[tag].append(self._channel.send(flat, rank, tag))
        for piece in self._pieces(ranges, 0, is_down=True):
            self._place(piece).copy_(window[piece.at :][: piece.end - piece.first])
        return partial(self._done, tag)

    def _done(self, asked: int) -> None:
        self._channel.wait(self._under_way.pop(asked, []))

    def _ask(self, what: str, ranges: Sequence[Range], kind: str = "") -> int:
        self._channel.tell({"do": what, "kind": kind, "ranges": ranges})
        self._num_asked += 1
        self._under_way[self._num_asked] = []
        return self._num_asked

    # ---- the others ---------------------------------------------------------------------------

    def follow(self) -> dict[str, Any]:
        """Do what group rank 0 asks for; what it tells in the end, or the error that it has ended with."""
        while (told := self._channel.hear())["do"] != "end":
            self._num_asked += 1
            is_down, kind = told["do"] == "spread", told["kind"]
            pieces = self._pieces([Range(*item) for item in told["ranges"]], self._channel.rank, is_down)
            if not pieces:
                continue
            flat = self._own_row(pieces, is_down, kind)
            there = torch.empty(_num_bytes(pieces), dtype=torch.uint8) if flat is None else flat
            if is_down:
                self._channel.wait([self._channel.receive(there, 0, self._num_asked)])
                for here, piece in zip(_split(there, pieces), pieces if flat is None else (), strict=False):
                    self._place(piece).copy_(here)
                continue
            for here, piece in zip(_split(there, pieces), pieces if flat is None else (), strict=False):
                self._copy(here, piece, kind)
            self._channel.wait([self._channel.send(there, 0, self._num_asked)])
        return told

    def _own_row(self, pieces: Sequence[Range], is_down: bool, kind: str) -> torch.Tensor | None:
        """The memory itself, where all of it is in one tensor of the host."""
        if len(pieces) > 1:
            return None
        lying = self.lying("" if is_down else kind, pieces[0].tensor)
        if lying is None or lying.device.type != "cpu" or not lying.is_contiguous():
            return None
        return _bytes(lying)[pieces[0].first : pieces[0].end]

    # ---- where bytes lie ----------------------------------------------------------------------

    def _pieces(self, ranges: Iterable[Range], rank: int, is_down: bool) -> list[Range]:
        """Of these, what is that process's: bytes of its part. What all have group rank 0 gives, and all take."""
        found = []
        for index, first, end, at in ranges:
            borders = self._borders[index]
            if borders is None:
                if is_down or rank == 0:
                    found.append(Range(index, first, end, at))
                continue
            begin, stop = max(first, borders[rank]), min(end, borders[rank + 1])
            if begin < stop:
                found.append(Range(index, begin - borders[rank], stop - borders[rank], at + begin - first))
        return found

    def _copy(self, there: torch.Tensor, piece: Range, kind: str) -> None:
        lying = self.lying(kind, piece.tensor)
        if lying is None:
            there.zero_()
        else:
            there.copy_(_bytes(lying.contiguous())[piece.first : piece.end])

    def _place(self, piece: Range) -> torch.Tensor:
        lying = self.lying("", piece.tensor)
        assert lying is not None
        return _bytes(lying)[piece.first : piece.end]


class RedistributedTransfer(DirectTransfer):
    """As DirectTransfer, of a model, or of a shard's part of it, that lies in all processes of a worker."""

    lies_here = False

    def __init__(self, model: ModelTensors, redistribution: Redistribution) -> None:
        self._model, self._redistribution = model, redistribution
        self._entries = model.layout.entries
        self._offsets = [entry.offset for entry in self._entries]
        self._spare: list[torch.Tensor] = []  # windows
        self._going: list[tuple[Finish, torch.Tensor]] = []  # to the others, out of these windows

    # ---- out ----------------------------------------------------------------------------------

    def gather(self, kind: ContributionKind, indices: Indices = None) -> list[Stretch]:
        """Each piece is valid until the next is asked for."""
        return [
            Stretch(start, (piece for of in self._filled(kind, start, end) for piece in of.pieces))
            for start, end in self._stretches(indices)
        ]

    def stream(self, kind: ContributionKind, indices: Indices = None) -> Iterator[Stretch]:
        for start, end in self._stretches(indices):
            yield from self._filled(kind, start, end)

    def gather_all(self) -> Iterator[memoryview]:
        return (piece for of in self._filled("", 0, self._model.layout.total_bytes) for piece in of.pieces)

    def place(
        self, kind: ContributionKind, segment: torch.Tensor, indices: Indices = None
    ) -> Iterator[tuple[int, int]]:
        for start, end in self._stretches(indices):
            for at, stop in _windows(start, end):
                finish = self._redistribution.fill(segment[at:stop], self._ranges(at, stop, segment[at:stop]), kind)
                if finish is None:
                    return
                finish()
                yield at, stop

    def _stretches(self, indices: Indices) -> list[tuple[int, int]]:
        start_of = self._model.start_of
        return [(start_of(stretch.start), start_of(stretch.stop)) for stretch in self._model.stretches(indices)]

    def _filled(self, kind: str, start: int, end: int) -> Iterator[Stretch]:
        """Each window is valid until the next one is asked for, and filled while the one before is used."""
        coming: list[tuple[Finish, int, torch.Tensor, int]] = []
        windows = _windows(start, end)
        while windows or coming:
            while windows and len(coming) < 2:
                at, stop = windows.pop(0)
                window, num_bytes = self._window(), stop - at
                finish = self._redistribution.fill(window[:num_bytes], self._ranges(at, stop, window[:num_bytes]), kind)
                if finish is None:
                    return
                coming.append((finish, at, window, num_bytes))
            finish, at, window, num_bytes = coming.pop(0)
            finish()
            yield Stretch(at, [as_bytes(window[:num_bytes])])
            self._spare.append(window)

    # ---- in -----------------------------------------------------------------------------------

    def targets(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        for at, stop in _windows(offset, offset + num_bytes):
            if len(self._going) > 1:
                self._gone(self._going.pop(0))
            window, num_bytes = self._window(), stop - at
            yield as_bytes(window[:num_bytes])
            self._going.append((self._redistribution.spread(window[:num_bytes], self._ranges(at, stop)), window))

    def finish_write(self, num_bytes: int, kept: Sequence[tuple[int, int]] = ()) -> None:
        while self._going:
            self._gone(self._going.pop(0))

    def _gone(self, going: tuple[Finish, torch.Tensor]) -> None:
        finish, window = going
        finish()
        self._spare.append(window)

    def leave_segment(self) -> None:
        """Nothing of the model lies there."""

    # ---- windows ------------------------------------------------------------------------------

    def _window(self) -> torch.Tensor:
        """Used by several threads: what is asked of a connection that was lost, and of the next one."""
        try:
            return self._spare.pop()
        except IndexError:
            return torch.empty(min(_WINDOW_BYTES, self._model.layout.total_bytes), dtype=torch.uint8)

    def _ranges(self, start: int, end: int, window: torch.Tensor | None = None) -> list[Range]:
        """What bytes [start, end) of the payload are; gaps between tensors are zeros in the window."""
        found, at = [], start
        begin = max(0, bisect.bisect_right(self._offsets, start) - 1)
        for index in range(begin, bisect.bisect_left(self._offsets, end)):
            entry = self._entries[index]
            first, last = max(at, entry.offset), min(end, entry.end)
            if first >= last:
                continue
            if window is not None:
                window[at - start : first - start].zero_()
            whole, before = self._model.place_of(index)
            before -= entry.offset
            found.append(Range(whole, first + before, last + before, first - start))
            at = last
        if window is not None:
            window[at - start :].zero_()
        return found


def _windows(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + _WINDOW_BYTES, end)) for at in range(start, end, _WINDOW_BYTES)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous one, uint8; shares memory. `data`: what a graph holds may be written, as a reply does."""
    return tensor.data.reshape(-1).view(torch.uint8)


def _num_bytes(pieces: Iterable[Range]) -> int:
    return sum(piece.end - piece.first for piece in pieces)


def _row(pieces: Sequence[Range], window: torch.Tensor) -> torch.Tensor | None:
    """What they are of a window, where they lie there one after another."""
    at = start = pieces[0].at
    for piece in pieces:
        if piece.at != at:
            return None
        at += piece.end - piece.first
    return window[start:at]


def _split(flat: torch.Tensor, pieces: Sequence[Range]) -> Sequence[torch.Tensor]:
    return flat.split([piece.end - piece.first for piece in pieces]) if pieces else ()
