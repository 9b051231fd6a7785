"""Histories of simulated runs, as a server writes them."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

from paramserver.common.wire.records import Row
from paramserver.drills.history_lines import Line, read_lines
from paramserver.ps.core import effects
from paramserver.ps.core.run import Run
from paramserver.ps.observe.history import line_of
from paramserver.simulate.run.simulation import Simulation
from paramserver.tests.simulate.worlds import config_of, world_of


def run_started(
    run: Run, version: int = 0, rows: dict[int, Row] | None = None, source: str | None = None
) -> effects.RunStarted:
    """The first fact of a run, as the engine tells it."""
    policy = run.policy
    return effects.RunStarted(
        run.name, run.incarnation, run.mode, version, rows or {}, run.options.num_workers, policy.staleness_bound,
        source, (), policy.options.model_dump(mode="json"), asdict(policy.common),
    )  # fmt: skip


def recorded(
    mode: str, num_workers: int, steps: int, policy: dict[str, Any] | None = None, **settings: Any
) -> list[Line]:
    facts: list[tuple[float, effects.Fact]] = []
    config, world = config_of(mode, num_workers, steps, **(policy or {})), world_of(num_workers, **settings)
    simulation = Simulation(config, world, observe=lambda at, fact: facts.append((at, fact)))
    start = run_started(simulation.run)
    simulation.go()
    lines = [(at, *line_of(fact)) for at, fact in [(0.0, start), *facts]]
    written = [json.dumps({"op": op, "role": "server", "t": round(at, 6), **more}) for at, op, more in lines if op]
    found, problems = read_lines("history.jsonl", io.BytesIO("\n".join(written).encode()))
    assert problems == []
    return found
