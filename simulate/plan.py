"""Returns a configuration and a world for each mode to simulate, from a configuration and flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..common.config.schema import Config, SlowdownConfig
from ..common.config.sources import load_config
from ..common.errors import UsageError, raise_first
from ..common.registry import MODES, canonical_mode
from ..common.user_code import is_in_file
from .machines.units import bandwidth, named, number, seconds
from .machines.world import World
from .traffic.sizes import Framing, Sizes, payload_sizes

Runs = list[tuple[Config, World]]

DEFAULT_NUM_WORKERS = 4
MAX_WORKERS = 1_000_000  # they need about 5 GB
_MAX_CONFIGURED = 4096  # run.workers; a simulation may have more
_FOLD_S_PER_BYTE = 1 / 4e9  # a mean of float32 in memory, one core
_STEP_S_PER_BYTE = 1 / 2e9  # SGD with momentum


@dataclass(frozen=True)
class Flags:
    """The flags of machines and links, as the user gave them."""

    megabytes: float | None = None
    compute: str = "100ms"
    jitter: float = 0.1
    speeds: str = "1"
    stragglers: str | None = None
    bandwidth: str = "none"
    latency: str = "0ms"
    server_bandwidth: str = "none"
    fold: str | None = None
    step: str | None = None
    failures: str | None = None
    join_at: str | None = None

    @property
    def of_machines(self) -> str:
        """The first given flag about the workers' speed or presence; empty if none is given."""
        names = ("compute", "jitter", "speeds", "stragglers", "failures", "join_at")
        given = [name for name in names if getattr(self, name) != getattr(Flags, name)]
        return "--" + given[0].replace("_", "-") if given else ""


def resolve(
    path: str | None,
    modes: str | None,
    workers: int | None,
    flags: Mapping[str, Any],
    sets: list[str],
    environ: Mapping[str, str],
) -> list[Config]:
    """Returns a configuration for each mode. Raises UsageError, also for settings that cannot be simulated."""
    names = _modes(modes)
    settings = {
        **flags,
        "run.workers": None if workers is None else min(workers, _MAX_CONFIGURED),
        "run.mode": names[0] if names else None,
        "run.other_modes": [name for name in names if is_in_file(name)] or None,
    }
    config = load_config(path, settings, sets, environ, is_worker=False).config
    epochs, overlap, fragments = config.run.epochs, *map(config.policy.option, ("overlap_steps", "fragments"))
    raise_first(
        (config.run.task_steps is None,
         f"run.epochs is {epochs}: the number of steps depends on the data, which is not simulated",
         "give the number of training steps: --steps 500"),
        (config.run.ends_by_metrics, "run.stop_when and run.patience end a run by its loss, and no loss is simulated",
         "leave them out, and give the number of training steps: --steps 500"),
        (overlap, f"policy.overlap_steps is {overlap}: replies in the middle of local steps are not simulated",
         "leave it out"),
        ((fragments or 1) > 1, f"policy.fragments is {fragments}: contributions of a part of the model are not "
         "simulated", "--set policy.fragments=1, or the size of a part as --mb"),
        (config.server.shards > 1, f"server.shards is {config.server.shards}: a simulation has one server",
         "--set server.shards=1, and the bandwidth of all shards together as --server-bandwidth"),
        ((workers or 0) > MAX_WORKERS, f"flag --workers: {workers:,} workers are more than the limit of {MAX_WORKERS:,}"
         if workers else "", "fewer"),
    )  # fmt: skip
    run = {"workers": workers or config.run.workers or DEFAULT_NUM_WORKERS, "steps": config.run.task_steps}
    return [changed(config, run={**run, "mode": name}) for name in names or [config.run.mode]]


def changed(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Returns the configuration with these values in its sections."""
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=update)


def _modes(text: str | None) -> list[str]:
    if text is None:
        return []
    if text.strip().lower() == "all":  # that have a server between workers
        return [name for name in MODES.names() if MODES.load(name).kind.has_payload]
    try:
        return list(dict.fromkeys(canonical_mode(word) for word in text.split(",")))
    except UsageError as error:
        raise UsageError(f"flag --mode: {error.message}", fix=error.fix) from None


def worlds(configs: list[Config], flags: Flags) -> Runs:
    """Returns each configuration with the world that the flags describe. Raises UsageError."""
    found = [(config, _world(config, flags)) for config in configs]
    if flags.join_at is None:
        return found
    # A run with a number of workers begins when all are present, so workers can join later only to a run without one.
    return [(changed(config, run={"workers": None}), world) for config, world in found]


def alone(config: Config, world: World) -> tuple[Config, World]:
    """Returns the same work on the fastest of these machines, without links and failures.

    It takes as many training steps as the run. Each step computes the batches of all workers in sequence.
    """
    num = world.num_workers
    alone_config = changed(
        config,
        run={"mode": "sync", "workers": 1, "batch_size": config.run.batch_size * num},
        worker={"codec": "raw", "reply_codec": "raw"},
        policy={"delayed_update": False},
    )
    machine = World(
        num_workers=1,
        seed=world.seed,
        compute_s=world.compute_s * num / max(world.speeds),
        jitter=world.jitter / math.sqrt(num),  # a sum's
        step_s=world.step_s,
        max_staged=world.max_staged,
    )
    return alone_config, machine


def _world(config: Config, flags: Flags) -> World:
    if flags.megabytes is not None and not 0 <= flags.megabytes < 1e6:
        raise UsageError(f"flag --mb: {flags.megabytes:g} is not a size in MB", fix="e.g. --mb 10")
    most = config.worker.max_mbit * 1e6 / 8 if config.worker.max_mbit else math.inf
    down, up = (min(rate, most) for rate in bandwidth("--bandwidth", flags.bandwidth))
    server_down, server_up = bandwidth("--server-bandwidth", flags.server_bandwidth)
    failures = named("--failures", flags.failures, ("mtbf", "back")) if flags.failures else {}
    assert config.run.workers is not None
    joins_at = _joins_at(flags.join_at) if flags.join_at else ()
    world = World(
        num_workers=config.run.workers + len(joins_at),
        seed=config.run.seed,
        compute_s=seconds("--compute", flags.compute),
        jitter=number("--jitter", str(flags.jitter), 0, 10),
        speeds=tuple(number("--speeds", word, 1e-3, 1e3) for word in flags.speeds.split(",")),
        slowdown=_slowdown(config.slowdown, flags.stragglers),
        down=down,
        up=up,
        latency_s=seconds("--latency", flags.latency),
        server_down=server_down,
        server_up=server_up,
        fold_s=0.0 if flags.fold is None else seconds("--fold", flags.fold),
        step_s=0.0 if flags.step is None else seconds("--step", flags.step),
        max_staged=config.server.max_staged,
        mtbf_s=seconds("--failures", failures["mtbf"]) if failures else math.inf,
        back_s=seconds("--failures", failures["back"]) if failures else 0.0,
        joins_at=joins_at,
    )
    raise_first(
        (world.compute_s <= 0, "flag --compute: the time of a training step must be positive", "e.g. --compute 100ms"),
        (world.mtbf_s < world.compute_s, f"flag --failures: a worker that fails every {failures.get('mtbf')} hardly "
         f"ever ends a step of {flags.compute}", f"mtbf of at least {flags.compute}"),
    )  # fmt: skip
    sizes = payload_sizes(config, flags.megabytes)  # of the task's model, which takes seconds to load
    world = replace(world, sizes=sizes, framing=framing_of(config, sizes))
    world = world if flags.fold is not None else replace(world, fold_s=sizes.start * _FOLD_S_PER_BYTE)
    return world if flags.step is not None else replace(world, step_s=sizes.start * _STEP_S_PER_BYTE)


def _joins_at(text: str) -> tuple[float, ...]:
    """Returns the times at which workers join, from `60s:4,10min` (four and one). Raises UsageError."""
    found: list[float] = []
    for word in text.split(","):
        at, is_many, num = word.partition(":")
        many = int(number("--join-at", num, 1, MAX_WORKERS)) if is_many else 1
        found += [seconds("--join-at", at)] * many
    return tuple(sorted(found))


def framing_of(config: Config, sizes: Sizes) -> Framing:
    """Returns the framing of workers on other machines, which share no memory with the server."""
    worker, has_base = config.worker, not MODES.load(config.run.mode).kind.worker_steps
    reply_codec = "" if worker.reply_codec == "raw" else worker.reply_codec
    return Framing(sizes, worker.codec, reply_codec, "direct" in worker.wanted_transports, has_base)


def _slowdown(config: SlowdownConfig, stragglers: str | None) -> SlowdownConfig:
    if stragglers is None:
        return config
    parts = named("--stragglers", stragglers, ("p", "x"))
    probability, factor = number("--stragglers p", parts["p"], 0, 1), number("--stragglers x", parts["x"], 1)
    return config.model_copy(update={"straggler_probability": probability, "straggler_factor": factor})
