"""What an engine does when the run fails on an event, or tensor work fails: the end, with nothing of it kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.errors import EXIT_BUG, ParamServerError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.wire.records import Row
from paramserver.ps.core import events
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.snapshots.files import candidates
from paramserver.ps.snapshots.snapshots import Snapshots

LAYOUT = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (8,))])
SPEC = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.5}),))


def _training(folder: Path) -> Engine:
    """An engine whose run stands at version 1, with rank 0 in it and nothing on the disk yet."""
    config = Config(run={"mode": "async"}, checkpoint={"dir": str(folder)})
    engine = Engine(config, make_policy(config), name="run")
    engine.model.adopt(LAYOUT, SPEC)
    engine.model.begin(engine.model.new_memory())
    engine.snapshots = Snapshots(engine.model, engine.tensors, config, engine.tell)
    saved = engine.run.saved(0.0) | {"rows": {0: Row(1, 1)}, "num_joins": {0: 1}}
    engine.run.restore(1, ("", ""), saved)
    engine.run.rhythm.restore(0, 0)  # so that a last snapshot would be taken
    engine.offer(events.Joined(1, 0, process="p"))
    return engine


def _bug(*_: Any, **__: Any) -> Any:
    raise KeyError("nobody foresaw this")


def _apply(engine: Engine) -> None:
    engine.run.policy.tick = _bug  # type: ignore[method-assign]
    engine.offer(events.Ticked())


def _effect(engine: Engine) -> None:
    engine.publish = _bug
    engine.offer(events.Left(0, 2, "goodbye"))


def _digest(engine: Engine) -> None:
    engine.sequencer.compares = True
    engine.sequencer.applied = _bug  # type: ignore[method-assign]
    engine.offer(events.Ticked())


@pytest.mark.parametrize("fails", [_apply, _effect, _digest])
async def test_a_mistake_ends_the_run_and_is_not_kept(
    fails: Callable[[Engine], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = _training(tmp_path)
    fails(engine)
    error = engine.finished.exception()
    assert isinstance(error, ParamServerError) and error.exit_code == EXIT_BUG == 1
    state = engine.run.digest()
    engine.offer(events.Joined(2, 1, process="q"))
    engine.offer(events.Stopped())
    assert engine.run.digest() == state, "nothing happens to a run that is half changed"
    assert not engine.is_writing
    engine.close()
    assert not candidates(tmp_path), "a snapshot of a half-made state"
    output = "".join(capsys.readouterr())
    assert output.count("event_failed") == 1 and "KeyError" in output
    assert '"kind":"Ticked"' in output.replace("\\", "") or '"kind":"Left"' in output.replace("\\", "")


async def test_failed_tensor_work_is_not_kept(tmp_path: Path) -> None:
    engine = _training(tmp_path)
    engine.tensors.submit(_bug)
    assert isinstance(engine.finished.exception(), ParamServerError)
    assert engine.is_broken, "a follower's server waits for this"
    engine.offer(events.Stopped())
    assert not engine.is_writing
    engine.close()
    assert not candidates(tmp_path)


async def test_the_same_engine_takes_a_last_snapshot_when_nothing_fails(tmp_path: Path) -> None:
    engine = _training(tmp_path)
    engine.offer(events.Stopped())
    await engine.until(lambda: not engine.is_writing)
    engine.close()
    assert len(candidates(tmp_path)) == 1


async def test_the_snapshot_of_the_event_after_which_shards_differ_goes(tmp_path: Path) -> None:
    """It is on this shard's disk when the coordinator says so, and would be taken for a good one."""

    engine = _training(tmp_path)
    assert engine.snapshots is not None
    engine.snapshots.least_common = 0
    written: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    saved = engine.run.saved(0.0)
    engine.snapshots.take(saved, written.set_result, {})
    await written
    assert len(candidates(tmp_path)) == 1
    engine.offer(events.Failed("the shards are not in the same state after event 9", exit_code=1))
    assert isinstance(engine.finished.exception(), ParamServerError)
    engine.close()
    assert not candidates(tmp_path)
