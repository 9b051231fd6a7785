"""Continues a run from a snapshot, before it begins."""

from __future__ import annotations

import contextlib
from typing import Any

from ...common.registry import mode_anywhere
from ...common.reporting.log import get_logger
from ..core.counting import Traffic
from ..snapshots.available import Available
from ..snapshots.common import SnapshotName
from ..snapshots.snapshots import Snapshots, new_incarnation, resume_model, take_line
from ..tensors.model import names_of
from .engine import Engine

log = get_logger()


def go_on(engine: Engine, available: Available, name: SnapshotName | None) -> None:
    """Restore the run from this snapshot, if there is one, and keep further ones if they are wanted. Shard 0 also gives
    the run a new server incarnation.

    The run gets the name of its line (`Line`). A run that leaves its line keeps the name that it has now, and so
    does one that goes back in its process. Raises CheckpointError for a snapshot
    that this run cannot continue from."""
    config, run, model, folding = engine.config, engine.run, engine.model, engine.folding
    new_name, has_gone_back = run.name, run.incarnation > 1
    if name is not None:
        saved = resume_model(config, available, name, model)
        has_changed = mode_anywhere(config.run.mode) != mode_anywhere(saved["mode"])
        run.restore(saved["version"], names_of(model.whole, model.whole_optimizer), saved, model.source)
        folding.states.restore(run.policy.rows, saved["training"].get("places"), saved["states"])
        restore_traffic(engine, saved["training"])
        if has_changed:
            done, steps = run.policy.min_steps_done, run.policy.training_steps
            total, rest = ("", "") if steps is None else (f" of {steps}", f", {steps - done} are left")
            message = f"training steps are counted: {done}{total} are done by the slowest rank{rest}"
            log.warning("mode_changed", now=config.run.mode, snapshot=saved["mode"], meaning=message)
    engine.skipped_snapshots = [str(path) for path in available.skipped]
    if config.checkpoint.dir is not None and config.server.shard == 0:
        run.incarnation = new_incarnation(config, run.incarnation)
    if config.server.shard == 0 and has_gone_back:
        run.name = new_name
    elif config.server.shard == 0:
        line = take_line(config, available, name, new_name, run.incarnation)
        run.name, engine.parent = line.run, line.parent
        if name is not None and line.run == new_name:
            meaning = "it continues in a copy of its folder, or from an older snapshot, so it is a run of its own"
            log.info("branched", run=run.name, parent=engine.parent, meaning=meaning)
    if name is not None:
        log.info("resumed", path=model.source, version=name.version, run=run.name, incarnation=run.incarnation)
    if config.checkpoint.dir is not None:
        engine.snapshots = Snapshots(model, engine.tensors, config, engine.tell)


def restore_traffic(engine: Engine, training: dict[str, Any]) -> None:
    """Restore the bytes of each rank; absent and malformed values count from zero."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        for rank, values in training["stats"].items():
            sent, received = int(values["bytes_sent"]), int(values["bytes_received"])
            engine.traffic[int(rank)] = Traffic(sent, received, int(values.get("peer_bytes", 0)))
