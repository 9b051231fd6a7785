"""A run whose workers have joined, and that has weights."""

from __future__ import annotations

from typing import Any

from paramserver.ps.core import events
from paramserver.ps.core.run import Run
from paramserver.tests.scenarios.telling import make_run


def begin(run: Run, num_workers: int = 2) -> Run:
    for rank in range(num_workers):
        run.apply(events.Joined(rank + 1, rank, process=f"w{rank}"))
        run.apply(events.Offered(rank, 1, "model", "sgd"))
    run.apply(events.Brought(0, 1))
    return run


def started(mode: str, steps: int | None = None, num_workers: int = 2, **options: Any) -> Run:
    settings = {"mode": mode, "training_steps": steps, "num_workers": num_workers, **options}
    return begin(make_run(settings), num_workers)
