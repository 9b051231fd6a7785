"""Copies of versions that are evaluated, and the file of the best; of several shards each has its part."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from paramserver.common.config.schema import Config
from paramserver.common.errors import OutputError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.ps.engine.copies import Copies
from paramserver.ps.tensors.thread import TensorThread

LAYOUT = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (2,))])


class Weights:
    """Each version's are its number."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(version=0, layout=LAYOUT, tables=None)

    def copy(self, averaged: bool) -> tuple[int, torch.Tensor]:
        return self.store.version, torch.full((2,), float(self.store.version)).view(torch.uint8)


def best_of(folder: Path, shard: int = 0, is_kept: bool = True) -> tuple[Copies, Any]:
    server = {"shards": 2, "shard": shard, "coordinator": "127.0.0.1:1"}
    config = Config.model_validate({"server": server, "output": {"save": str(folder / "w.safetensors")}})
    model: Any = Weights()
    tensors = TensorThread(lambda error: None)
    return Copies(config, is_kept, model, tensors, lambda: None), model


async def test_a_pull_without_a_name_ends_no_evaluation(tmp_path: Path) -> None:
    """Every pull ends its reader's use of a copy, and most readers give no name."""
    best, model = best_of(tmp_path)
    model.store.version = 1
    best.keep(1)
    best.keep(1, "reader")
    best.release_reader("")
    best.release_reader("reader")
    assert best.get(1) is not None and best.num_readers_beside("") == 0
    best.measured(1, False)
    assert best.get(1) is None


async def test_the_coordinator_writes_what_it_gathers_of_the_best_version(tmp_path: Path) -> None:
    best, model = best_of(tmp_path)
    asked = []

    async def gather(version: int, here: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        asked.append(version)
        return {**here, "other": torch.zeros(1)}

    best.gather = gather
    for version, is_best in ((1, True), (2, False), (3, True)):
        model.store.version = version
        best.keep(version)
        model.store.version = 9  # the run goes on
        best.measured(version, is_best)
        await best.best_written()
    found = load_file(tmp_path / "best.safetensors")
    assert asked == [1, 3] and found.keys() == {"w", "other"} and found["w"].tolist() == [3, 3]


async def test_another_shard_has_the_best_version_until_there_is_a_better_one(tmp_path: Path) -> None:
    best, model = best_of(tmp_path, shard=1)
    for version in (1, 2, 3):
        model.store.version = version
        best.keep(version)
        best.measured(version, is_best=version != 2)
        assert (best.get(1) is not None) == (version < 3) and best.get(2) is None
    payload = best.get(3)
    assert payload is not None and payload.view(torch.float32).tolist() == [3, 3]
    assert not (tmp_path / "best.safetensors").exists()


async def test_versions_under_way_are_few_and_nothing_stays_where_no_best_is_kept(tmp_path: Path) -> None:
    best, model = best_of(tmp_path, is_kept=False)
    for version in (1, 2, 3):
        model.store.version = version
        best.keep(version)
    assert [best.get(version) is not None for version in (1, 2, 3)] == [False, True, True]
    best.measured(2, is_best=True)
    assert best.get(2) is None
    await best.best_written()
    assert not (tmp_path / "best.safetensors").exists()


async def test_a_shard_that_does_not_give_its_part_costs_the_file_and_not_the_run(tmp_path: Path) -> None:
    best, _ = best_of(tmp_path)

    async def gather(version: int, here: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        await asyncio.sleep(0)
        raise OutputError("shard 1 is gone")

    best.gather = gather
    best.keep(0)
    best.measured(0, is_best=True)
    await best.best_written()
    assert not (tmp_path / "best.safetensors").exists()


async def test_who_goes_back_does_not_wait_for_the_part_of_a_shard_that_is_lost(tmp_path: Path) -> None:
    best, model = best_of(tmp_path)
    begun = []

    async def gather(version: int, here: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        begun.append(version)
        await asyncio.Event().wait()
        return {}

    best.gather = gather
    for version in (1, 2):
        model.store.version = version
        best.measured(version, is_best=True)
        await asyncio.sleep(0)
    await asyncio.wait_for(best.best_written(is_cut_short=True), 5)
    assert begun == [1]


async def test_one_that_cannot_be_written_is_said_and_the_next_one_is_written(tmp_path: Path) -> None:
    """Whatever it was: it must not stand in the way of those after it for good."""
    best, model = best_of(tmp_path)

    async def gather(version: int, here: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if version == 1:
            raise MemoryError("no memory for the parts of the others")
        return here

    best.gather = gather
    with capture_logs() as lines:
        for version in (1, 2):
            model.store.version = version
            best.keep(version)
            best.measured(version, is_best=True)
            await best.best_written()
    assert [(line["event"], line.get("version")) for line in lines] == [("best_not_saved", 1), ("saved_best", 2)]
    assert load_file(tmp_path / "best.safetensors")["w"].tolist() == [2, 2]


async def test_holders_of_a_version_share_a_copy_until_the_last_one_releases_it(tmp_path: Path) -> None:
    copies, model = best_of(tmp_path)
    for reader, version in (("a", 1), ("b", 1), ("a", 2)):
        model.store.version = version
        copies.keep(version, reader)
    assert copies.get(1) is not None and copies.get(2) is not None and copies.num_readers_beside("a") == 1
    copies.release_reader("b")
    assert copies.get(1) is None and copies.num_readers_beside("a") == 0
    copies.keep(2)
    copies.release_reader("a")
    assert copies.get(2) is not None
    copies.release(2, None)
    assert copies.get(2) is None


async def test_a_reader_that_asks_again_has_a_whole_lease(tmp_path: Path) -> None:
    copies, model = best_of(tmp_path)
    model.store.version = 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paramserver.ps.engine.copies._LEASE_S", 0.0)
        copies.keep(1, "a")
    copies.keep(1, "a")
    await asyncio.sleep(0.01)
    assert copies.get(1) is not None
