"""Two tiers: regions, and the run above, whose workers are their relays.

Each region is simulated by itself. The times of its contributions are the recorded times of one worker of the run
above, whose link is the border of the region. Beside them stands the same run without regions: all its workers share
the sum of the borders, and each has at most its region's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..common.combinations import check, choices_of
from ..common.config.schema import Config
from ..common.errors import UsageError
from ..common.registry import MODES, mode_label
from ..ps.core import effects
from .machines.units import bandwidth, number, seconds
from .machines.world import World
from .plan import Runs, changed, framing_of
from .results.summary import ideal_rate
from .run.simulation import Simulation
from .traffic.sizes import payload_sizes


def tiers(runs: Runs, num: int, upstream_every: str, border: tuple[str, str], megabytes: float | None) -> Runs:
    """Returns each run without regions, then with `num` regions for each K of --upstream-every. Raises UsageError.

    `border`: its bandwidth and latency, as the user gave them.
    """
    every = [int(number("--upstream-every", word, 0)) for word in upstream_every.split(",")]
    (down, up), trip_s = bandwidth("--border-bandwidth", border[0]), seconds("--border-latency", border[1])
    found: Runs = []
    for config, world in runs:
        _check(config, world, num, every)
        flat = replace(
            world,
            down=min(world.down, down),
            up=min(world.up, up),
            server_down=min(world.server_down, down * num),
            server_up=min(world.server_up, up * num),
            latency_s=world.latency_s + trip_s,
            label=f"{mode_label(config.run.mode)}, flat",
        )
        found.append((config, flat))
        regions = [_region(config, world, rank, num) for rank in range(num)]
        of_border = replace(world, down=down, up=up, latency_s=trip_s)
        found += [_above(config, of_border, regions, num_steps, megabytes) for num_steps in every]
    return found


def _check(config: Config, world: World, num: int, every: list[int]) -> None:
    if num < 2 or world.num_workers % num:
        message = f"flag --regions: {world.num_workers} workers cannot be divided equally among {num} regions"
        raise UsageError(message, fix="-n a multiple of --regions, which is 2 or more")
    for num_steps in every:
        mode = config.upstream.mode if num_steps else config.run.mode
        above = {"mode_above": mode, "kind_above": MODES.load(mode).kind}
        check(choices_of(config, config.run.mode, regions=num, upstream_every=num_steps, **above))


def _region(config: Config, world: World, rank: int, num: int) -> tuple[list[tuple[int, float]], Simulation]:
    """Simulate a region. Returns (training steps of its slowest worker, seconds) of each version."""
    each = world.num_workers // num
    first = rank * each % len(world.speeds)
    speeds = world.speeds[first:] + world.speeds[:first]
    small = replace(
        world, num_workers=each, seed=world.seed + 1009 * rank, speeds=speeds, server_down=math.inf, server_up=math.inf
    )
    versions: list[tuple[int, float]] = []

    def observe(at: float, fact: effects.Fact) -> None:
        if isinstance(fact, effects.Commit):
            versions.append((simulation.policy.min_steps_done, at))

    least = min(config.policy.min_workers, each)
    of_region = changed(config, run={"workers": each}, policy={"min_workers": least})
    simulation = Simulation(of_region, small, observe=observe)
    simulation.go()
    return versions, simulation


def _above(
    config: Config, world: World, regions: list[tuple[list[tuple[int, float]], Simulation]], every: int,
    megabytes: float | None,
) -> tuple[Config, World]:  # fmt: skip
    """Returns the run above, with the links of `world`, which are the borders."""
    upstream, num = config.upstream, len(regions)
    each = world.num_workers // num
    mode = upstream.mode if every else config.run.mode
    options: dict[str, Any] = {"delayed_update": False, "min_workers": min(config.policy.min_workers, num)}
    options |= {"local_steps": every} if every else {}
    run = {"mode": mode, "workers": num, "batch_size": config.run.batch_size * each}
    worker = {"codec": upstream.codec, "reply_codec": upstream.reply_codec}
    above = changed(config, run=run, policy=options, worker=worker)
    length = getattr(above.policy.options(mode), "local_steps", 1) if MODES.load(mode).kind.worker_steps else 1
    sizes = payload_sizes(above, megabytes)
    label = f"{mode_label(config.run.mode)}, {num} regions, {mode_label(mode)}" + (f" {every}" if every else "")
    return above, replace(
        world,
        num_workers=num,
        sizes=sizes,
        framing=framing_of(above, sizes),
        recorded=tuple(_contributions(versions, length) for versions, _ in regions),
        label=label,
        trains_on=bool(every),
        behind=each,
        ideal=sum(ideal_rate(simulation) for _, simulation in regions),
    )


def _contributions(versions: list[tuple[int, float]], length: int) -> tuple[tuple[float, float], ...]:
    """Returns the seconds of each contribution of `length` training steps or more, with nothing beside its link."""
    found, steps, began = [], 0, 0.0
    for done, at in versions:
        if done - steps >= length:
            found.append((at - began, 0.0))
            steps, began = done, at
    return tuple(found) or ((versions[-1][1], 0.0),)
