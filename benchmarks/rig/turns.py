"""Compared measurements take turns, so that a noisy machine disturbs all alike.

Whatever is measured, ours or a baseline's, is a `Measured`: called with a count it does its thing that
often and returns what each time took, in seconds by part ("up", "down", "exchange", ...).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

from ..output.report import median

Samples = dict[str, list[float]]  # seconds, by part, in the order of the turns
Measured = Callable[[int], Samples]
# Opened, it is ready to be measured; closed, it has ended its processes.
Contestant = AbstractContextManager[Measured]


def timed(part: str, call: Callable[[], object]) -> Measured:
    """Returns `call`, timed as a whole."""

    def measured(count: int) -> Samples:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return {part: times}

    return measured


def in_parts(calls: Mapping[str, Callable[[], object]]) -> Measured:
    """Returns the calls as parts, timed one after another."""

    def measured(count: int) -> Samples:
        found: Samples = {part: [] for part in calls}
        for _ in range(count):
            for part, call in calls.items():
                found[part] += timed(part, call)(1)[part]
        return found

    return measured


def in_turns(contestants: Mapping[str, Measured], num_turns: int, per_turn: int, warmup: int) -> dict[str, Samples]:
    """`num_turns` turns of `per_turn` for each contestant, after `warmup` that are not counted."""
    found: dict[str, Samples] = {name: {} for name in contestants}
    for measured in contestants.values():
        measured(warmup)
    for _ in range(num_turns):
        for name, measured in contestants.items():
            for part, times in measured(per_turn).items():
                found[name].setdefault(part, []).extend(times)
    return found


@contextmanager
def opened(contestants: Mapping[str, Contestant]) -> Iterator[dict[str, Measured]]:
    """Open all contestants together."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(contestant) for name, contestant in contestants.items()}


def measure(
    contestants: Mapping[str, Callable[[], Contestant]],
    *,
    num_turns: int,
    per_turn: int = 1,
    warmup: int = 3,
    together: bool = True,
) -> dict[str, Samples]:
    """Open, measure in turns, close; with `together` false one after another, for lack of memory."""
    groups = [list(contestants)] if together else [[name] for name in contestants]
    found: dict[str, Samples] = {}
    for names in groups:
        with opened({name: contestants[name]() for name in names}) as ready:
            found |= in_turns(ready, num_turns, per_turn, warmup)
    return found


def medians(samples: Samples) -> dict[str, float]:
    """Returns median seconds by part."""
    return {part: median(times) for part, times in samples.items()}
