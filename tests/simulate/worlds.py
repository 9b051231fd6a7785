"""Configurations and worlds of the tests."""

from __future__ import annotations

from typing import Any

from paramserver.common.config.schema import Config
from paramserver.simulate.machines.world import World
from paramserver.simulate.run.simulation import Simulation
from paramserver.simulate.traffic.sizes import Sizes

MB = 1_000_000


def config_of(mode: str, num_workers: int, steps: int, **policy: Any) -> Config:
    run = {"mode": mode, "workers": num_workers, "steps": steps, "batch_size": 1}
    return Config.model_validate({"run": run, "policy": policy})


def world_of(num_workers: int, num_bytes: int = MB, **settings: Any) -> World:
    """Links of 1 MB/s and 100 ms unless told otherwise, a server with room for all."""
    sizes = {"sizes": Sizes(num_bytes, num_bytes), "max_staged": num_workers}
    links = {"up": 1.0 * MB, "down": 1.0 * MB, "latency_s": 0.1}
    return World(**{"num_workers": num_workers, "compute_s": 1.0, **sizes, **links, **settings})


def simulated(
    mode: str, num_workers: int, steps: int, policy: dict[str, Any] | None = None, **settings: Any
) -> Simulation:
    simulation = Simulation(config_of(mode, num_workers, steps, **(policy or {})), world_of(num_workers, **settings))
    simulation.go()
    return simulation
