"""Snapshots of a run while it trains: when one is taken, its way to the disk, and going on from one.

    a commit is decided ──due?──> policy and roster are copied, at once, on the event loop
                                  the store is copied, after that commit, on the tensor thread
                                  files are written, hashed and synced on a thread of low priority

Both copies stand between the same two commits, so the table of last steps says exactly what the weights
hold. Training waits for the copy of the store and for nothing else. What fails is an alarm, not an end:
the older snapshots stay, and the next one is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ...common.config.schema import Config
from ...common.errors import CheckpointError
from ...common.reporting.log import get_logger
from ...common.version import PROGRAM_VERSION
from ..core.facts import SnapshotTaken
from ..core.run import Run
from ..core.stats import WorkerStats
from ..shards.orders import TakeSnapshot
from .checkpoint import Loaded, Written, load_newest, write
from .common import SnapshotName
from .files import next_incarnation, prepare, prune, sync
from .manifest import ShareEntry, optimizer_entry, tensor_entries
from .resharding import Available, snapshot_dir
from .store_state import Captured, capture, manifest_of, restore, tensors_of

log = get_logger()

_DEFAULT_EVERY_S = 30.0
_INCARNATION = "incarnation"
_LOW_PRIORITY = 10  # nice


class Snapshots:
    """Keeps snapshots of one run in `checkpoint.dir`. Used on the event loop."""

    def __init__(self, run: Run, config: Config, now: Callable[[], float] = time.monotonic) -> None:
        options = config.checkpoint
        assert options.dir is not None
        self._run = run
        self._directory = snapshot_dir(config)
        self._keep = options.keep
        self._every_steps = options.every_steps
        self._every_s = options.every_s or (None if options.every_steps else _DEFAULT_EVERY_S)
        self._now = now
        self._last_step, self._last_at = run.min_step, now()
        self.on_attempt: Callable[[], object] = lambda: None  # one has been written, or given up
        self._captured: Captured | None = None  # memory of the last one, for the next
        self._writing: asyncio.Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots", initializer=_lower_priority)
        if config.server.shard == 0:  # the others take theirs when the coordinator does
            run.on_begin = self.take  # who goes on from nothing would be another run
            run.contributions.on_commit = self.committed
            run.before_final = self.take_last

    # ---- when -----------------------------------------------------------------------------

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
        self._thread.shutdown(wait=True)

    # ---- how ------------------------------------------------------------------------------

    def take(self) -> asyncio.Future[None]:
        """Begin one; resolves when it is on the disk, or given up with an alarm."""
        run = self._run
        run.shards.happens(TakeSnapshot())
        self._last_step, self._last_at = run.min_step, self._now()
        self._writing = done = asyncio.get_running_loop().create_future()
        facts = _facts(run)
        captured, self._captured = self._captured, None
        run.tensors.submit(lambda: capture(run.model.store, captured), partial(self._write, facts, done))
        return done

    def _write(self, facts: dict[str, Any], done: asyncio.Future[None], captured: Captured) -> None:
        """The store is copied: the rest is slow and in nobody's way."""
        self._captured = captured
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write_files, facts, captured)
        writing.add_done_callback(partial(self._written, facts, done, self._now()))

    def _write_files(self, facts: dict[str, Any], captured: Captured) -> Written:
        layout, optimizer = self._run.model.layout, self._run.model.optimizer
        assert layout is not None
        manifest = manifest_of(captured, layout, optimizer, **facts)
        written = write(self._directory, manifest, tensors_of(captured, layout, optimizer))
        prune(self._directory, self._keep)
        return written

    def _written(
        self, facts: dict[str, Any], done: asyncio.Future[None], began: float, writing: asyncio.Future[Written]
    ) -> None:
        self._writing = None
        if not done.done():
            done.set_result(None)
        error = writing.exception()
        if isinstance(error, CheckpointError):
            log.error("snapshot_failed", reason=error.message, fix=error.fix, durable=self._run.durable_version)
        elif error is not None:
            self._run.fail(error)
        else:
            path, sha256, num_bytes = writing.result()
            assert self._captured is not None
            self._run.saved_version = version = self._captured.version
            self._run.bus.publish(self._run.now(), SnapshotTaken(version, facts["steps"], str(path), sha256))
            took_s = round(self._now() - began, 3)
            log.info("snapshot", version=version, path=str(path), megabytes=round(num_bytes / 1e6, 1), seconds=took_s)
        self.on_attempt()


def _facts(run: Run) -> dict[str, Any]:
    """What is not tensors: copied, since training goes on."""
    return {
        "run": run.name,
        "server_incarnation": run.incarnation,
        "mode": run.config.run.mode,
        "policy": run.policy.saved_state(),
        "steps": run.policy.num_committed(),
        "num_joins": dict(run.roster.membership.num_joins),
        "training": {"elapsed_s": run.elapsed_s, "stats": _stats(run)},
        "seed": run.config.run.seed,
        "share": _share(run),
        "paramserver_version": PROGRAM_VERSION,
    }


def _share(run: Run) -> ShareEntry | None:
    server, whole, optimizer = run.config.server, run.model.whole, run.model.whole_optimizer
    if server.shards == 1 or whole is None or optimizer is None:
        return None
    return ShareEntry(
        shard=server.shard,
        shards=server.shards,
        tensors=tensor_entries(whole),
        optimizer=optimizer_entry(optimizer),
    )


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


# ---- going on from one -----------------------------------------------------------------------


def resume_at(run: Run, config: Config, available: Available, name: SnapshotName | None) -> Loaded | None:
    """Bring a shard's run, which has not begun, to the moment that all shards agreed on."""
    loaded = available.load(name) if name is not None else None
    run.skipped_snapshots += [str(path) for path in available.skipped]
    if loaded is not None:
        _go_on(run, config, loaded)
    if config.checkpoint.dir is not None and config.server.shard == 0:
        run.incarnation = _next_incarnation(snapshot_dir(config), run.incarnation)
    return loaded


def resume(run: Run, config: Config) -> Loaded | None:
    """Bring a run that has not begun to where the newest good snapshot left it, if there is one.

    Also gives the server its incarnation, which no other start of the run has had. Raises CheckpointError
    when there are snapshots and none can be used, or none where one was asked for.
    """
    options = config.checkpoint
    place = options.dir if options.resume in (None, "latest") else options.resume
    loaded = None
    if options.resume != "never" and place is not None:
        loaded = load_newest(place, partial(_skipped, run)) or _of_several_shards(config, place)
        if loaded is None and options.resume is not None:
            raise CheckpointError(
                f"there is no snapshot in {place} to go on from (checkpoint.resume is {options.resume})",
                fix="name a directory that ps-server --checkpoint-dir wrote to, or begin anew without --resume",
            )
    if loaded is not None:
        _go_on(run, config, loaded)
    if options.dir is not None:
        run.incarnation = _next_incarnation(Path(options.dir), run.incarnation)
    return loaded


def _of_several_shards(config: Config, place: str) -> Loaded | None:
    """The newest that a server of several shards has left."""
    there = config.checkpoint.model_copy(update={"resume": None, "dir": place})
    available = Available(config.model_copy(update={"checkpoint": there}))
    return available.load(available.names[-1]) if available.names else None


def _skipped(run: Run, path: Path, why: str) -> None:
    run.skipped_snapshots.append(str(path))
    log.warning("snapshot_skipped", path=str(path), reason=why)


def _go_on(run: Run, config: Config, loaded: Loaded) -> None:
    manifest = loaded.manifest
    for what, now, then in (
        ("mode", config.run.mode, manifest.mode),
        ("seed", config.run.seed, manifest.seed),
    ):
        if now != then:
            log.warning("resumed_with_another", what=what, now=now, snapshot=then)
    run.name, run.incarnation = manifest.run, manifest.server_incarnation + 1
    run.saved_version = manifest.version
    _restore_stats(run, manifest.training)
    run.roster.membership.restore(manifest.num_joins)
    state = manifest.policy if manifest.mode == config.run.mode else {}
    run.policy.restore(manifest.version, manifest.steps, state)
    whole, optimizer = loaded.whole
    if optimizer is None:
        raise CheckpointError(f"snapshot {loaded.path} names no optimizer")
    run.model.source = str(loaded.path)
    run.model.adopt(whole, optimizer)
    run.model.begin(run.model.new_memory(), lambda store: restore(store, loaded))
    log.info("resumed", path=str(loaded.path), version=manifest.version, run=run.name, incarnation=run.incarnation)


def _restore_stats(run: Run, training: dict[str, Any]) -> None:
    """What is not there, or not what it should be, is counted from zero."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        run.contributions.elapsed_before_s = float(training["elapsed_s"])
        for rank, values in training["stats"].items():
            names = {field.name for field in fields(WorkerStats)} - {"rank", "recent"}
            known = {name: value for name, value in values.items() if name in names and type(value) in (int, float)}
            run.roster.stats[int(rank)] = WorkerStats(int(rank), **known)


def _next_incarnation(directory: Path, least: int) -> int:
    """Written down before it is used: a server that dies before its first snapshot had one too."""
    prepare(directory)
    path, new = directory / _INCARNATION, directory / f"{_INCARNATION}.new"
    known = 0
    with contextlib.suppress(OSError, ValueError):
        known = int(path.read_text())
    incarnation = max(least, known + 1, next_incarnation(directory))
    try:
        new.write_text(f"{incarnation}\n")
        sync(new)
        os.replace(new, path)
        sync(directory)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}", fix="choose another checkpoint.dir") from None
    return incarnation


def _lower_priority() -> None:
    """Of this thread alone (Linux): training comes first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
