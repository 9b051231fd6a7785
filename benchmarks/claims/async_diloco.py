"""Cost and gain of asynchronous rounds with unequal workers: digits, several local steps, a virtual clock.

    python -m paramserver.benchmarks.claims.async_diloco [--way NAME]... [--steps N] [--seeds N]

Four workers, of which a step takes 1, 1, 2 and 4 seconds; exchanges take none. A mode decides itself, the server's
own store steps. An MLP of 85,002 parameters, batch 32, AdamW 2e-3 in each worker; the held-out loss and accuracy when
all workers together have taken so many steps, and the virtual time then. `naive` is each delta applied whole.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any, NamedTuple

import torch
from torch import nn

from ...common.tensors.layout import Layout
from ...common.wire.records import Base, Contribution, ContributionId, Counts
from ...ps.engine.modes import policy_of
from ...ps.policies.base import Commit, Decision, Fold, Reply
from ...ps.tensors.model import outer_spec
from ...ps.tensors.store import Step, Store
from ...worker.tasks.digits import Digits
from ...worker.tensors.transfer import ModelTensors

BATCH, H, SECONDS = 32, 20, (1.0, 1.0, 2.0, 4.0)
# The mode, options of it, and whether a round's rate is its share.
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "diloco": ("diloco", {"outer_momentum": 0.5}, True),
    "diloco, plain mean": ("diloco", {"outer_lr": 1.0, "outer_momentum": 0.0}, True),
    "async_diloco": ("async_diloco", {}, True),
    "as many steps for all": ("async_diloco", {"even_pace": False}, True),
    "no window": ("async_diloco", {"grace": 0.0}, True),
    "quorum 2": ("async_diloco", {"quorum": 2}, True),
    "momentum 0.5": ("async_diloco", {"outer_momentum": 0.5}, True),
    "delayed 0.5": ("async_diloco", {"outer_momentum": 0.5, "outer_delay": 4}, True),
    "delayed 0.9": ("async_diloco", {"outer_momentum": 0.9, "outer_delay": 4}, True),
    "delayed 0.7, 0.5": ("async_diloco", {"outer_lr": 0.7, "outer_momentum": 0.5, "outer_delay": 4}, True),
    "delayed 0.3, 0.9": ("async_diloco", {"outer_lr": 0.3, "outer_momentum": 0.9, "outer_delay": 4}, True),
    "delayed 0.7, 0.5, one by one": (
        "async_diloco",
        {"outer_lr": 0.7, "outer_momentum": 0.5, "outer_delay": 4, "grace": 0.0},
        True,
    ),
    "momentum 0.7, 0.5": ("async_diloco", {"outer_lr": 0.7, "outer_momentum": 0.5}, True),
    "naive 0.7, 0.9": (
        "async_diloco",
        {"outer_lr": 0.7, "outer_momentum": 0.9, "even_pace": False, "grace": 0.0},
        False,
    ),
}


class Outcome(NamedTuple):
    loss: float
    accuracy: float
    seconds: float  # of the virtual clock


class Run:
    """One training run. `limit`: steps of all workers together."""

    def __init__(self, way: str, seed: int) -> None:
        mode, options, self._has_share = WAYS[way]
        torch.manual_seed(seed)
        self._task, self._net = Digits(), _net()
        self._tensors = ModelTensors(self._net)
        self._layout = self._tensors.layout
        weights = torch.empty(self._layout.total_bytes, dtype=torch.uint8)
        _copy(self._layout, self._tensors, weights)
        self._policy = policy_of(mode, {"training_steps": None, "local_steps": H, **options})
        assert self._policy.outer is not None
        self._outer = dict(self._policy.outer.arguments)
        self._store = Store(self._layout, weights, outer_spec(self._policy.outer.name, self._outer, self._layout))
        self._locals = [_net() for _ in SECONDS]
        self._optimizers = [torch.optim.AdamW(net.parameters(), lr=2e-3) for net in self._locals]
        self._chance = [torch.Generator().manual_seed(seed * len(SECONDS) + rank) for rank in range(len(SECONDS))]
        self._taken: dict[int, tuple[int, torch.Tensor, int]] = {}  # by rank: version, weights, steps
        self._due: dict[int, float] = {}
        self._staged: dict[int, torch.Tensor] = {}

    def go(self, limit: int) -> Outcome:
        policy, taken, now = self._policy, 0, 0.0
        for rank in range(len(SECONDS)):
            self._perform(policy.joined(rank, now), now)
        while taken < limit:
            at, rank = min(((at, rank) for rank, at in self._due.items()), default=(math.inf, -1))
            closes_at = getattr(policy, "_closes_at", math.inf) if policy.waiting(now) else math.inf
            now = min(at, max(now, closes_at)) if closes_at > now else at
            if now < at:
                self._perform(policy.tick(now), now)
                continue
            del self._due[rank]
            version, _, steps = self._taken[rank]
            self._staged[rank] = self._delta(rank)
            taken += steps
            id, counts = ContributionId(rank, 1, policy.seq(rank) + 1), Counts(steps * BATCH, steps, steps)
            contribution = Contribution(id, counts=counts, base=Base(version))
            self._perform(policy.contributed(rank, contribution, now), now)
        _load(self._layout, self._store.weights, self._tensors)
        found = self._task.evaluate(self._net)
        return Outcome(found["loss"], found["accuracy"], now)

    def _delta(self, rank: int) -> torch.Tensor:
        net, optimizer = self._locals[rank], self._optimizers[rank]
        tensors = ModelTensors(net)
        _, began, steps = self._taken[rank]
        _load(self._layout, began, tensors)
        images, labels = self._task.train_data().tensors  # type: ignore[attr-defined]
        for _ in range(steps):
            chosen = torch.randint(len(images), (BATCH,), generator=self._chance[rank])
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        ended = torch.empty_like(began)
        _copy(self._layout, tensors, ended)
        return (began.view(torch.float32) - ended.view(torch.float32)).view(torch.uint8)

    def _perform(self, decisions: list[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Fold):
                self._store.fold(self._staged.pop(decision.rank), decision.weight, decision.rank)
            elif isinstance(decision, Commit):
                scale = decision.lr_scale if self._has_share else 1.0
                self._store.commit(Step(len(SECONDS), 0, [{**self._outer, **(decision.numbers or {})}], lr_scale=scale))
            elif isinstance(decision, Reply):
                rank, steps = decision.rank, self._policy.next_local_steps(decision.rank)
                self._taken[rank] = self._policy.version, self._store.weights.clone(), steps
                self._due[rank] = now + steps * SECONDS[rank]


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def _load(layout: Layout, weights: torch.Tensor, tensors: ModelTensors) -> None:
    with torch.no_grad():
        for (_, view), tensor in zip(layout.views(weights), tensors.tensors, strict=True):
            tensor.copy_(view)


def _copy(layout: Layout, tensors: ModelTensors, weights: torch.Tensor) -> None:
    for (_, view), tensor in zip(layout.views(weights), tensors.tensors, strict=True):
        view.copy_(tensor.detach())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--steps", type=int, default=3200, help="of all workers together")
    parser.add_argument("--seeds", type=int, default=3)
    return parser


def main() -> None:
    options = arguments().parse_args()
    torch.set_num_threads(1)
    print(f"digits, steps of {SECONDS} s, H {H}, {options.steps} steps, {options.seeds} seeds: mean (spread)")
    print(f"{'':24}{'loss':>20}{'accuracy, %':>20}{'virtual time, s':>18}")
    for way in options.way or WAYS:
        found = [Run(way, seed).go(options.steps) for seed in range(options.seeds)]
        losses, accuracies = [item.loss for item in found], [100 * item.accuracy for item in found]
        loss = f"{statistics.mean(losses):.4f} ({max(losses) - min(losses):.4f})"
        accuracy = f"{statistics.mean(accuracies):.2f} ({max(accuracies) - min(accuracies):.2f})"
        print(f"{way:24}{loss:>20}{accuracy:>20}{statistics.mean(item.seconds for item in found):>18,.0f}", flush=True)


if __name__ == "__main__":
    main()
