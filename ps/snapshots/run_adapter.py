"""Between `Snapshots` and the run as it is today: when one is taken, what is saved of the run, and how it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ...common.config.schema import Config
from ...common.reporting.log import get_logger
from ..core.run import Run
from ..core.stats import WorkerStats
from ..shards.orders import TakeSnapshot
from .available import Available
from .common import SnapshotName
from .resume import new_incarnation, resume_model
from .snapshots import Snapshots

log = get_logger()

_DEFAULT_EVERY_S = 30.0


class RunSnapshots:
    """Keeps snapshots of one run in `checkpoint.dir`. Used on the event loop."""

    def __init__(self, run: Run, config: Config, now: Callable[[], float] = time.monotonic) -> None:
        options = config.checkpoint
        self._run = run
        self._every_steps = options.every_steps
        self._every_s = options.every_s or (None if options.every_steps else _DEFAULT_EVERY_S)
        self._now = now
        self._last_step, self._last_at = run.min_step, now()
        self._is_coordinator = config.server.shard == 0
        self.snapshots = Snapshots(run.model, run.tensors, config, lambda fact: run.bus.publish(run.now(), fact))
        self.on_attempt: Callable[[], object] = lambda: None  # one has been written, or given up
        self._writing: asyncio.Future[None] | None = None
        if self._is_coordinator:  # the others take theirs when the coordinator does
            run.on_begin = self.take  # who goes on from nothing would be another run
            run.contributions.on_commit = self.committed
            run.before_final = self.take_last

    @property
    def has_written(self) -> bool:
        """This process has written one."""
        return self.snapshots.num_written > 0

    def committed(self) -> None:
        """A commit was decided: take a snapshot of what it makes, if one is due."""
        if self._writing is None and not self._run.shards.is_writing and self._is_due():
            self.take()

    def _is_due(self) -> bool:
        if self._every_steps is not None and self._run.min_step - self._last_step >= self._every_steps:
            return True
        return self._every_s is not None and self._now() - self._last_at >= self._every_s

    async def take_last(self) -> None:
        """A snapshot of the newest version, when this returns on the disk or given up with an alarm."""
        await self._settled()
        if self._run.model.has_weights and self._run.durable_version < self._run.policy.version:
            self.take()
            await self._settled()

    async def _settled(self) -> None:
        """No snapshot is being written, here or by another shard."""
        while self._writing is not None:
            await self._writing
        await self._run.shards.settled()

    def close(self) -> None:
        self.snapshots.close()

    def take(self) -> None:
        """Begin one."""
        run = self._run
        if self._is_coordinator:
            self.snapshots.least_common = run.durable_version
        run.shards.happens(TakeSnapshot())
        self._last_step, self._last_at = run.min_step, self._now()
        self._writing = asyncio.get_running_loop().create_future()
        self.snapshots.take(_saved(run), self._taken)

    def _taken(self, version: int) -> None:
        self._run.saved_version = version
        assert self._writing is not None
        writing, self._writing = self._writing, None
        writing.set_result(None)
        self.on_attempt()
        if self._run.durable_version or not self._run.shards.is_writing:
            self.snapshots.prune(self._run.durable_version)


def _saved(run: Run) -> dict[str, Any]:
    """What is not tensors: copied, since training goes on."""
    return {
        "run": run.name,
        "server_incarnation": run.incarnation,
        "policy": run.policy.saved_state(),
        "steps": run.policy.num_committed(),
        "num_joins": dict(run.roster.membership.num_joins),
        "training": {"elapsed_s": run.elapsed_s, "stats": _stats(run)},
    }


def _stats(run: Run) -> dict[str, dict[str, int | float]]:
    """Sums of each rank, for the summary. Steps of an open round are not in the weights, and not counted."""
    committed = run.policy.num_committed()
    found = {}
    for rank, stats in run.roster.stats.items():
        values = {field.name: getattr(stats, field.name) for field in fields(stats)}
        values["steps"] -= run.policy.num_counted.get(rank, 0) - committed.get(rank, 0)
        found[str(rank)] = {name: value for name, value in values.items() if type(value) in (int, float)}
        found[str(rank)].pop("loss")
    return found


def resume_at(run: Run, config: Config, available: Available, name: SnapshotName | None) -> None:
    """Bring a run that has not begun to the moment `name`; give the server its incarnation."""
    if name is not None:
        saved = resume_model(config, available, name, run.model)
        run.skipped_snapshots += [str(path) for path in available.skipped]
        run.name, run.incarnation = saved["run"], saved["server_incarnation"] + 1
        run.saved_version = saved["version"]
        _restore_stats(run, saved["training"])
        run.roster.membership.restore(saved["num_joins"])
        run.policy.restore(saved["version"], saved["steps"], saved["policy"])
        log.info("resumed", path=run.model.source, version=saved["version"], run=run.name, incarnation=run.incarnation)
    if config.checkpoint.dir is not None and config.server.shard == 0:
        run.incarnation = new_incarnation(config, run.incarnation)


def _restore_stats(run: Run, training: dict[str, Any]) -> None:
    """What is not there, or not what it should be, is counted from zero."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        run.contributions.elapsed_before_s = float(training["elapsed_s"])
        for rank, values in training["stats"].items():
            names = {field.name for field in fields(WorkerStats)} - {"rank", "recent"}
            known = {name: value for name, value in values.items() if name in names and type(value) in (int, float)}
            run.roster.stats[int(rank)] = WorkerStats(int(rank), **known)
