"""The baselines of one measurement, running for as long as it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .base import choose


@contextmanager
def chosen_running(names: Sequence[str], measurement: str) -> Iterator[tuple[list[Any], list[str]]]:
    """Those of `names` that take part in `what`, and a line for each that does not."""
    baselines, lines = choose(names, measurement)
    with ExitStack() as stack:
        for baseline in baselines:
            stack.enter_context(baseline.running())
        yield baselines, lines
