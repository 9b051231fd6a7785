"""From a configuration and flags to what is to be simulated: a configuration and a world for each mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.config.schema import Config, SlowdownConfig
from ..common.config.sources import load_config
from ..common.errors import UsageError
from ..common.registry import MODES, canonical_mode
from ..common.user_code import is_in_file
from .machines.units import bandwidth, named, number, seconds
from .machines.world import World
from .traffic.framing import Framing
from .traffic.sizes import payload_sizes

DEFAULT_NUM_WORKERS = 4
MOST_WORKERS = 1_000_000  # some 5 GB of them
_MOST_CONFIGURED = 4096  # run.workers; a simulation may have more
_FOLD_S_PER_BYTE = 1 / 4e9  # a mean of float32 in memory, one core
_STEP_S_PER_BYTE = 1 / 2e9  # SGD with momentum


@dataclass(frozen=True)
class Told:
    """The flags, as they were given."""

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
        """A flag that says how fast workers are, or when they are there; empty: none was given."""
        names = ("compute", "jitter", "speeds", "stragglers", "failures", "join_at")
        given = [name for name in names if getattr(self, name) != getattr(Told, name)]
        return "--" + given[0].replace("_", "-") if given else ""

    @property
    def has_links(self) -> bool:
        """Something of the network was given."""
        return (self.bandwidth, self.latency, self.server_bandwidth) != ("none", "0ms", "none")


def resolve(
    path: str | None,
    modes: str | None,
    workers: int | None,
    flags: Mapping[str, Any],
    sets: list[str],
    environ: Mapping[str, str],
) -> list[Config]:
    """A configuration for each mode. Raises UsageError, also for what cannot be simulated."""
    names = _modes(modes)
    told = {
        **flags,
        "run.workers": None if workers is None else min(workers, _MOST_CONFIGURED),
        "run.mode": names[0] if names else None,
        "run.other_modes": [name for name in names if is_in_file(name)] or None,
    }
    config = load_config(path, told, sets, environ, is_worker=False).config
    _check_possible(config)
    if workers is not None and workers > MOST_WORKERS:
        raise UsageError(f"flag --workers: {workers:,} workers, and {MOST_WORKERS:,} are the most", fix="fewer")
    found = []
    for name in names or [config.run.mode]:
        num = workers or config.run.workers or DEFAULT_NUM_WORKERS
        run = config.run.model_copy(update={"mode": name, "workers": num, "steps": config.run.task_steps})
        found.append(config.model_copy(update={"run": run}))
    return found


def _modes(text: str | None) -> list[str]:
    if text is None:
        return []
    if text.strip().lower() == "all":  # that have a server between workers
        return [name for name in MODES.names() if not MODES.load(name).kind.has_peers]
    try:
        return list(dict.fromkeys(canonical_mode(word) for word in text.split(",")))
    except UsageError as error:
        raise UsageError(f"flag --mode: {error.message}", fix=error.fix) from None


def _check_possible(config: Config) -> None:
    """Refuse what is not modelled and would change the result."""
    if config.run.task_steps is None:
        raise UsageError(
            f"run.epochs is {config.run.epochs}: how many steps that is depends on the data, which is not simulated",
            fix="say how many training steps: --steps 500",
        )
    if config.run.ends_by_metrics:
        raise UsageError(
            "run.stop_when and run.patience end a run by its loss, and no loss is simulated",
            fix="leave them out, and say how many training steps: --steps 500",
        )
    if steps := config.policy.option("overlap_steps"):
        raise UsageError(
            f"policy.overlap_steps is {steps}: replies in the middle of local steps are not simulated, only those that "
            "may take as long as these",
            fix="leave it out",
        )
    if (fragments := config.policy.option("fragments") or 1) > 1:
        raise UsageError(
            f"policy.fragments is {fragments}: contributions of a part of the model are not simulated",
            fix="--set policy.fragments=1, or the size of a part as --mb",
        )
    if config.server.shards > 1:
        raise UsageError(
            f"server.shards is {config.server.shards}: a simulation has one server",
            fix="--set server.shards=1, and the bandwidth of all shards together as --server-bandwidth",
        )


def worlds(configs: list[Config], told: Told) -> list[tuple[Config, World]]:
    """Each configuration with the world that the flags describe. Raises UsageError."""
    found = [(config, _world(config, told)) for config in configs]
    if told.join_at is None:
        return found
    # A run with a number of workers begins when all are there; who comes later comes to one without.
    return [(item.model_copy(update={"run": item.run.model_copy(update={"workers": None})}), at) for item, at in found]


def alone(config: Config, world: World) -> tuple[Config, World]:
    """The same work on the fastest of these machines: as many training steps, each on the batches of all workers, one
    after another; no link, no other worker, and nothing of it fails."""
    num, run = world.num_workers, config.run
    alone_run = run.model_copy(update={"mode": "sync", "workers": 1, "batch_size": run.batch_size * num})
    worker = config.worker.model_copy(update={"codec": "raw", "reply_codec": "raw"})
    policy = config.policy.model_copy(update={"delayed_update": False})
    machine = World(
        num_workers=1,
        seed=world.seed,
        compute_s=world.compute_s * num / max(world.speeds),
        jitter=world.jitter / math.sqrt(num),  # a sum's
        step_s=world.step_s,
        max_staged=world.max_staged,
    )
    return config.model_copy(update={"run": alone_run, "worker": worker, "policy": policy}), machine


def _world(config: Config, told: Told) -> World:
    if told.megabytes is not None and not 0 <= told.megabytes < 1e6:
        raise UsageError(f"flag --mb: {told.megabytes:g} is not a size in MB", fix="e.g. --mb 10")
    up_bytes, down_bytes, start_bytes = payload_sizes(config, told.megabytes)
    most = config.worker.max_mbit * 1e6 / 8 if config.worker.max_mbit else math.inf
    down, up = (min(rate, most) for rate in bandwidth("--bandwidth", told.bandwidth))
    server_down, server_up = bandwidth("--server-bandwidth", told.server_bandwidth)
    failures = named("--failures", told.failures, ("mtbf", "back")) if told.failures else {}
    fold_s, step_s = start_bytes * _FOLD_S_PER_BYTE, start_bytes * _STEP_S_PER_BYTE
    assert config.run.workers is not None
    joins_at = _joins_at(told.join_at) if told.join_at else ()
    world = World(
        num_workers=config.run.workers + len(joins_at),
        seed=config.run.seed,
        compute_s=seconds("--compute", told.compute),
        jitter=number("--jitter", str(told.jitter), 0, 10),
        speeds=tuple(number("--speeds", word, 1e-3, 1e3) for word in told.speeds.split(",")),
        slowdown=_slowdown(config.slowdown, told.stragglers),
        down=down,
        up=up,
        latency_s=seconds("--latency", told.latency),
        server_down=server_down,
        server_up=server_up,
        fold_s=fold_s if told.fold is None else seconds("--fold", told.fold),
        step_s=step_s if told.step is None else seconds("--step", told.step),
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        start_bytes=start_bytes,
        framing=_framing(config, (up_bytes, down_bytes, start_bytes)),
        max_staged=config.server.max_staged,
        mtbf_s=seconds("--failures", failures["mtbf"]) if failures else math.inf,
        back_s=seconds("--failures", failures["back"]) if failures else 0.0,
        joins_at=joins_at,
    )
    if world.compute_s <= 0:
        raise UsageError("flag --compute: a training step takes time", fix="e.g. --compute 100ms")
    if world.mtbf_s < world.compute_s:
        raise UsageError(
            f"flag --failures: a worker that fails every {failures['mtbf']} hardly ever ends a step of {told.compute}",
            fix=f"mtbf of at least {told.compute}",
        )
    return world


def _joins_at(text: str) -> tuple[float, ...]:
    """`60s:4,10min`: when workers join, and how many; one where it does not say. Raises UsageError."""
    found: list[float] = []
    for word in text.split(","):
        at, is_many, num = word.partition(":")
        many = int(number("--join-at", num, 1, MOST_WORKERS)) if is_many else 1
        found += [seconds("--join-at", at)] * many
    return tuple(sorted(found))


def _framing(config: Config, sizes: tuple[int, int, int]) -> Framing:
    """Of workers on other machines: they share no memory with the server."""
    worker, replied = config.worker, config.worker.reply_codec
    is_gradient = not MODES.load(config.run.mode).kind.worker_steps
    codecs = worker.codec, "" if replied == "raw" else replied
    return Framing(*sizes, *codecs, "direct" in worker.wanted_transports, is_gradient)


def _slowdown(config: SlowdownConfig, stragglers: str | None) -> SlowdownConfig:
    if stragglers is None:
        return config
    told = named("--stragglers", stragglers, ("p", "x"))
    probability, factor = number("--stragglers p", told["p"], 0, 1), number("--stragglers x", told["x"], 1)
    return config.model_copy(update={"straggler_probability": probability, "straggler_factor": factor})
