"""Histories of simulated runs, as a server writes them."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

from paramserver.drills.history_lines import Line, read_lines
from paramserver.ps.core import effects
from paramserver.ps.observe.history import line_of
from paramserver.simulate.run.simulation import Simulation
from paramserver.tests.simulate.worlds import config_of, world_of


def recorded(
    mode: str, num_workers: int, steps: int, policy: dict[str, Any] | None = None, **settings: Any
) -> list[Line]:
    facts: list[tuple[float, effects.Fact]] = []
    config, world = config_of(mode, num_workers, steps, **(policy or {})), world_of(num_workers, **settings)
    simulation = Simulation(config, world, observe=lambda at, fact: facts.append((at, fact)))
    run, rules = simulation.run, simulation.policy
    start = effects.RunStarted(
        run.name, run.incarnation, mode, 0, {}, run.options.num_workers, rules.staleness_bound, None, (),
        rules.options.model_dump(mode="json"), asdict(rules.common),
    )  # fmt: skip
    simulation.go()
    lines = [(at, *line_of(fact)) for at, fact in [(0.0, start), *facts]]
    written = [json.dumps({"op": op, "role": "server", "t": round(at, 6), **more}) for at, op, more in lines if op]
    found, problems = read_lines("history.jsonl", io.BytesIO("\n".join(written).encode()))
    assert problems == []
    return found
