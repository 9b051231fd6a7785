"""Resumes a run from a snapshot: restores the model, and chooses a server incarnation that no other start had."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ...common.config.schema import Config
from ...common.errors import CheckpointError, ParamServerError
from ...common.registry import mode_anywhere
from ...common.reporting.log import get_logger
from ..tensors.model import Model
from .available import Available, snapshot_dir
from .common import SnapshotName
from .files import next_incarnation, prepare, sync
from .store_state import restore

log = get_logger()

_INCARNATION = "incarnation"
# Fields of the manifest that `Snapshots.take` got, and the mode and the version.
_SAVED = {"mode", "run", "server_incarnation", "version", "policy", "contributions", "num_joins", "training"}


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
        raise CheckpointError(
            f"snapshot {loaded.path} was made in mode {manifest.mode} with {optimizer.name}, which this run's server "
            f"cannot run: {error.message}",
            fix="resume in the snapshot's mode, or start a new run with --resume never",
        ) from None
    model.source = str(loaded.path)
    model.adopt(loaded.whole, optimizer)
    model.may_change = True
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


def after_going_back(config: Config, num_written: int) -> Config:
    """Return the configuration of a server that goes back to a snapshot without a new process.

    If it has written snapshots itself, it resumes from them, and `checkpoint.resume` no longer applies.
    """
    checkpoint = config.checkpoint.model_copy(update={"resume": None})
    return config.model_copy(update={"checkpoint": checkpoint}) if num_written else config
