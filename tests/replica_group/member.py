"""A script of several processes of one worker. argv: folder, name, and words: what it does.

What its model is in the end is in FOLDER/NAME-INNER.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import paramserver

NUM_SAMPLES = 50
WIDTH = 400_001  # rows that two processes do not divide evenly


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Wide(nn.Sequential):
    """22 MB: three windows of what is on its way."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) / WIDTH**0.5


def make_wide() -> nn.Module:
    torch.manual_seed(0)
    return Wide().double()


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 5, generator=chance, dtype=torch.float64)
    return TensorDataset(inputs, inputs.prod(1, keepdim=True))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    match name:
        case "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        case "adafactor":
            return torch.optim.Adafactor(model.parameters(), lr=0.01)
        case "adam":
            return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05)


def main() -> None:
    folder, name, *words = sys.argv[1:]
    model = make_wide() if "wide" in words else make()
    wrapped: nn.Module = model
    if "ddp" in words:
        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif "fsdp" in words:
        dist.init_process_group("gloo")
        fully_shard(model[0])
        fully_shard(model)
    elif "inside" in words:
        dist.init_process_group("gloo")
        wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(model))
    elif "taller" in words and os.environ["RANK"] == "1":
        wrapped = nn.Sequential(model, nn.Linear(1, 1).double())
    chosen = next((word for word in words if word in ("sgd", "momentum", "adam", "adafactor")), "sgd")
    with paramserver.connect() as session:
        optimizer = session.optimizer(wrapped, optimizer_of(chosen, wrapped))
        for inputs, targets in session.shard(data(), epochs=None, shuffle="ordered" not in words):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            loss.backward()
            session.record(loss=float(loss.detach()))
            optimizer.step()
            if "stops" in words and session.group_rank == 1 and session.step == 5:
                session.stop("enough")
            if "parts" in words and session.group_rank == 1 and session.step == 5:
                break
            print("step", session.step, flush=True)
        session.finish()
        if "fsdp" in words:
            print("parts", sum(parameter.to_local().nbytes for parameter in model.parameters()), flush=True)  # type: ignore[attr-defined]
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) if "fsdp" in words else None
        torch.save(whole or model.state_dict(), Path(folder) / f"{name}-{session.group_rank}.pt")


if __name__ == "__main__":
    main()
