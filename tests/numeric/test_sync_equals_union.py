"""sync with N workers is one process with the union batch, to the precision of float32.

Policy and store are driven directly, in this process: what a server does between the messages.
The workers hold the model in their own memory and exchange payloads of bytes, as over the wire.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.optimizers import describe_optimizers
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Commit, Fold
from paramserver.ps.tensors.store import Step, Store

from ..records import contribution_of
from .replica import Replica

NUM_STEPS = 100
UNION = 48  # samples of all workers in one step

# With these the loss falls to about a quarter in the hundred steps.
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "sgd+momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.05),
}
EQUAL, UNEQUAL = (12, 12, 12, 12), (20, 1, 16, 11)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small tanh MLP without layer normalisation, dropout or batch statistics.

    Its loss is smooth and its gradients are of the order of the weights: rounding differences
    of 6e-8 are neither amplified by the curvature nor, in Adam, by a second moment near zero,
    so the bound of 1e-6 tests the system and not the luck of a badly conditioned problem.
    """
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4)).to(dtype)


def make_data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A fixed batch a step: inputs [NUM_STEPS, UNION, 10] and targets [NUM_STEPS, UNION, 4] of a noisy teacher."""
    torch.manual_seed(2)
    inputs = torch.randn(NUM_STEPS, UNION, 10)
    teacher = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 4))
    with torch.no_grad():
        targets = 2 * teacher(inputs) + 0.3 * torch.randn(NUM_STEPS, UNION, 4)
    return inputs.to(dtype), targets.to(dtype)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def train_alone(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process with the union batch, plain torch."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for inputs, targets in zip(*make_data(), strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {key: value.clone() for key, value in model.state_dict().items()}, losses


class Worker(Replica):
    """One worker's copy of the model and its share of each batch."""

    def __init__(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(make_model(dtype))
        self.rank = rank
        self.rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def contribution(
        self, inputs: torch.Tensor, targets: torch.Tensor, local: torch.optim.Optimizer | None
    ) -> torch.Tensor:
        """Its gradient, or the weights after a step of its `local` optimizer."""
        self.model.zero_grad()
        loss_of(self.model, inputs[self.rows], targets[self.rows]).backward()
        if local is None:
            return self.gather(ContributionKind.GRADIENT)
        local.step()
        return self.gather(ContributionKind.WEIGHTS)


def train_together(
    mode: str, name: str, sizes: tuple[int, ...], *, num_steps: int = NUM_STEPS, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """N workers and a server's policy and store."""
    workers = [Worker(rank, sizes, dtype) for rank in range(len(sizes))]
    layout = workers[0].tensors.layout
    spec = describe_optimizers([OPTIMIZERS[name](workers[0].model.parameters())], workers[0].tensors.names)
    policy = policy_of(mode, {"training_steps": num_steps, "num_workers": len(sizes), "local_steps": 1})
    store = Store(layout, workers[0].weights(), spec if not policy.kind.worker_steps else None)
    local = [OPTIMIZERS[name](worker.model.parameters()) if policy.kind.worker_steps else None for worker in workers]
    staged: dict[int, torch.Tensor] = {}
    for worker in workers:
        policy.joined(worker.rank, 0.0)
    for inputs, targets in list(zip(*make_data(dtype), strict=True))[:num_steps]:
        for rank in reversed(range(len(sizes))):
            staged[rank] = workers[rank].contribution(inputs, targets, local[rank])
            contribution = contribution_of(policy.seq(rank) + 1, policy.version, sizes[rank])
            for decision in policy.contributed(rank, contribution, 0.0):
                if isinstance(decision, Fold):
                    store.fold(staged.pop(decision.rank), decision.weight, decision.rank)
                elif isinstance(decision, Commit):
                    store.commit(Step(len(workers), 0))
        for worker in workers:
            worker.receive(store.weights)
    assert store.version == policy.version == num_steps
    assert policy.next_local_steps(0) == 0
    return store.tensors()


def relative_difference(item: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight, relative to the largest weight."""
    assert item.keys() == two.keys()
    largest = max(value.abs().max().item() for value in item.values())
    return max((item[key] - two[key]).abs().max().item() for key in item) / largest


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    return {name: train_alone(name) for name in OPTIMIZERS}


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL, (48,), (47, 1)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sync_equals_one_process_with_the_union_batch(name: str, sizes: tuple[int, ...], alone: dict) -> None:
    weights, losses = alone[name]
    assert losses[-1] < 0.35 * losses[0], f"the reference trains: {losses[0]} to {losses[-1]}"
    assert relative_difference(weights, make_model().state_dict()) > 0.1, "and moves the weights"
    assert relative_difference(weights, train_together("sync", name, sizes)) <= 1e-6


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=str)
@pytest.mark.parametrize("name", ["sgd", "sgd+momentum"])
def test_localsgd_with_one_local_step_of_sgd_is_sync_sgd(name: str, sizes: tuple[int, ...]) -> None:
    """The mean of w - lr g_i is w - lr mean(g_i), and momentum is as linear; Adam is not.

    In float64 to twelve digits. In float32 for 25 steps: localsgd rounds the weights twice a step
    (each worker's own and their mean), sync once, so that here rounding alone reaches 1e-6 after 100.
    """
    exactly = {"dtype": torch.float64}
    sync, local = (train_together(mode, name, sizes, **exactly) for mode in ("sync", "localsgd"))
    assert relative_difference(sync, local) <= 1e-12
    sync, local = (train_together(mode, name, sizes, num_steps=25) for mode in ("sync", "localsgd"))
    assert relative_difference(sync, local) <= 1e-6
