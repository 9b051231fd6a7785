"""Bodies cut into windows that stay in the cache: everything that passes over a model goes window by window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ...common.tensors.layout import FlatRun, Kind, Layout

# Measured on 100 MB, SGD, one thread: windows of 256 KiB 8.8 ms, 1 MiB 6.1, 2 MiB 5.7, 4 MiB 5.5, one window 5.8.
WINDOW_BYTES = 4 << 20


class Window(NamedTuple):
    """Bytes [start, end) of every body, and the flat pieces in them, of parameters first."""

    start: int
    end: int
    pieces: tuple[FlatRun, ...]


class Order:
    """In which order a body of weights is sent, and therefore made: `stretches` of it, bytes [start, end), and `made`,
    its windows, each with its index, and how many bytes in the order sent are whole after it."""

    def __init__(self, windows: Sequence[Window], starts: Sequence[int]) -> None:
        """`starts`: where stretches begin, in their order; each goes up to where another one begins. What is before all
        of them comes last."""
        num_bytes, size = windows[-1].end, windows[0].end
        ends = dict(pairwise([*sorted({0, *starts}), num_bytes]))
        self.stretches = [(start, ends[start]) for start in dict.fromkeys([*starts, 0]) if start < num_bytes]
        pieces = [
            (index, min(end, windows[index].end) - max(start, windows[index].start))
            for start, end in self.stretches
            for index in range(start // size, -(-end // size))
        ]
        turns = {index: turn for turn, index in enumerate(dict.fromkeys(index for index, _ in pieces))}
        num_whole = [0] * len(turns)
        is_made_in = 0
        for index, num in pieces:  # whole when all before it are
            is_made_in = max(is_made_in, turns[index])
            num_whole[is_made_in] += num
        self.made = [(index, windows[index], num) for index, num in zip(turns, accumulate(num_whole), strict=True)]


def windows_of(layout: Layout) -> list[Window]:
    """All windows of a layout's contributions. Small models have one."""
    windows = []
    for start in range(0, max(1, layout.exchange_bytes), WINDOW_BYTES):
        end = min(start + WINDOW_BYTES, layout.exchange_bytes)
        runs = layout.runs_of(Kind.PARAMETER) + layout.runs_of(Kind.BUFFER)
        pieces = tuple(piece for run in runs if (piece := run.within(start, end)) is not None)
        windows.append(Window(start, end, pieces))
    return windows
