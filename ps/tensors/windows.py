"""Bodies cut into windows that stay in the cache: everything that passes over a model goes window by window."""

from __future__ import annotations

from typing import NamedTuple

from ...common.tensors.layout import FlatRun, Kind, Layout

# Measured on 100 MB, SGD, one thread: windows of 256 KiB 8.8 ms, 1 MiB 6.1, 2 MiB 5.7, 4 MiB 5.5, one window 5.8.
WINDOW_BYTES = 4 << 20


class Window(NamedTuple):
    """Bytes [start, end) of every body, and the flat pieces in them, of parameters first."""

    start: int
    end: int
    pieces: tuple[FlatRun, ...]


def in_order_sent(windows: list[Window], layout: Layout) -> list[tuple[int, Window, int]]:
    """Each window with its index, as they are made; and how many bytes, in the order in which they are sent
    (`Layout.first_sent`), are whole after it."""
    first, num_bytes = layout.first_sent, layout.exchange_bytes
    at = next(index for index, window in enumerate(windows) if window.end > first or window is windows[-1])
    found = [(index, windows[index], windows[index].end - first) for index in range(at, len(windows))]
    found += [(index, windows[index], num_bytes - first + windows[index].end) for index in range(at)]
    return [*found[:-1], (*found[-1][:2], num_bytes)]


def windows_of(layout: Layout) -> list[Window]:
    """All windows of a layout's contributions. Small models have one."""
    windows = []
    for start in range(0, max(1, layout.exchange_bytes), WINDOW_BYTES):
        end = min(start + WINDOW_BYTES, layout.exchange_bytes)
        runs = layout.runs_of(Kind.PARAMETER) + layout.runs_of(Kind.BUFFER)
        pieces = tuple(piece for run in runs if (piece := run.within(start, end)) is not None)
        windows.append(Window(start, end, pieces))
    return windows
