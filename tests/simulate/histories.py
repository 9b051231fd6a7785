"""Histories of simulated runs, as a server writes them."""

from __future__ import annotations

import io
import json
from typing import Any

from paramserver.drills.history_lines import Line, read_lines
from paramserver.ps.core import effects
from paramserver.ps.observe.history import line_of
from paramserver.simulate.run.simulation import Simulation
from paramserver.tests.simulate.worlds import config_of, world_of


def recorded(
    mode: str, num_workers: int, steps: int, policy: dict[str, Any] | None = None, **settings: Any
) -> list[Line]:
    written: list[bytes] = []

    def tell(at: float, fact: effects.Fact) -> None:
        op, fields = line_of(fact)
        if op:
            written.append(json.dumps({"op": op, "role": "server", "t": round(at, 6), **fields}).encode() + b"\n")

    config, world = config_of(mode, num_workers, steps, **(policy or {})), world_of(num_workers, **settings)
    Simulation(config, world, observe=tell).go()
    return parsed(b"".join(written))


def parsed(text: bytes) -> list[Line]:
    lines, problems = read_lines("history.jsonl", io.BytesIO(text))
    assert problems == []
    return lines
