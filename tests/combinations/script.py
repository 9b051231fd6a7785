"""The training script of every row. ROW has the options, NOTES the folder in which it notes what it did."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import paramserver

BATCH, SAMPLES, EPOCHS, ACCUMULATE, PREFETCH, ROWS = 4, 48, 2, 3, 2, 7


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples (index, inputs, target) of a noisy plane."""

    def __init__(self, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64).to(dtype)
        noise = torch.randn(SAMPLES, 1, generator=draw, dtype=torch.float64).to(dtype)
        self.targets = self.inputs.sum(1, keepdim=True) * 0.5 + noise * 0.1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index], self.targets[index]


class Layers(nn.ModuleDict):
    """A body and a head, which are the stages of a pipeline too."""

    def pipeline(self) -> list[nn.Module]:
        return [*self["body"], self["head"]]  # type: ignore[misc]


def accumulate_of(row: dict[str, str]) -> int:
    return ACCUMULATE if row["loop"] in ("accumulate", "ahead") else 1


def dtype_of(row: dict[str, str]) -> torch.dtype:
    return torch.float64 if row["model"] == "float64" else torch.float32


def model_of(row: dict[str, str]) -> nn.Module:
    """The model before training."""
    torch.manual_seed(11)
    norm = nn.BatchNorm1d(8) if row["model"] == "batch_norm" else nn.LayerNorm(8)
    body = nn.Sequential(nn.Linear(6, 8, bias=row["model"] != "batch_norm"), norm, nn.Tanh())
    model = Layers({"body": body, "head": nn.Linear(8, 1)}).to(dtype_of(row))
    if row["model"] == "frozen":
        body[0].weight.requires_grad_(False)
    return model


def output_of(model: nn.Module, rows: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    hidden = model["body"](inputs)  # type: ignore[index]
    return model["head"](hidden if rows is None else hidden + rows.to(hidden.dtype))  # type: ignore[index]


def optimizers_of(row: dict[str, str], model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of torch by the part that they step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if row["optimizer"] == "momentum":
        return {"": torch.optim.SGD(parameters, lr=0.03, momentum=0.9)}
    if row["optimizer"] == "adamw":
        return {"": torch.optim.AdamW(parameters, lr=0.02)}
    if row["optimizer"] == "two":
        mine = {name: [p for p in model[name].parameters() if p.requires_grad] for name in ("body", "head")}  # type: ignore[index]
        return {"body": torch.optim.SGD(mine["body"], lr=0.05), "head": torch.optim.SGD(mine["head"], lr=0.1)}
    return {"": torch.optim.SGD(parameters, lr=0.1)}


def ahead(batches: Any, num: int) -> Iterator[Any]:
    """Fetch `num` batches before they are used."""
    queue: deque[Any] = deque()
    for batch in batches:
        queue.append(batch)
        if len(queue) > num:
            yield queue.popleft()
    yield from queue


def main() -> None:
    torch.set_num_threads(1)
    row: dict[str, str] = json.loads(os.environ["ROW"])
    folder = os.environ["NOTES"]
    notes = os.open(f"{folder}/notes-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    dataset, model = Numbered(dtype_of(row)), model_of(row)
    session = paramserver.connect()
    region = os.environ.get("PS_SERVER", "") if "regions" in row["feature"] else ""
    where = {"key": [region, session.rank, session.group_rank], "pid": os.getpid()}

    def note(**facts: Any) -> None:
        os.write(notes, (json.dumps({"at": time.monotonic(), **where, **facts}) + "\n").encode())

    table = session.rows("items", num_rows=ROWS, dim=8, optimizer="sgd", lr=0.1) if row["optimizer"] == "rows" else None
    accumulate, has_stages = accumulate_of(row), row["feature"] == "pipeline"
    if has_stages:
        model = session.pipeline(model, lambda output, target: nn.functional.mse_loss(output, target) / accumulate)
    local = optimizers_of(row, model)
    if row["optimizer"] == "two":
        parts = {name: (model[name], optimizer) for name, optimizer in local.items()}  # type: ignore[index]
        optimizers = session.optimizers(**parts)
    else:
        optimizers = (session.optimizer(model, local[""]),)
    prefetch = PREFETCH if row["loop"] in ("prefetch", "ahead") else 0
    epochs = EPOCHS if row["loop"] == "plain" else None if row["loop"] == "steps" else 1
    stated = {"accumulate": accumulate} if accumulate > 1 else {}
    stated |= {"prefetch": prefetch} if prefetch else {}
    loader = session.shard(dataset, batch_size=BATCH, epochs=epochs, **stated)
    note(op="begin")
    for _ in session.epochs(EPOCHS) if row["loop"] in ("epochs", "accumulate", "prefetch", "ahead") else range(1):
        batches: list[list[int]] = []
        for index, (ids, inputs, targets) in enumerate(ahead(loader, prefetch) if prefetch else loader):
            if not batches:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if has_stages:
                model(inputs, targets)
            else:
                used = table(ids % ROWS) if table is not None else None
                loss = nn.functional.mse_loss(output_of(model, used, inputs), targets)
                (loss / accumulate).backward()
            batches.append(ids.tolist())
            if len(batches) < accumulate and index + 1 < len(loader):
                continue
            step = session.step
            if not has_stages or session.group_rank == 0:  # all stages compute the same batch
                note(op="step", step=step, ids=batches)
            for optimizer in optimizers:
                optimizer.step()
            batches = []
    if row["feature"] == "best":
        session.report(loss=1.0)
    session.finish()
    torch.save({"key": where["key"], "model": model.state_dict()}, f"{folder}/final-{os.getpid()}.pt")
    session.close()


if __name__ == "__main__":
    main()
