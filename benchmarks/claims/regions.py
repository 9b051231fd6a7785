"""Regions that train on while the run above replies: the merge `shift` beside the rule of HALoS.

    python -m paramserver.benchmarks.claims.regions [--seeds N] [--steps N] [--every K] [--late L]

Four regions train a task with SGD of their own, each on its own batches. Every K steps a region contributes the
difference to its anchor. The reply comes L steps later. The run above steps along each difference as it comes, with
Nesterov momentum (HALoS: rate 0.15 times 2, beta 0.5). Both sides have the same batches, rates and steps.

- HALoS (arXiv:2506.04531; as its code, exec_halos.py at 4b5bf73, does it): w <- (1 - a) w + a g, and the anchor is the
  merged w. The steps between contribution and reply are never contributed.
- shift: w <- g + (w - w when it contributed), and the anchor is g. The next difference has those steps.

Printed is the held-out loss of the global weights after the same number of steps, for each seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...worker.tasks.base import Task
from ...worker.tasks.digits import Digits

REGIONS, RATE, BETA = 4, 0.05, 0.9
GLOBAL_RATE, GLOBAL_BETA, ALPHA = 0.3, 0.5, 0.25  # HALoS: 0.15 times 2, 0.5, 0.25
_BATCH = 32


class Region:
    """One region: its weights, its SGD with momentum, its batches."""

    def __init__(self, task: Task, seed: int, number: int, weights: torch.Tensor) -> None:
        self._task, self._model = task, task.model()
        self.weights, self.anchor, self.sent = weights.clone(), weights.clone(), weights.clone()
        self._moments = torch.zeros_like(weights)
        self._batches = self._drawn(seed * 100 + number)

    def _drawn(self, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
        data: Any = self._task.train_data()
        tensors, chance = data.tensors, torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(tensors[0]), (_BATCH,), generator=chance)
            yield tuple(tensor[chosen] for tensor in tensors)

    def step(self) -> None:
        vector_to_parameters(self.weights, self._model.parameters())
        self._model.zero_grad()
        self._task.loss(self._model, next(self._batches)).backward()
        gradient = torch.cat([item.grad.flatten() for item in self._model.parameters() if item.grad is not None])
        self._moments = BETA * self._moments + gradient
        self.weights = self.weights - RATE * self._moments

    def merge(self, rule: str, new: torch.Tensor) -> None:
        if rule == "shift":
            self.weights, self.anchor = new + (self.weights - self.sent), new
        else:
            self.weights = (1 - ALPHA) * self.weights + ALPHA * new
            self.anchor = self.weights


def loss_of(rule: str, seed: int, steps: int, every: int, late: int) -> float:
    """Returns the held-out loss of the global weights after so many steps of each region."""
    task = Digits()
    torch.manual_seed(seed)
    model = task.model()
    weights = parameters_to_vector(model.parameters()).detach()
    moments = torch.zeros_like(weights)
    regions = [Region(task, seed, number, weights) for number in range(REGIONS)]
    replies: list[tuple[int, Region, torch.Tensor]] = []
    for step in range(1, steps + 1):
        for number, region in enumerate(regions):
            region.step()
            for reply in [item for item in replies if item[0] == step and item[1] is region]:
                region.merge(rule, reply[2])
                replies.remove(reply)
            if (step + number * every // REGIONS) % every == 0:  # regions contribute one after another
                region.sent = region.weights.clone()
                difference = region.anchor - region.weights
                moments = GLOBAL_BETA * moments + difference
                weights = weights - GLOBAL_RATE * (difference + GLOBAL_BETA * moments)
                replies.append((step + late, region, weights.clone()))
    vector_to_parameters(weights, model.parameters())
    return float(task.evaluate(model)["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paramserver.benchmarks.claims.regions")
    for name, value in (("seeds", 5), ("steps", 320), ("every", 8), ("late", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    lower = 0
    for seed in range(asked.seeds):
        found = {rule: loss_of(rule, seed, asked.steps, asked.every, asked.late) for rule in ("halos", "shift")}
        lower += found["shift"] < found["halos"]
        print(f"seed {seed}: held-out loss {found['halos']:.4f} with HALoS's rule, {found['shift']:.4f} with shift")
    print(f"shift is lower with {lower} of {asked.seeds} seeds")


if __name__ == "__main__":
    main()
