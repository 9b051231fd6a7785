"""Regions that train on while the run above replies: the merge `shift` beside the rule of HALoS.

    python -m paramserver.benchmarks.claims.regions [--seeds N] [--steps N] [--every K] [--late L]

Four regions train a task with SGD of their own, each on its own batches. Every K steps a region contributes the
difference to its anchor. The reply comes L steps later. The run above steps along each difference as it comes. Both
sides have the same batches and steps, and try the same rates of the run above; the best of each counts.

- HALoS (arXiv:2506.04531; as its code, exec_halos.py at 4b5bf73, does it; Nesterov 0.5 above):
  w <- (1 - a) w + a g, and the anchor is the merged w. The steps until the reply are never contributed.
- shift (no momentum above, our default): w <- g + (w - w when it contributed), and the anchor is g. The next
  difference has those steps.

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
RATES, ALPHA = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8), 0.25  # HALoS: 0.15 times 2, 0.25
BETAS = {"halos": 0.5, "shift": 0.0}
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


def loss_of(rule: str, rate: float, seed: int, steps: int, every: int, late: int) -> float:
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
                moments = BETAS[rule] * moments + difference
                weights = weights - rate * (difference + BETAS[rule] * moments)
                replies.append((step + late, region, weights.clone()))
    vector_to_parameters(weights, model.parameters())
    return float(task.evaluate(model)["loss"])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paramserver.benchmarks.claims.regions")
    for name, value in (("seeds", 5), ("steps", 160), ("every", 8), ("late", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser


def main() -> None:
    asked = arguments().parse_args()
    found: dict[str, list[float]] = {}
    for rule in BETAS:
        tried = {
            rate: [loss_of(rule, rate, seed, asked.steps, asked.every, asked.late) for seed in range(asked.seeds)]
            for rate in RATES
        }
        _, best = min((sum(losses), rate) for rate, losses in tried.items())
        found[rule] = tried[best]
        print(f"{rule}: rate {best} above, held-out loss {', '.join(f'{loss:.4f}' for loss in tried[best])}")
    lower = sum(shift < halos for shift, halos in zip(found["shift"], found["halos"], strict=True))
    print(f"shift is lower with {lower} of {asked.seeds} seeds")


if __name__ == "__main__":
    main()
