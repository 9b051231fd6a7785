"""Payloads of a model that is sharded over a worker's processes, sent through group rank 0's connections.

    group rank 0    a window of the payload  <- its own rows, the others' -> frames, while the next window fills
    group rank 1    follows: sends its rows of that window, or receives them

No process has the whole payload. Each has its part, and group rank 0 has two windows in addition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...common.errors import ParamServerError
from ...common.kinds import ContributionKind
from ...common.tensors.layout import as_bytes
from ..tensors.transfer import DirectTransfer, Indices, ModelTensors, Stretch
from .group import Channel

_WINDOW_BYTES = 4 << 20  # a multiple of what a message holds

# Returns this process's part of a tensor, by kind ("": the tensor itself) and index in the model. None means zeros, for
# a missing gradient.
Find = Callable[[str, int], torch.Tensor | None]
Finish = Callable[[], None]


class Range(NamedTuple):
    """Bytes [first, end) of the tensor with this index, which begin at byte `at` of a window."""

    tensor: int
    first: int
    end: int
    at: int


class Redistribution:
    """Moves windows of a payload between the processes.

    `borders`: by tensor index, where the bytes of each process begin, and where the last one's end; None: all processes
    have the whole tensor. Group rank 0 sends requests, from any thread, between `begin` and `end`. The others `follow`.
    """

    find: Find

    def __init__(self, channel: Channel, borders: Sequence[Sequence[int] | None]) -> None:
        self._channel, self._borders, self.rank = channel, borders, channel.rank
        self._lock = threading.Lock()
        self._is_open = False
        self._num_requests = 0
        # Works by request. torch aborts a work without a reference, and the peer would wait forever.
        self._under_way: dict[int, list[Any]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # of the others

    # ---- group rank 0 -------------------------------------------------------------------------

    def begin(self) -> None:
        """From now on the others follow requests."""
        self._is_open = True

    def end(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._is_open = False
            for tag in list(self._under_way):  # works of a connection that was lost
                self._done(tag)
            self._channel.send_all({"do": "end", **message})

    def fail(self, error: ParamServerError) -> None:
        """End the others with this error."""
        with self._lock:
            self._is_open = False
            self._channel.send_error(error)

    def fill(self, window: torch.Tensor, ranges: Sequence[Range], kind: str) -> Finish | None:
        """Start filling a window, uint8. Returns a function that waits for it.

        Returns None if the others no longer follow, because a lost connection may still request frames.
        """
        with self._lock:
            if not self._is_open:
                return None
            tag, coming = self._request("fill", ranges, kind), []
            for rank in range(1, self._channel.size):
                if pieces := self._pieces(ranges, rank, is_down=False):
                    part = _together(window, pieces)
                    if part is None:
                        part = torch.empty(_num_bytes(pieces), dtype=torch.uint8, device="cpu")
                        coming.append((part, pieces))
                    self._under_way[tag].append(self._channel.receive(part, rank, tag))
        for piece in self._pieces(ranges, 0, is_down=False):
            self._copy(window[piece.at :][: piece.end - piece.first], piece, kind)

        def finish() -> None:
            self._done(tag)
            for part, pieces in coming:
                for here, piece in zip(_split(part, pieces), pieces, strict=True):
                    window[piece.at :][: len(here)].copy_(here)

        return finish

    def spread(self, window: torch.Tensor, ranges: Sequence[Range]) -> Finish:
        """Start writing a window to the tensors. After the returned function the window may be filled again."""
        with self._lock:
            tag = self._request("spread", ranges)
            for rank in range(1, self._channel.size):
                if pieces := self._pieces(ranges, rank, is_down=True):
                    part = _together(window, pieces)
                    if part is None:
                        part = torch.cat([window[piece.at :][: piece.end - piece.first] for piece in pieces])
                    self._under_way[tag].append(self._channel.send(part, rank, tag))
        for piece in self._pieces(ranges, 0, is_down=True):
            self._tensor_at(piece).copy_(window[piece.at :][: piece.end - piece.first])
        return partial(self._done, tag)

    def _done(self, tag: int) -> None:
        self._channel.wait(self._under_way.pop(tag, []))

    def _request(self, action: str, ranges: Sequence[Range], kind: str = "") -> int:
        self._channel.send_all({"do": action, "kind": kind, "ranges": ranges})
        self._num_requests += 1
        self._under_way[self._num_requests] = []
        return self._num_requests

    # ---- the others ---------------------------------------------------------------------------

    def follow(self) -> dict[str, Any]:
        """Carry out group rank 0's requests. Returns its last message, or raises the error that ended it."""
        while (message := self._channel.receive_message())["do"] != "end":
            self._num_requests += 1
            is_down, kind = message["do"] == "spread", message["kind"]
            pieces = self._pieces([Range(*item) for item in message["ranges"]], self._channel.rank, is_down)
            if not pieces:
                continue
            flat = self._memory_for(pieces, kind, is_down)
            is_apart = flat is self._memory
            if is_apart:
                flat = flat[: _num_bytes(pieces)]
            if is_down:
                self._channel.wait([self._channel.receive(flat, 0, self._num_requests)])
            for here, piece in zip(_split(flat, pieces), pieces, strict=True) if is_apart else ():
                if is_down:
                    self._tensor_at(piece).copy_(here)
                else:
                    self._copy(here, piece, kind)
            if not is_down:
                self._channel.wait([self._channel.send(flat, 0, self._num_requests)])
        return message

    def _memory_for(self, pieces: Sequence[Range], kind: str, is_down: bool) -> torch.Tensor:
        """The bytes of a single piece on the CPU; else `_memory`, which is kept, as memory of freed windows may be."""
        part = self.find("" if is_down else kind, pieces[0].tensor) if len(pieces) == 1 else None
        if part is not None and part.device.type == "cpu" and part.is_contiguous():
            return _bytes(part)[pieces[0].first : pieces[0].end]
        if len(self._memory) < _num_bytes(pieces):
            self._memory = torch.empty(_num_bytes(pieces), dtype=torch.uint8, device="cpu")
        return self._memory

    # ---- where bytes lie ----------------------------------------------------------------------

    def _pieces(self, ranges: Iterable[Range], rank: int, is_down: bool) -> list[Range]:
        """The ranges of one process, as bytes of its part.

        Group rank 0 sends tensors that all processes have, and all processes receive them.
        """
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

    def _copy(self, target: torch.Tensor, piece: Range, kind: str) -> None:
        part = self.find(kind, piece.tensor)
        if part is None:
            target.zero_()
        else:
            target.copy_(_bytes(part.contiguous())[piece.first : piece.end])

    def _tensor_at(self, piece: Range) -> torch.Tensor:
        part = self.find("", piece.tensor)
        assert part is not None
        return _bytes(part)[piece.first : piece.end]


class RedistributedTransfer(DirectTransfer):
    """A DirectTransfer for a model, or a shard's part of it, that is sharded over the processes of a worker."""

    lies_here = False

    def __init__(self, model: ModelTensors, redistribution: Redistribution) -> None:
        self._model, self._redistribution = model, redistribution
        self._spare: list[torch.Tensor] = []  # free windows
        self._going: list[tuple[Finish, torch.Tensor]] = []  # windows that are being written to the other processes

    # ---- out ----------------------------------------------------------------------------------

    def gather(self, kind: ContributionKind, indices: Indices = None) -> list[Stretch]:
        """Gather stretches. Each piece is valid until the next one is requested."""
        return [
            Stretch(start, (piece for stretch in self._filled(kind, start, end) for piece in stretch.pieces))
            for start, end in self._stretches(indices)
        ]

    def stream(self, kind: ContributionKind, indices: Indices = None) -> Iterator[Stretch]:
        for start, end in self._stretches(indices):
            yield from self._filled(kind, start, end)

    def gather_all(self) -> Iterator[memoryview]:
        return (piece for stretch in self._filled("", 0, self._model.layout.total_bytes) for piece in stretch.pieces)

    def gather_into(
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
        starts = self._model.starts
        return [(starts[stretch.start], starts[stretch.stop]) for stretch in self._model.stretches(indices)]

    def _filled(self, kind: str, start: int, end: int) -> Iterator[Stretch]:
        """Yield filled windows. Each is valid until the next one is requested, and the next fills meanwhile."""
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
                self._finish_window(self._going.pop(0))
            window, num_bytes = self._window(), stop - at
            yield as_bytes(window[:num_bytes])
            self._going.append((self._redistribution.spread(window[:num_bytes], self._ranges(at, stop)), window))

    def finish_write(self, num_bytes: int, kept: Sequence[tuple[int, int]] = ()) -> None:
        while self._going:
            self._finish_window(self._going.pop(0))

    def _finish_window(self, going: tuple[Finish, torch.Tensor]) -> None:
        finish, window = going
        finish()
        self._spare.append(window)

    def leave_segment(self) -> None:
        """Does nothing: no tensor of the model is in the segment."""

    # ---- windows ------------------------------------------------------------------------------

    def _window(self) -> torch.Tensor:
        """Return a free window. Threads of a lost connection and of the next one may both call it."""
        try:
            return self._spare.pop()
        except IndexError:
            return torch.empty(min(_WINDOW_BYTES, self._model.layout.total_bytes), dtype=torch.uint8, device="cpu")

    def _ranges(self, start: int, end: int, window: torch.Tensor | None = None) -> list[Range]:
        """The tensors' bytes among bytes [start, end) of the payload. Gaps between tensors are zeros in the window."""
        found, at = [], start
        for index, first, last in self._model.overlaps(start, end):
            if window is not None:
                window[at - start : first - start].zero_()
            whole, before = self._model.place_of(index)
            before -= self._model.layout.entries[index].offset
            found.append(Range(whole, first + before, last + before, first - start))
            at = last
        if window is not None:
            window[at - start :].zero_()
        return found


def _windows(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + _WINDOW_BYTES, end)) for at in range(start, end, _WINDOW_BYTES)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as uint8. Uses `data`, because tensors in an autograd graph may be written too."""
    return tensor.data.reshape(-1).view(torch.uint8)


def _num_bytes(pieces: Iterable[Range]) -> int:
    return sum(piece.end - piece.first for piece in pieces)


def _together(window: torch.Tensor, pieces: Sequence[Range]) -> torch.Tensor | None:
    """The bytes of neighbouring pieces in a window; None: there are others between them."""
    num_bytes = _num_bytes(pieces)
    is_stretch = pieces[-1].at + pieces[-1].end - pieces[-1].first - pieces[0].at == num_bytes
    return window[pieces[0].at :][:num_bytes] if is_stretch else None


def _split(flat: torch.Tensor, pieces: Sequence[Range]) -> Sequence[torch.Tensor]:
    return flat.split([piece.end - piece.first for piece in pieces])
