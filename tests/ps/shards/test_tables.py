"""Tables of rows in a file: what safetensors reads is what lies on the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paramserver.common.config.schema import Config
from paramserver.common.errors import OutputError
from paramserver.common.tensors.tables import make_spec
from paramserver.ps.engine.engine import Engine
from paramserver.ps.shards import link as module
from paramserver.ps.shards.link import write_tables
from paramserver.ps.tensors.store import Tables
from paramserver.ps.tensors.thread import TensorThread

SPECS = [
    make_spec("small é", 7, 3, "float32", 0.5, "sgd", {"lr": 0.1}),  # its bytes are no multiple of 8
    make_spec("wide", 10, 2, "float64", 0.5, "adagrad", {"lr": 0.1}),
]


def written(folder: Path) -> dict[str, torch.Tensor]:
    """What was to be written to `w-tables.safetensors`."""
    config = Config.model_validate({"output": {"save": str(folder / "w.safetensors")}})
    tables = Tables(SPECS, 5)
    run = SimpleNamespace(name="run", mode="sync", policy=SimpleNamespace(version=3))
    model = SimpleNamespace(store=SimpleNamespace(tables=tables), whole_optimizer=SimpleNamespace(tables=tuple(SPECS)))
    tensors = TensorThread(lambda _: None)
    engine = SimpleNamespace(config=config, run=run, model=model, tensors=tensors, shard_addresses=())
    asyncio.run(write_tables(cast(Engine, engine)))
    return {name.removeprefix("weight/"): tensor for name, tensor in tables.state().items() if "weight" in name}


def test_all_rows_are_in_the_file_and_some_may_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DATA_BYTES", 50)  # 4 rows of one, 3 of the other
    tables, path = written(tmp_path), tmp_path / "w-tables.safetensors"
    found = load_file(path)
    assert found.keys() == tables.keys() and all(torch.equal(found[name], tables[name]) for name in tables)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_slice("wide")[4:6], tables["wide"][4:6])
        assert file.metadata()["version"] == "3"


def test_what_cannot_be_written_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.asyncio, "to_thread", full)
    with pytest.raises(OutputError, match=r"cannot write .*w-tables.safetensors: No space left on device"):
        written(tmp_path)
    assert list(tmp_path.iterdir()) == []
