"""Payloads of a model that is sharded over a worker's processes, sent through group rank 0's connections.

    group rank 0    a window of the payload  <- its own rows, the others' -> frames, while the next window fills
    group rank 1    follows: sends its rows of that window, or receives them

No process has the whole payload. Each has its part, and group rank 0 has two windows in addition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    def of(self, window: torch.Tensor) -> torch.Tensor:
        """The bytes in a window."""
        return window[self.at :][: self.end - self.first]


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
        """The others follow no more. `message` is what `follow` returns to them."""
        with self._lock:
            self._is_open = False
            while self._under_way:  # works of a connection that was lost
                self._channel.wait(self._under_way.popitem()[1])
            self._channel.send_all(message)

    def fail(self, error: ParamServerError) -> None:
        """End the others with this error."""
        with self._lock:
            self._is_open = False
            self._channel.send_error(error)

    def move(self, window: torch.Tensor, ranges: Sequence[Range], kind: str | None) -> Finish | None:
        """Start filling a window, uint8, with bytes of this kind; None: start writing the window to the tensors.

        After the returned function, the window may be read or filled again. Returns None if the others no longer
        follow, because a lost connection may still request frames.
        """
        received: list[tuple[torch.Tensor, list[Range]]] = []  # pieces that are no neighbours in the window
        with self._lock:
            if not self._is_open:
                return None
            self._channel.send_all({"kind": kind, "ranges": ranges})
            self._num_requests = tag = self._num_requests + 1
            works = self._under_way[tag] = []
            for rank in range(1, self._channel.size):
                if not (pieces := self._pieces(ranges, rank, kind)):
                    continue
                first, last, num_bytes = pieces[0], pieces[-1], _num_bytes(pieces)
                if last.at + last.end - last.first - first.at == num_bytes:
                    part = window[first.at :][:num_bytes]
                elif kind is None:
                    part = torch.cat([piece.of(window) for piece in pieces])
                else:
                    part = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                    received.append((part, pieces))
                works.append((self._channel.send if kind is None else self._channel.receive)(part, rank, tag))
        for piece in self._pieces(ranges, 0, kind):
            self._copy(piece.of(window), piece, kind)

        def finish() -> None:
            self._channel.wait(self._under_way.pop(tag, []))
            for part, pieces in received:
                for here, piece in zip(_split(part, pieces), pieces, strict=True):
                    piece.of(window).copy_(here)

        return finish

    # ---- the others ---------------------------------------------------------------------------

    def follow(self) -> dict[str, Any]:
        """Carry out group rank 0's requests. Returns its last message, or raises the error that ended it."""
        while "ranges" in (message := self._channel.receive_message()):
            self._num_requests += 1
            kind: str | None = message["kind"]
            pieces = self._pieces([Range(*item) for item in message["ranges"]], self._channel.rank, kind)
            if not pieces:
                continue
            num_bytes, copies = _num_bytes(pieces), list[tuple[torch.Tensor, Range]]()
            part = self.find(kind or "", pieces[0].tensor) if len(pieces) == 1 else None
            if part is not None and part.device.type == "cpu" and part.is_contiguous():
                flat = _bytes(part)[pieces[0].first : pieces[0].end]
            else:
                if len(self._memory) < num_bytes:  # it is kept, as memory of freed windows may be
                    self._memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                flat = self._memory[:num_bytes]
                copies = list(zip(_split(flat, pieces), pieces, strict=True))
            if kind is None:
                self._channel.wait([self._channel.receive(flat, 0, self._num_requests)])
            for here, piece in copies:
                self._copy(here, piece, kind)
            if kind is not None:
                self._channel.wait([self._channel.send(flat, 0, self._num_requests)])
        return message

    # ---- where bytes lie ----------------------------------------------------------------------

    def _pieces(self, ranges: Iterable[Range], rank: int, kind: str | None) -> list[Range]:
        """The ranges of one process, as bytes of its part.

        Group rank 0 sends tensors that all processes have, and all processes receive them.
        """
        found = []
        for index, first, end, at in ranges:
            borders = self._borders[index]
            if borders is None:
                if kind is None or rank == 0:
                    found.append(Range(index, first, end, at))
                continue
            begin, stop = max(first, borders[rank]), min(end, borders[rank + 1])
            if begin < stop:
                found.append(Range(index, begin - borders[rank], stop - borders[rank], at + begin - first))
        return found

    def _copy(self, here: torch.Tensor, piece: Range, kind: str | None) -> None:
        """Copy the bytes of a piece here; with kind None, from here."""
        part = self.find(kind or "", piece.tensor)
        if part is None:
            here.zero_()
            return
        local = _bytes(part)[piece.first : piece.end]
        local.copy_(here) if kind is None else here.copy_(local)


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
        filled = [(start, self._filled(kind, start, end)) for start, end in self._stretches(indices)]
        return [Stretch(start, (piece for _, piece in windows)) for start, windows in filled]

    def stream(self, kind: ContributionKind, indices: Indices = None) -> Iterator[Stretch]:
        for start, end in self._stretches(indices):
            for at, piece in self._filled(kind, start, end):
                yield Stretch(at, [piece])

    def gather_all(self) -> Iterator[memoryview]:
        return (piece for _, piece in self._filled("", 0, self._model.layout.total_bytes))

    def gather_into(
        self, kind: ContributionKind, segment: torch.Tensor, indices: Indices = None
    ) -> Iterator[tuple[int, int]]:
        for start, end in self._stretches(indices):
            for at, stop in _windows(start, end):
                finish = self._redistribution.move(segment[at:stop], self._ranges(at, stop, segment[at:stop]), kind)
                if finish is None:
                    return
                finish()
                yield at, stop

    def _stretches(self, indices: Indices) -> list[tuple[int, int]]:
        starts = self._model.starts
        return [(starts[stretch.start], starts[stretch.stop]) for stretch in self._model.stretches(indices)]

    def _filled(self, kind: str, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Yield filled windows and where they begin.

        Each is valid until the next one is requested, and the next fills meanwhile.
        """
        coming: list[tuple[Finish, int, torch.Tensor, torch.Tensor]] = []
        windows = _windows(start, end)
        while windows or coming:
            while windows and len(coming) < 2:
                at, stop = windows.pop(0)
                window = self._window()
                part = window[: stop - at]
                finish = self._redistribution.move(part, self._ranges(at, stop, part), kind)
                if finish is None:
                    return
                coming.append((finish, at, window, part))
            finish, at, window, part = coming.pop(0)
            finish()
            yield at, as_bytes(part)
            self._spare.append(window)

    # ---- in -----------------------------------------------------------------------------------

    def targets(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        for at, stop in _windows(offset, offset + num_bytes):
            self._finish_windows(num_left=1)
            window = self._window()
            part = window[: stop - at]
            yield as_bytes(part)
            finish = self._redistribution.move(part, self._ranges(at, stop, part), None)
            assert finish is not None  # weights arrive while the others follow
            self._going.append((finish, window))

    def finish_write(self, num_bytes: int, kept: Sequence[tuple[int, int]] = ()) -> None:
        self._finish_windows(num_left=0)

    def _finish_windows(self, num_left: int) -> None:
        while len(self._going) > num_left:
            finish, window = self._going.pop(0)
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

    def _ranges(self, start: int, end: int, window: torch.Tensor) -> list[Range]:
        """The tensors' bytes among bytes [start, end) of the payload. Gaps between tensors are zeros in the window."""
        found, at = [], start
        for index, first, last in self._model.overlaps(start, end):
            window[at - start : first - start].zero_()
            whole, before = self._model.place_of(index)
            before -= self._model.layout.entries[index].offset
            found.append(Range(whole, first + before, last + before, first - start))
            at = last
        window[at - start :].zero_()
        return found


def _windows(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + _WINDOW_BYTES, end)) for at in range(start, end, _WINDOW_BYTES)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as uint8. Uses `data`, because tensors in an autograd graph may be written too."""
    return tensor.data.reshape(-1).view(torch.uint8)


def _num_bytes(pieces: Iterable[Range]) -> int:
    return sum(piece.end - piece.first for piece in pieces)


def _split(flat: torch.Tensor, pieces: Sequence[Range]) -> Sequence[torch.Tensor]:
    return flat.split([piece.end - piece.first for piece in pieces])
