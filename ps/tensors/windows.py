"""Windows: the parts of a payload that are processed at once, small enough for the cache."""

from __future__ import annotations

from typing import NamedTuple

from ...common.tensors.layout import FlatRun, Kind, Layout

# Measured on 100 MB, SGD, one thread: windows of 256 KiB 8.8 ms, 1 MiB 6.1, 2 MiB 5.7, 4 MiB 5.5, one window 5.8.
WINDOW_BYTES = 4 << 20


class Window(NamedTuple):
    """Bytes [start, end) of every payload, and the flat runs in them, parameters first."""

    start: int
    end: int
    pieces: tuple[FlatRun, ...]
    floats: tuple[FlatRun, ...]  # of the pieces, those that may have NaN and Inf


def windows_of(layout: Layout) -> list[Window]:
    """Return all windows of a layout's contributions. A small model has one window."""
    runs, num_bytes = layout.runs_of(Kind.PARAMETER) + layout.runs_of(Kind.BUFFER), layout.exchange_bytes
    windows = []
    for start in range(0, max(1, num_bytes), WINDOW_BYTES):
        end = min(start + WINDOW_BYTES, num_bytes)
        pieces = tuple(filter(None, (run.within(start, end) for run in runs)))
        windows.append(Window(start, end, pieces, tuple(piece for piece in pieces if piece.is_float)))
    return windows
