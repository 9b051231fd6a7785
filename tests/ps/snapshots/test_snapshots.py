"""A snapshot on its way to the disk, and going on from it: what fails is an alarm, and whoever waits goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from paramserver.common.config.schema import Config
from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.wire.records import Row
from paramserver.ps.core.effects import SnapshotTaken
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.snapshots.available import Available
from paramserver.ps.snapshots.files import candidates, writing_to
from paramserver.ps.snapshots.snapshots import Snapshots, after_going_back, new_incarnation, resume_model
from paramserver.ps.tensors.model import Model
from paramserver.ps.tensors.store import Step
from paramserver.ps.tensors.thread import TensorThread

LAYOUT = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (8,))])
SPEC = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.5}),))
SAVED = {
    "run": "r", "server_incarnation": 3, "policy": {"window": [1, 2]}, "rows": {0: Row(4, 4), 1: Row(5, 5)},
    "num_joins": {0: 1}, "training": {"elapsed_s": 1.5},
}  # fmt: skip


def of(folder: Path, mode: str = "sync", keep: int = 2) -> Config:
    return Config(run={"mode": mode}, checkpoint={"dir": str(folder), "keep": keep})


class Rig:
    """A model that trains by itself, and its snapshots."""

    def __init__(self, config: Config, spec: OptimizerSpec = SPEC) -> None:
        self.ends: list[BaseException] = []
        self.taken: list[SnapshotTaken] = []
        self.tensors = TensorThread(self.ends.append)
        self.model = Model(config, self.tensors, make_policy(config))
        self.model.adopt(LAYOUT, spec)
        self.model.begin(self.model.new_memory())
        self.model.store.weights.zero_()
        self.snapshots = Snapshots(self.model, self.tensors, config, self.taken.append)

    def commit(self) -> None:
        store = self.model.store
        self.tensors.submit(lambda: store.fold(torch.ones(8).view(torch.uint8), 1.0, 0))
        self.tensors.submit(lambda: store.commit(Step(1, 0)))

    async def take(self) -> int:
        """What the caller is told when it is over."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.snapshots.take(SAVED, done.set_result, {})
        return await done


def versions(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in candidates(folder)]


# ---- taking --------------------------------------------------------------------------------------------


async def test_a_snapshot_is_written_told_and_gone_on_from(tmp_path):
    rig = Rig(of(tmp_path))
    rig.commit()
    assert await rig.take() == 1
    assert rig.taken == [], "another shard may be without it"
    rig.snapshots.prune(1)
    (fact,) = rig.taken
    assert (fact.version, fact.rows) == (1, {0: Row(4, 4), 1: Row(5, 5)})
    model = Model(of(tmp_path), rig.tensors, make_policy(of(tmp_path)))
    available = Available(of(tmp_path))
    saved = resume_model(of(tmp_path), available, available.newest(), model)
    assert saved == {**SAVED, "version": 1, "mode": "sync", "states": {}}
    assert torch.equal(model.store.tensors()["w"], torch.full((8,), -0.5))
    assert model.source == fact.path


async def test_one_is_pruned_when_a_newer_one_is_on_all_shards(tmp_path):
    """Another shard's disk is full for longer than checkpoint.keep."""
    rig = Rig(of(tmp_path))
    for version in range(1, 7):
        rig.commit()
        assert await rig.take() == version
        rig.snapshots.prune(min(version, 2))
    rig.snapshots.close()
    assert versions(tmp_path) == [6, 5, 2]
    rig = Rig(of(tmp_path))
    rig.snapshots.prune(6)
    rig.snapshots.close()
    assert versions(tmp_path) == [6, 5]


async def test_a_snapshot_that_cannot_be_written_leaves_the_newest_common_one(tmp_path):
    rig = Rig(of(tmp_path))
    rig.commit()
    assert await rig.take() == 1
    rig.snapshots.prune(1)
    await asyncio.wrap_future(rig.snapshots._thread.submit(lambda: None))  # it holds the lock meanwhile
    rig.commit()
    with writing_to(tmp_path):
        assert await rig.take() == 1, "the newest that is known to be on all shards"
    rig.commit()
    assert await rig.take() == 3
    assert versions(tmp_path) == [3, 1] and rig.ends == []


async def test_a_capture_that_fails_is_an_alarm_and_nobody_waits_for_it(tmp_path):
    rig = Rig(of(tmp_path))
    rig.commit()
    assert await rig.take() == 1
    rig.snapshots.prune(1)
    optimizer, rig.model.store.optimizer = rig.model.store.optimizer, object()
    assert await rig.take() == 1
    assert rig.ends == [] and versions(tmp_path) == [1]
    rig.model.store.optimizer = optimizer
    rig.commit()
    assert await rig.take() == 2


async def test_after_a_failed_commit_no_snapshot_is_taken(tmp_path):
    """Half of the windows are stepped, and the table of contributions counts the commit."""
    rig = Rig(of(tmp_path))
    rig.commit()
    assert await rig.take() == 1
    rig.snapshots.prune(1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("snapshot-*/*")}
    rig.tensors.submit(lambda: rig.model.store.fold(torch.ones(3).view(torch.uint8), 1.0, 0))
    rig.tensors.submit(lambda: rig.model.store.commit(Step(1, 0)))
    assert len(rig.ends) == 1, "the run ends"
    assert await rig.take() == 1
    rig.snapshots.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("snapshot-*/*")} == before


# ---- going on --------------------------------------------------------------------------------------------


async def test_a_run_of_local_optimizers_goes_on_on_the_server_only_with_one_it_can_run(tmp_path):
    """In localsgd workers run any optimizer. A mode with the server's own says which it cannot."""
    for index, (spec, says) in enumerate([
        (OptimizerSpec("TheirOwn", (GroupSpec(("w",), {"temperature": 3.0}),)), "unknown optimizer 'TheirOwn'"),
        (OptimizerSpec("LBFGS", (GroupSpec(("w",), {"lr": 1.0}),)), "does not work elementwise"),
        (OptimizerSpec("SGD", (GroupSpec((), {"lr": 1.0}),)), "nothing to train"),
        (OptimizerSpec("SGD", ()), "nothing to train"),
        (OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": -1.0}),)), "Invalid learning rate"),
    ]):  # fmt: skip
        folder = tmp_path / str(index)
        rig = Rig(of(folder, "localsgd"), spec)
        await rig.take()
        rig.snapshots.close()
        assert len(candidates(folder)) == 1
        available = Available(of(folder))
        model = Model(of(folder), rig.tensors, make_policy(of(folder)))
        with pytest.raises(CheckpointError, match=says):
            resume_model(of(folder), available, available.newest(), model)


def test_every_start_has_an_incarnation_of_its_own(tmp_path):
    assert [new_incarnation(of(tmp_path), 1) for _ in range(3)] == [1, 2, 3]
    assert new_incarnation(of(tmp_path), 7) == 7


def test_who_goes_back_goes_on_from_what_it_wrote_whatever_it_was_to_begin_with(tmp_path):
    config = of(tmp_path)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "never"})})
    assert after_going_back(config, num_written=1).checkpoint.resume is None
    assert after_going_back(config, num_written=0).checkpoint.resume == "never"


# ---- shards that are not in the same state ---------------------------------------------------------------


@pytest.mark.parametrize("is_on_its_way", [False, True])
async def test_what_is_not_on_all_shards_goes_when_they_differ(tmp_path: Path, is_on_its_way: bool) -> None:
    """The newest that all have is sound; one that was taken after it holds nobody knows what."""
    rig = Rig(of(tmp_path))
    rig.commit()
    rig.snapshots.prune(await rig.take())
    rig.commit()
    taking = asyncio.ensure_future(rig.take())
    if not is_on_its_way:
        await taking
        assert versions(tmp_path) == [2, 1]
    else:
        await asyncio.sleep(0)
    rig.snapshots.drop()
    await taking
    rig.snapshots.close()
    assert versions(tmp_path) == [1]
