"""Regions that train on while the run above replies: the merge `shift` beside the rule of HALoS.

    python -m paramserver.benchmarks.claims.regions [--seeds N] [--tuning N] [--steps N] [--every K] [--late L]

Four regions train a task with SGD of their own, each on its own batches. The reply to a contribution comes L steps
later, and the run above steps along each contribution as it comes. Both sides have the same batches and steps. Each
takes the best of the same rates of the run above, chosen with other seeds (`--tuning`) than those of the comparison.

- HALoS (arXiv:2506.04531), as its code does it (exec_halos.py, opt.py and run_halos.sh at 4b5bf73): K steps after the
  newest reply a region contributes anchor - w. On the reply w <- (1 - a) w + a g, and the anchor is the merged w. So
  the steps until the reply are never contributed. Above is delayed Nesterov: 0.5, which moves with every second
  contribution.
- shift (no momentum above, our default): every K steps. On the reply w <- g + (w - w when it contributed), and the
  anchor is g. The next difference has those steps.

Printed is the held-out loss of the global weights after the same number of steps, for each seed, and the mean
difference with its standard error. Seeds differ by more than the rules: five of them decide nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...worker.tasks.base import Task
from ...worker.tasks.digits import Digits

REGIONS, RATE, BETA = 4, 0.05, 0.9
RATES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.2)  # HALoS: 0.3
ALPHA, GLOBAL_BETA, DELAY = 0.25, 0.5, 2  # of HALoS
RULES = ("halos", "shift")
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


class Above:
    """The weights of the run above."""

    def __init__(self, rule: str, rate: float, weights: torch.Tensor) -> None:
        self._rule, self._rate, self.weights = rule, rate, weights
        self._moments, self._sum, self._num = torch.zeros_like(weights), torch.zeros_like(weights), 0

    def step(self, difference: torch.Tensor) -> torch.Tensor:
        """Step along the difference of one region. Returns the new weights."""
        if self._rule == "shift":
            self.weights = self.weights - self._rate * difference
            return self.weights
        self._sum, self._num = self._sum + difference, self._num + 1
        moved = difference / DELAY
        if self._num % DELAY == 0:
            self._moments = GLOBAL_BETA * self._moments + self._sum / DELAY
            moved = moved + GLOBAL_BETA * self._moments
            self._sum = torch.zeros_like(self._sum)
        self.weights = self.weights - self._rate * moved
        return self.weights


def loss_of(rule: str, rate: float, seed: int, steps: int, every: int, late: int) -> float:
    """Returns the held-out loss of the global weights after so many steps of each region."""
    task = Digits()
    torch.manual_seed(seed)
    model = task.model()
    weights = parameters_to_vector(model.parameters()).detach()
    above = Above(rule, rate, weights)
    regions = [Region(task, seed, number, weights) for number in range(REGIONS)]
    due = [every - number * every // REGIONS for number in range(REGIONS)]  # they contribute one after another
    replies: list[tuple[int, int, torch.Tensor]] = []  # step, region, weights
    for step in range(1, steps + 1):
        for number, region in enumerate(regions):
            region.step()
            for reply in [item for item in replies if item[:2] == (step, number)]:
                region.merge(rule, reply[2])
                replies.remove(reply)
            if step == due[number]:
                region.sent = region.weights.clone()
                replies.append((step + late, number, above.step(region.anchor - region.weights)))
                due[number] += every if rule == "shift" else late + every
    vector_to_parameters(above.weights, model.parameters())
    return float(task.evaluate(model)["loss"])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paramserver.benchmarks.claims.regions")
    for name, value in (("seeds", 20), ("tuning", 5), ("steps", 160), ("every", 8), ("late", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser


def main() -> None:
    asked = arguments().parse_args()
    found: dict[str, list[float]] = {}

    def losses(rule: str, rate: float, seeds: Sequence[int]) -> list[float]:
        return [loss_of(rule, rate, seed, asked.steps, asked.every, asked.late) for seed in seeds]

    for rule in RULES:
        tried = {rate: fmean(losses(rule, rate, range(asked.seeds, asked.seeds + asked.tuning))) for rate in RATES}
        best = min(tried, key=tried.__getitem__)
        found[rule] = losses(rule, best, range(asked.seeds))
        text = ", ".join(f"{loss:.4f}" for loss in found[rule])
        print(f"{rule}: rate {best} above, held-out loss {fmean(found[rule]):.4f}: {text}", flush=True)
    differences = [shift - halos for shift, halos in zip(found["shift"], found["halos"], strict=True)]
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    lower = sum(difference < 0 for difference in differences)
    print(f"shift is lower with {lower} of {asked.seeds} seeds, by {-fmean(differences):.4f} +- {error:.4f} on average")


if __name__ == "__main__":
    main()
