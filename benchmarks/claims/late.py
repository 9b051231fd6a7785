"""The effect of late gradients on learning, and the rules against it: handwritten digits, in one process.

    python -m paramserver.benchmarks.claims.late [--workers 4,8,16,30] [--way NAME]... [--steps N] [--seeds N]

N workers take turns, so that every gradient is N - 1 versions late; a mode's own policy decides, and the server's own
store steps. SGD with lr 0.1 and momentum 0.9, which each way may set to 0; an MLP of 85,002 parameters, batch 32; the
held-out accuracy after so many contributions of all workers together, of several seeds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import nn

from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import GroupSpec, OptimizerSpec
from ...common.wire.records import Base, Contribution, ContributionId, Counts
from ...ps.engine.modes import policy_of
from ...ps.policies.base import Commit, Fold
from ...ps.tensors.store import Step, Store
from ...worker.tasks.digits import Digits
from ...worker.tensors.transfer import ModelTensors

BATCH = 32
# The mode, the optimizer's momentum, and options of the mode.
WAYS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "nothing": ("async", 0.9, {"late_momentum": False}),
    "momentum (default)": ("async", 0.9, {}),
    "ssp (default)": ("ssp", 0.9, {}),
    "ssp, nothing": ("ssp", 0.9, {"late_momentum": False}),
    "momentum alone": ("async", 0.9, {"late_scale": "none"}),
    "inverse": ("async", 0.9, {"late_momentum": False, "late_scale": "inverse"}),
    "momentum, inverse": ("async", 0.9, {"late_scale": "inverse"}),
    "momentum, polynomial": ("async", 0.9, {"late_scale": "polynomial"}),
    "no momentum, inverse": ("async", 0.0, {"late_scale": "inverse"}),
    "no momentum": ("async", 0.0, {}),
    "buffered": ("buffered", 0.9, {}),
    "buffered, no momentum": ("buffered", 0.0, {}),
}


def run(way: str, num_workers: int, seed: int, num_contributions: int) -> float:
    """Train once, and return the accuracy (0..1)."""
    mode, momentum, options = WAYS[way]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    task, tensors = Digits(), ModelTensors(net)
    layout = tensors.layout
    names = tuple(entry.spec.name for entry in layout.entries)
    spec = OptimizerSpec("SGD", (GroupSpec(names, {"lr": 0.1, "momentum": momentum}),))
    weights = torch.empty(layout.total_bytes, dtype=torch.uint8)
    for (_, view), tensor in zip(layout.views(weights), tensors.tensors, strict=True):
        view.copy_(tensor.detach())
    store, policy = Store(layout, weights, spec), policy_of(mode, {"training_steps": None, **options})
    for rank in range(num_workers):
        policy.joined(rank, 0.0)
    bases = {rank: (0, store.weights.clone()) for rank in range(num_workers)}  # version and weights of each worker
    images, labels = task.train_data().tensors  # type: ignore[attr-defined]
    chance = torch.Generator().manual_seed(seed)
    for index in range(num_contributions):
        rank = index % num_workers
        version, of_worker = bases[rank]
        _put(layout, of_worker, tensors)
        chosen = torch.randint(len(images), (BATCH,), generator=chance)
        net.zero_grad()
        nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        payload = torch.zeros(layout.exchange_bytes, dtype=torch.uint8)
        for (_, view), tensor in zip(layout.views(payload), tensors.tensors, strict=True):
            assert tensor.grad is not None
            view.copy_(tensor.grad)
        id = ContributionId(rank, 1, index // num_workers + 1)
        for decision in policy.contributed(rank, Contribution(id, counts=Counts(BATCH), base=Base(version)), 0.0):
            if isinstance(decision, Fold):
                store.fold(payload, decision.weight, rank)
            elif isinstance(decision, Commit):
                step = Step(num_workers, 0, lr_scale=decision.lr_scale, momentum_among=decision.momentum_among)
                store.commit(step)
        bases[rank] = policy.version, store.weights.clone()
    _put(layout, store.weights, tensors)
    return task.evaluate(net)["accuracy"]


def _put(layout: Layout, weights: torch.Tensor, tensors: ModelTensors) -> None:
    with torch.no_grad():
        for (_, view), tensor in zip(layout.views(weights), tensors.tensors, strict=True):
            tensor.copy_(view)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,8,16,30")
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    return parser


def main() -> None:
    args = arguments().parse_args()
    torch.set_num_threads(1)
    counts = [int(count) for count in args.workers.split(",")]
    print(f"digits, {args.steps} contributions, {args.seeds} seeds: accuracy in %, mean (least), by number of workers")
    print(f"{'':36}" + "".join(f"{count:>16}" for count in counts))
    for way in args.way or WAYS:
        found = [[100 * run(way, count, seed, args.steps) for seed in range(args.seeds)] for count in counts]
        print(f"{way:36}" + "".join(f"{statistics.mean(item):8.1f} ({min(item):5.1f})" for item in found), flush=True)


if __name__ == "__main__":
    main()
