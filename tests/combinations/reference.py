"""The training of a row again, in plain torch and one process, from the batches that its script noted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .options import LOCAL_STEPS, Row
from .script import Numbered, accumulate_of, dtype_of, model_of, optimizers_of, output_of

Key = tuple[str, int, int]  # (region, rank, process of the worker)
Steps = Mapping[Key, Mapping[int, list[list[int]]]]  # batches of each process and training step


def is_exact(row: Row) -> bool:
    """Whether the script alone determines the weights, and this file computes them."""
    is_raw = (row["codec"], row["reply_codec"]) == ("raw", "raw") and row["optimizer"] != "rows"
    plain = row["feature"] in ("none", "group", "pipeline", "polyak", "zero", "best")
    mode, alone = row["mode"], row["workers"] == "1"
    if not (is_raw and plain) or (row["feature"], row["model"]) == ("pipeline", "batch_norm"):
        return False  # BatchNorm of a pipeline normalises microbatches
    if row["fault"].startswith("kill") and (mode, row["feature"]) == ("allreduce", "pipeline"):
        return row["optimizer"] == "sgd"  # no snapshot has the moments of stages (docs/pipeline.md)
    if row["fault"] in ("kill_worker", "kill_server"):  # workers of other modes may repeat steps on other weights
        return mode in ("sync", "allreduce")
    return mode in ("sync", "allreduce", "localsgd") or (alone and mode in ("async", "ssp", "dssp"))


def train(row: Row, steps: Steps) -> dict[str, torch.Tensor]:
    """Return the parameters after all steps. On one thread, as the script: BatchNorm's sums round otherwise on two."""
    torch.set_num_threads(1)
    dataset = Numbered(dtype_of(row))
    if row["mode"] == "localsgd":
        return _locally(row, steps, dataset)
    model = model_of(row)
    optimizers = optimizers_of(row, model)
    for step in range(1 + max(max(mine) for mine in steps.values())):
        _step(row, model, optimizers, [mine[step] for mine in steps.values() if step in mine], dataset)
    return dict(model.named_parameters())


def _locally(row: Row, steps: Steps, dataset: Numbered) -> dict[str, torch.Tensor]:
    """Each worker takes local steps, then all weights are averaged."""
    ranks = sorted({key[:2] for key in steps})
    models = {rank: model_of(row) for rank in ranks}
    optimizers = {rank: optimizers_of(row, model) for rank, model in models.items()}
    last = 1 + max(max(mine) for mine in steps.values())
    for begin in range(0, last, LOCAL_STEPS):
        samples = dict.fromkeys(ranks, 0)
        for step in range(begin, min(last, begin + LOCAL_STEPS)):
            for rank in ranks:
                of_rank = [mine[step] for key, mine in steps.items() if key[:2] == rank and step in mine]
                if of_rank:
                    _step(row, models[rank], optimizers[rank], of_rank, dataset)
                samples[rank] += sum(len(batch) for batches in of_rank for batch in batches)
        total = sum(samples.values())
        with torch.no_grad():
            for each in zip(*(model.parameters() for model in models.values()), strict=True):
                mean = sum(p * (samples[rank] / total) for p, rank in zip(each, ranks, strict=True))
                for parameter in each:
                    parameter.copy_(torch.as_tensor(mean))
    return dict(models[ranks[0]].named_parameters())


def _step(
    row: Row, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer], processes: list[Any], dataset: Numbered
) -> None:
    """One step along the mean gradient of these processes, weighted by their samples."""
    accumulate = accumulate_of(row)
    total = sum(len(batch) for batches in processes for batch in batches)
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for batches in processes:
        copied = copy.deepcopy(model)  # BatchNorm's buffers do not change its output while it trains
        copied.zero_grad()
        for ids in batches:
            inputs, targets = dataset.inputs[ids], dataset.targets[ids]
            (nn.functional.mse_loss(output_of(copied, None, inputs), targets) / accumulate).backward()
        weight = sum(map(len, batches)) / total
        for name, parameter in copied.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad * weight
    for name, parameter in model.named_parameters():
        parameter.grad = sums[name] if parameter.requires_grad else None
    for optimizer in optimizers.values():
        optimizer.step()
