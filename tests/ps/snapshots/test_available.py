"""What a shard finds on its disk: whole or not, of as many shards or of another number; and nothing stays mapped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from paramserver.common.config.schema import Config
from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.tensors.sharding import divide
from paramserver.common.wire.records import Row
from paramserver.ps.snapshots.available import Available
from paramserver.ps.snapshots.common import choose_common
from paramserver.ps.snapshots.files import prune
from paramserver.ps.snapshots.store_state import restore
from paramserver.ps.tensors.store import Step
from paramserver.tests.ps.snapshots.making import empty_store, written

LAYOUT = Layout([
    TensorSpec("w", Kind.PARAMETER, "float32", (12, 3)),
    TensorSpec("b", Kind.PARAMETER, "float32", (5,)),
    TensorSpec("mean", Kind.BUFFER, "float32", (6,)),
])  # fmt: skip
SPEC = OptimizerSpec("Adam", (GroupSpec(("w", "b"), {"lr": 0.1}),))


def whole_weights(version: int) -> dict[str, torch.Tensor]:
    return {spec.name: torch.arange(spec.num_elements).view(spec.shape) + 1000.0 * version for spec in LAYOUT.specs}


def keep(directory: Path, version: int, shards: int = 1, only: tuple[int, ...] | None = None, run: str = "r") -> None:
    """A snapshot of each shard, or of some, after one step of the optimizer."""
    for index, share in enumerate(divide(LAYOUT, shards)):
        if only is not None and index not in only:
            continue
        store = empty_store(share.layout, share.optimizer(SPEC))
        store.fold(torch.zeros(share.layout.exchange_bytes, dtype=torch.uint8), 1.0, 0)
        store.commit(Step(1, 0))
        store.version = version
        for part, (_, view) in zip(share.parts, share.layout.views(store.weights), strict=True):
            tensor = whole_weights(version)[part.spec.name]
            view.copy_(tensor if part.is_whole else tensor[part.first : part.end])
        folder = directory / f"shard-{index}-of-{shards}" if shards > 1 else directory
        written(folder, store, LAYOUT, SPEC, index, shards, run=run, rows={0: Row(version, version)}, num_joins={0: 1})


def config(folder: Path, shard: int = 0, shards: int = 1, resume: str | None = None) -> Config:
    return Config(
        checkpoint={"dir": str(folder), "resume": resume},
        server={"shard": shard, "shards": shards, "coordinator": "127.0.0.1:1"},
    )


def of_all(folder: Path, shards: int) -> list[Available]:
    return [Available(config(folder, shard, shards)) for shard in range(shards)]


def chosen(folder: Path, shards: int):
    return choose_common({shard: available.entries for shard, available in enumerate(of_all(folder, shards))})


def damage(folder: Path) -> None:
    for path in folder.glob("snapshot-*/weights.safetensors"):
        os.truncate(path, path.stat().st_size - 1)


def held_after(folder: Path, shards: int) -> dict[str, torch.Tensor]:
    """The model put together from what the stores of all shards hold after going on."""
    name = chosen(folder, shards)
    found: dict[str, torch.Tensor] = {}
    for available, share in zip(of_all(folder, shards), divide(LAYOUT, shards), strict=True):
        loaded = available.load(name)
        restore(store := empty_store(loaded.layout, loaded.manifest.optimizer), loaded)
        assert store.version == name.version
        for part, (spec, view) in zip(share.parts, loaded.layout.views(store.weights), strict=True):
            assert spec.name == part.name
            target = found.setdefault(part.spec.name, torch.full(part.spec.shape, -1.0))
            (target if part.is_whole else target[part.first : part.end]).copy_(view)
    return found


# ---- another number of shards ------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "now"), [(1, 1), (2, 2), (2, 3), (3, 1), (1, 3), (3, 2)])
def test_the_newest_of_all_shards_is_gone_on_from_whatever_their_number(tmp_path, before, now):
    keep(tmp_path, 5, before)
    keep(tmp_path, 9, before)
    found = held_after(tmp_path, now)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole_weights(9).items())


@pytest.mark.parametrize(("before", "now"), [(2, 2), (2, 3), (3, 1)])
def test_what_one_shard_has_not_got_is_passed_over(tmp_path, before, now):
    """It was killed while it wrote, or its disk was full."""
    keep(tmp_path, 5, before)
    keep(tmp_path, 9, before, only=(0,))
    assert chosen(tmp_path, now).version == 5


@pytest.mark.parametrize(("before", "now"), [(2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("harm", [damage, shutil.rmtree])
def test_a_run_whose_snapshots_one_shard_has_lost_does_not_begin_anew(tmp_path, before, now, harm):
    for version in (5, 9):
        keep(tmp_path, version, before)
    harm(tmp_path / f"shard-1-of-{before}")
    with pytest.raises(CheckpointError) as caught:
        chosen(tmp_path, now)
    assert caught.value.exit_code == 14
    text = caught.value.message
    assert "version 9 of server incarnation 1" in text and "version 5 of server incarnation 1" in text
    messages = {
        damage: "were written",
        shutil.rmtree: "shard 1 has none" if before == now else "the part of shard 1 of",
    }
    assert messages[harm] in text
    if now == 1:
        with pytest.raises(CheckpointError):
            Available(config(tmp_path)).newest()


def test_parts_of_different_runs_are_not_put_together(tmp_path):
    keep(tmp_path, 5, 2, only=(0,), run="a")
    keep(tmp_path, 5, 2, only=(1,), run="b")
    with pytest.raises(CheckpointError, match="different runs, a and b"):
        chosen(tmp_path, 3)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_damaged_replacement_leaves_the_snapshot_that_it_replaced(tmp_path, shards):
    keep(tmp_path, 5, shards)
    folder = tmp_path / "shard-0-of-2" if shards > 1 else tmp_path
    (path,) = folder.glob("snapshot-*")
    shutil.copytree(path, path.with_name(f"{path.name}.old"))
    os.truncate(path / "weights.safetensors", 9)
    name = Available(config(tmp_path, 0, shards)).newest()
    assert name is not None and name.version == 5


def test_never_sees_nothing_and_latest_wants_something(tmp_path):
    keep(tmp_path, 5)
    assert Available(config(tmp_path, resume="never")).entries == ()
    assert Available(config(tmp_path, resume="latest")).newest().version == 5
    with pytest.raises(CheckpointError, match=r"no snapshot in .* to resume from"):
        Available(config(tmp_path / "empty", resume="latest"))


def test_a_server_of_one_process_reads_no_older_snapshots_than_it_needs(tmp_path):
    keep(tmp_path, 5)
    keep(tmp_path, 9)
    damage(tmp_path)
    keep(tmp_path, 12)
    available = Available(config(tmp_path))
    assert available.newest().version == 12 and available.load(available.newest()).manifest.version == 12
    assert available.skipped == []


# ---- nothing stays mapped ------------------------------------------------------------------------------


def mapped(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


def test_only_the_snapshot_that_is_loaded_is_mapped_and_only_until_it_is_let_go(tmp_path):
    for version in (5, 9, 12):
        keep(tmp_path, version, 2)
    available = Available(config(tmp_path, 1, 2))
    assert [entry.name.version for entry in available.entries] == [12, 9, 5]
    assert mapped(tmp_path) == []
    name = available.newest()
    loaded = available.load(name)
    assert mapped(tmp_path) and all("000000000012-1" in line for line in mapped(tmp_path))
    restore(store := empty_store(loaded.layout, loaded.manifest.optimizer), loaded)
    del loaded
    assert mapped(tmp_path) == [], "the disk space of a pruned snapshot is free again"
    store.fold(torch.zeros(store.layout.exchange_bytes, dtype=torch.uint8), 1.0, 0)
    store.commit(Step(1, 0))


# ---- the first snapshot of all ---------------------------------------------------------------------------


def test_killed_while_the_first_snapshot_was_written_nothing_was_trained_and_the_run_begins(tmp_path):
    keep(tmp_path, 0, 2, only=(0,))
    assert chosen(tmp_path, 2) is None and chosen(tmp_path, 3) is None
    prune(tmp_path / "shard-0-of-2", 1, least_common=0)
    for now in (2, 3):
        with pytest.raises(CheckpointError):
            chosen(tmp_path, now)
