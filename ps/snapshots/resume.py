"""Resumes a run from a snapshot: restores the model, and chooses a server incarnation that no other start had."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from ...common.config.schema import Config
from ...common.errors import CheckpointError, ParamServerError
from ...common.registry import mode_anywhere
from ...common.reporting.log import get_logger
from ...common.wire.json_text import read_json, to_json
from ..tensors.model import Model
from .available import Available, snapshot_dir
from .common import SnapshotName
from .files import age_of, candidates, next_incarnation, prepare, sync
from .store_state import restore

log = get_logger()

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
