"""Steps of a task in another precision: the weights stay as they are, and a step that overflows is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver.common.config.schema import Config
from paramserver.worker.trainer import train
from paramserver.worker.training.alone import AloneSession


class Line:
    """y = 2 x, whose loss may be made too large for fp16 for a while."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.num_large = 0
        self.dtypes: set[torch.dtype] = set()

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def train_data(self) -> TensorDataset:
        x = torch.linspace(-1, 1, 24).unsqueeze(1)
        return TensorDataset(x, 2 * x)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen += batch[0].flatten().tolist()
        found = model(batch[0])
        self.dtypes.add(found.dtype)
        factor = 1e6 if len(self.seen) <= 4 * self.num_large else 1.0
        return (found - batch[1]).square().mean() * factor

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": (model(torch.ones(1, 1)) - 2).square().item()}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_computed_in_it_and_kept_in_fp32(precision: str, dtype: torch.dtype) -> None:
    task, session = Line(), AloneSession(Config(run={"steps": 60, "batch_size": 4}, train={"precision": precision}))
    model = train(session, task, 4, torch.device("cpu"))
    assert (session.step, next(model.parameters()).dtype, task.dtypes & {dtype}) == (60, torch.float32, {dtype})
    assert session.metrics["loss"] < 0.01


def test_a_step_that_overflows_is_another_batch() -> None:
    task, session = Line(), AloneSession(Config(run={"steps": 20, "batch_size": 4}, train={"precision": "fp16"}))
    task.num_large = 3
    model = train(session, task, 4, torch.device("cpu"))
    assert (session.step, len(task.seen), session.alone.row.samples) == (20, 4 * 23, 4 * 20)
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
