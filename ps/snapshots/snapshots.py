"""Takes snapshots while a run trains, and resumes a run from one.

    take(saved) ──> the tensor thread copies the store, after all earlier tensor work
                    a thread of low priority writes, hashes and syncs the files

The caller copies all other state (`saved`) at the same point between two commits, so the contribution counts match the
weights exactly. Training waits only for the copy of the store. A failure is logged as an error, and the run continues.
The run decides when to take a snapshot, and which snapshot is on all shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...common.config.schema import Config
from ...common.errors import CheckpointError, ParamServerError
from ...common.registry import mode_anywhere
from ...common.reporting.log import get_logger
from ...common.version import PROGRAM_VERSION
from ...common.wire.json_text import read_json, to_json
from ..core.effects import SnapshotTaken
from ..tensors.model import Model
from ..tensors.thread import TensorThread
from .available import Available, snapshot_dir
from .common import Done, Keeper, SnapshotName, States
from .files import age_of, candidates, drop, next_incarnation, prepare, prune, sync
from .manifest import ShareEntry, Written, write
from .store_state import Captured, capture, manifest_of, restore, tensors_of

log = get_logger()

_LOW_PRIORITY = 10  # nice


class Snapshots(Keeper):
    """Writes this shard's snapshots to checkpoint.dir, one at a time. It is used on the event loop.

    `least_common` is the version of the newest snapshot on all shards, or 0 before the first. `tell` is called with
    each snapshot that is on the disks of all shards. `num_written` counts the snapshots of this process.
    """

    def __init__(
        self, model: Model, tensors: TensorThread, config: Config, tell: Callable[[SnapshotTaken], object]
    ) -> None:
        self._config = config
        self._directory = snapshot_dir(config)
        self._model = model
        self._tensors = tensors
        self._tell = tell
        self.least_common = model.store.version if model.has_weights else 0
        self.num_written = 0
        self._captured: Captured | None = None  # memory of the last copy, reused by the next
        self._taken: SnapshotTaken | None = None  # on this shard's disk, perhaps not on all shards yet
        self._not_common: Path | None = None  # the newest snapshot if it is not on all shards; used on the thread
        self._is_dropped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots", initializer=_lower_priority)

    def take(self, saved: dict[str, Any], done: Done, states: States) -> None:
        """Start a snapshot. `done` gets its version once it is on the disk, or `least_common` after a failure.

        The lowest version that the shards report is the newest that all of them have. `saved` are fields of the
        manifest: run, server_incarnation, policy, contributions, num_joins, training. `states` are states of scripts by
        rank.
        """
        into, self._captured = self._captured, None
        copied = self._tensors.run(partial(capture, self._model.store, into))
        self._writing = asyncio.create_task(self._store(saved, states, copied, done))

    async def _store(self, saved: dict[str, Any], states: States, copied: asyncio.Future[Captured], done: Done) -> None:
        """Write the copy of the store once it is made. Training does not wait for this."""
        try:
            captured = await copied
            began = time.monotonic()
            try:
                written = await asyncio.wrap_future(self._thread.submit(self._write, saved, states, captured))
            finally:
                self._captured = captured
        except Exception as error:  # older snapshots stay, and the run continues without this one
            why = error if isinstance(error, ParamServerError) else CheckpointError(f"{type(error).__name__}: {error}")
            log.error("snapshot_failed", reason=why.message, fix=why.fix, durable=self.least_common)
            done(self.least_common)
            return
        (path, sha256, num_bytes), version = written, captured.version
        self.num_written += 1
        took_s = round(time.monotonic() - began, 3)
        log.info("snapshot", version=version, path=str(path), megabytes=round(num_bytes / 1e6, 1), seconds=took_s)
        self._taken = SnapshotTaken(version, saved["rows"], str(path), sha256)
        done(version)

    def _write(self, saved: dict[str, Any], states: States, captured: Captured) -> Written:
        if self._is_dropped:
            raise CheckpointError("the shards were not in the same state when it was taken")
        model, server, run = self._model, self._config.server, self._config.run
        share = None
        if server.shards > 1:
            share = ShareEntry(
                shard=server.shard, shards=server.shards, tensors=model.whole.specs, optimizer=model.whole_optimizer
            )
        manifest = manifest_of(
            captured, model.layout, model.optimizer, outer=model.outer, **saved, mode=run.mode, seed=run.seed,
            share=share, paramserver_version=PROGRAM_VERSION,
        )  # fmt: skip
        written = write(self._directory, manifest, tensors_of(captured, model.layout, model.running), states)
        self._not_common = written.path
        return written

    def prune(self, least_common: int) -> None:
        """Remove older snapshots, because version `least_common` is now on all shards. Workers may begin."""
        self.least_common = least_common
        if self._taken is not None and self._taken.version == least_common:
            self._tell(self._taken)
        self._taken = None
        self._thread.submit(self._remove, "prune_failed", partial(self._prune, least_common))

    def _prune(self, least_common: int) -> None:
        if self._not_common is not None and age_of(self._not_common)[1] == least_common:
            self._not_common = None
        prune(self._directory, self._config.checkpoint.keep, least_common)

    def drop(self) -> None:
        """Drop the newest snapshot unless it is on all shards, and any that is being written.

        The shards' states differ, and it is unknown since when.
        """
        self._is_dropped = True
        self._thread.submit(self._remove, "drop_failed", self._drop)

    def _drop(self) -> None:
        if self._not_common is not None:
            drop(self._not_common)

    def _remove(self, failed: str, work: Callable[[], None]) -> None:
        try:
            work()
        except CheckpointError as error:
            log.error(failed, reason=error.message, fix=error.fix)

    def close(self) -> None:
        """Wait until all started snapshots are on the disk."""
        self._thread.shutdown(wait=True)


def _lower_priority() -> None:
    """Lower the priority of this thread only (Linux), since training comes first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


# ---- resume --------------------------------------------------------------------------------------
# Resumes a run from a snapshot: restores the model, and chooses a server incarnation that no other start had.


_INCARNATION, _LINE = "incarnation", "line"
# Fields of the manifest that `Snapshots.take` got, and the mode and the version.
_SAVED = {"mode", "run", "server_incarnation", "version", "policy", "rows", "num_joins", "training"}


def resume_model(config: Config, available: Available, name: SnapshotName, model: Model) -> dict[str, Any]:
    """Set the weights and the optimizer state of a new model from a snapshot.

    Returns the fields of `_SAVED`, and `states`. No file stays mapped. Raises CheckpointError for a snapshot from which
    this run cannot resume.
    """
    loaded = available.load(name)
    manifest = loaded.manifest
    if config.run.seed != manifest.seed:
        log.warning("resumed_with_another", what="seed", now=config.run.seed, snapshot=manifest.seed)
    optimizer = loaded.whole_optimizer
    if optimizer is None:
        raise CheckpointError(f"snapshot {loaded.path} names no optimizer")
    try:
        model.check_optimizer(optimizer)
    except ParamServerError as error:
        problem = f"snapshot {loaded.path} was made in mode {manifest.mode} with {optimizer.name}, which this run's"
        fix = "resume in the snapshot's mode, or start a new run with --resume never"
        raise CheckpointError(f"{problem} server cannot run: {error.message}", fix=fix) from None
    model.adopt(loaded.whole, optimizer, str(loaded.path))
    model.begin(model.new_memory(), lambda store: restore(store, loaded, model.outer is not None))
    saved = manifest.model_dump(include=_SAVED)
    saved["states"] = loaded.states
    if mode_anywhere(config.run.mode) != mode_anywhere(manifest.mode):
        saved["policy"] = {}  # another mode's state
    return saved


def new_incarnation(config: Config, least: int) -> int:
    """Return the server incarnation of this start, at least `least`, for a run with snapshots.

    It is written to the disk first, so that it is also new after a server that crashed before its first snapshot.
    Raises CheckpointError if the file cannot be written.
    """
    directory = snapshot_dir(config)
    prepare(directory)
    path, known = directory / _INCARNATION, 0
    with contextlib.suppress(OSError, ValueError):
        known = int(path.read_text())
    incarnation = max(least, known + 1, next_incarnation(directory))
    _write(path, str(incarnation))
    return incarnation


class Line(NamedTuple):
    """The run that a folder of snapshots belongs to, in the file `line` of the folder.

    A run leaves its line if it continues in a copy of its folder, or from a snapshot that is not its newest. It is then
    another run, with a name of its own: two of them would have one record, and each would count as the other.
    """

    run: str
    path: str  # of the folder, and its device and inode: a copy has neither
    inode: list[int]
    since: int  # server incarnation with which the line began
    origin: list[Any]  # of a branch: server incarnation, version and run of the snapshot that it began from

    @property
    def parent(self) -> str | None:
        """The run and version that a branch began from, as a phrase."""
        return f"{self.origin[2]} at version {self.origin[1]}" if self.origin else None


def take_line(config: Config, available: Available, name: SnapshotName | None, run: str, incarnation: int) -> Line:
    """Return the line of a server that continues from a snapshot (None: a new run), and write it into its folder.

    `run`: the name of a new line. Raises CheckpointError if it cannot be written.
    """
    if config.checkpoint.dir is None:
        return Line(run, "", [], incarnation, list(name or ()))
    directory = Path(config.checkpoint.dir)
    known: Line | None = None
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = Line(**read_json((directory / _LINE).read_text()))
    line = Line(run, str(directory.resolve()), _inode(directory), incarnation, list(name or ()))
    if name is not None and known is not None and _goes_on(config, available, name, known):
        line = line._replace(run=known.run, since=known.since, origin=known.origin)
    _write(directory / _LINE, to_json(line._asdict()))
    return line


def _goes_on(config: Config, available: Available, name: SnapshotName, line: Line) -> bool:
    """Whether a server that continues from this snapshot goes on with the line of its folder."""
    directory = Path(config.checkpoint.dir or "")
    if line.path != str(directory.resolve()) and line.inode != _inode(directory):
        return False
    if name.run == line.run:
        return config.checkpoint.resume in (None, "latest") or available.is_newest(directory, name)
    has_own = any(age_of(path)[0] >= line.since for path in candidates(snapshot_dir(config)))
    return list(name) == line.origin and not has_own


def _inode(directory: Path) -> list[int]:
    return [directory.stat().st_dev, directory.stat().st_ino] if directory.exists() else []


def _write(path: Path, text: str) -> None:
    """Replace a small file, and sync it. Raises CheckpointError."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text + "\n")
        sync(new)
        os.replace(new, path)
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}", fix="choose another checkpoint.dir") from None


def after_going_back(config: Config, num_written: int) -> Config:
    """Return the configuration of a server that goes back to a snapshot without a new process.

    If it has written snapshots itself, it resumes from them, and `checkpoint.resume` no longer applies.
    """
    checkpoint = config.checkpoint.model_copy(update={"resume": None})
    return config.model_copy(update={"checkpoint": checkpoint}) if num_written else config
