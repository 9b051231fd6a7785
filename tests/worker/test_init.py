"""Initial weights from a file: the model's own, whatever it was wrapped in when it was saved, or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from paramserver.common.errors import UsageError
from paramserver.worker.training.tasks.init import load_weights


def make(seed: int, width: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_a_file_of_the_same_model_is_taken(tmp_path: Path, prefix: str) -> None:
    source, model, path = make(1), make(2), str(tmp_path / "w.safetensors")
    save_file({f"{prefix}{name}": tensor.double() if tensor.is_floating_point() else tensor
               for name, tensor in source.state_dict().items()}, path)  # fmt: skip
    load_weights(model, path)
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_tied_weights_may_have_one_name_in_the_file(tmp_path: Path) -> None:
    source, model, path = Tied(), Tied(), str(tmp_path / "w.safetensors")
    save_model(source, path)
    load_weights(model, path)
    assert torch.equal(model.second.weight, source.first.weight) and model.second.weight is model.first.weight


def test_another_model_is_refused_in_one_sentence_and_nothing_is_loaded(tmp_path: Path) -> None:
    model, path = make(2), str(tmp_path / "w.safetensors")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(
        {**{name: t for name, t in make(1, 5).state_dict().items() if name != "2.bias"}, "3.bias": torch.ones(2)}, path
    )
    with pytest.raises(UsageError) as caught:
        load_weights(model, path)
    assert caught.value.message == (
        f"--init {path} does not fit the model: it lacks '2.bias'; the model has no '3.bias'; '0.weight' is [5, 3] "
        "there and [4, 3] here, '0.bias' is [5] there and [4] here, '1.weight' is [5] there and [4] here and 4 more"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("content", "part"), [(None, "cannot be read"), (b"not such a file", "is no safetensors file")]
)
def test_what_is_no_such_file_is_said(tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=part):
        load_weights(make(1), str(path))
