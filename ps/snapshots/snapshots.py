"""Takes snapshots while a run trains.

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
from typing import Any

from ...common.config.schema import Config
from ...common.errors import CheckpointError, ParamServerError
from ...common.reporting.log import get_logger
from ...common.version import PROGRAM_VERSION
from ..core.effects import SnapshotTaken
from ..tensors.model import Model
from ..tensors.thread import TensorThread
from .available import snapshot_dir
from .checkpoint import Written, write
from .common import Done, Keeper, States
from .files import age_of, drop, prune
from .manifest import ShareEntry
from .store_state import Captured, capture, manifest_of, tensors_of

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
