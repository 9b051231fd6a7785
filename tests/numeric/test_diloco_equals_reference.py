"""diloco does what the paper's two lines do: a server's policy and store, and workers' anchors, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paramserver.common.config.schema import Config
from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.layout import new_payload
from paramserver.ps.engine.modes import make_policy, policy_of
from paramserver.ps.policies.base import Commit, Fold, Policy
from paramserver.ps.tensors.model import outer_spec
from paramserver.ps.tensors.store import Store
from paramserver.worker.tensors.anchor import Anchor
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors

from ..records import contribution_of

H, STEPS = 5, 23  # the last round has 3 steps
INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
}
SIZES = [(4, 4), (5, 2, 9)]  # samples of each worker's batch


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, step: int) -> None:
    chance = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(size, 6, generator=chance, dtype=torch.float64)
    targets = torch.randint(3, (size,), generator=chance)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def reference(inner: str, sizes: tuple[int, ...], lr: float, momentum: float, h: int, steps: int) -> torch.Tensor:
    """Nothing of ours: theta, one buffer, and local models that are set to theta."""
    models = [make_model() for _ in sizes]
    optimizers = [INNER[inner](model) for model in models]
    theta = nn.utils.parameters_to_vector(models[0].parameters()).detach().clone()
    buffer = torch.zeros_like(theta)
    for begin in range(0, steps, h):
        delta, taken = torch.zeros_like(theta), min(h, steps - begin)
        for rank, (model, optimizer, size) in enumerate(zip(models, optimizers, sizes, strict=True)):
            nn.utils.vector_to_parameters(theta.clone(), model.parameters())
            for step in range(begin, begin + taken):
                local_step(model, optimizer, rank, size, step)
            delta += size * (theta - nn.utils.parameters_to_vector(model.parameters()).detach())
        delta /= sum(sizes)
        buffer = momentum * buffer + delta
        theta = theta - lr * (delta + momentum * buffer)
    return theta


class Worker:
    def __init__(self, inner: str) -> None:
        self.model = make_model()
        self.optimizer = INNER[inner](self.model)
        self.tensors = ModelTensors(self.model)
        self.anchor = Anchor(self.tensors)
        self.transfer = DirectTransfer(self.tensors)

    def delta(self) -> torch.Tensor:
        self.anchor.measure()
        return torch.frombuffer(
            bytearray(b"".join(self.transfer.gather(ContributionKind.DELTA)[0].pieces)), dtype=torch.uint8
        )

    def receive(self, weights: torch.Tensor) -> None:
        self.transfer.write(0, memoryview(weights.numpy()))
        self.transfer.finish_write(len(weights))
        self.anchor.note()


def together(inner: str, sizes: tuple[int, ...], policy: Policy) -> torch.Tensor:
    workers = [Worker(inner) for _ in sizes]
    layout = workers[0].tensors.layout
    weights = new_payload(layout.total_bytes)
    weights.copy_(torch.frombuffer(bytearray(b"".join(workers[0].transfer.gather_all())), dtype=torch.uint8))
    assert policy.outer is not None
    store = Store(layout, weights, outer_spec(policy.outer.name, policy.outer.arguments, layout))
    for rank in range(len(sizes)):
        policy.joined(rank, 0.0)
    step = 0
    while taken := policy.next_local_steps(0):
        staged = {}
        for rank, (worker, size) in enumerate(zip(workers, sizes, strict=True)):
            for number in range(step, step + taken):
                local_step(worker.model, worker.optimizer, rank, size, number)
            staged[rank] = worker.delta()
        for rank in reversed(range(len(sizes))):
            said = contribution_of(policy.num_counted[rank] + 1, policy.version, taken * sizes[rank])
            for decision in policy.contributed(rank, said, 0.0):
                if isinstance(decision, Fold):
                    store.fold(staged.pop(decision.rank), decision.weight, decision.rank)
                elif isinstance(decision, Commit):
                    store.commit(len(sizes), 0, [dict(policy.outer.arguments)])
        for worker in workers:
            worker.receive(store.weights)
        step += taken
    return nn.utils.parameters_to_vector(workers[0].model.parameters()).detach()


def policy(num_workers: int, h: int = H, steps: int | None = STEPS, **options: float) -> Policy:
    settings = {"training_steps": steps, "num_workers": num_workers, "local_steps": h, **options}
    return policy_of("diloco", settings)


def assert_equal(tensor: torch.Tensor, two: torch.Tensor, within: float) -> None:
    assert ((tensor - two).abs().max() / two.abs().max()).item() <= within


@pytest.mark.parametrize(
    ("inner", "sizes", "lr", "momentum"),
    [
        ("sgd", SIZES[0], 0.7, 0.5),
        ("sgd", SIZES[1], 1.0, 0.0),
        ("adamw", SIZES[0], 0.3, 0.9),
        ("adamw", SIZES[1], 0.7, 0.5),
    ],
    ids=str,
)
def test_it_equals_an_independent_reference(inner, sizes, lr, momentum):
    found = together(inner, sizes, policy(len(sizes), outer_lr=lr, outer_momentum=momentum))
    assert_equal(found, reference(inner, sizes, lr, momentum, H, STEPS), 1e-12)


def test_localsgd_whose_codec_leaves_out_much_is_the_mean_of_weights_by_differences():
    told = {"training_steps": STEPS, "num_workers": 3, "local_steps": H}
    policy = policy_of("localsgd", told | {"leaves_out": True})
    assert policy_of("localsgd", told).kind == ContributionKind.WEIGHTS and policy.kind.holds_differences
    assert_equal(together("adamw", SIZES[1], policy), reference("adamw", SIZES[1], 1.0, 0.0, H, STEPS), 1e-12)


def test_one_step_a_round_without_an_outer_optimizer_is_synchronous_sgd():
    """With samples as weights: the union batch in one process."""
    sizes, steps = (5, 2, 9), 20
    found = together("sgd", sizes, policy(3, 1, steps, outer_lr=1.0, outer_momentum=0.0))
    model = make_model()
    optimizer = INNER["sgd"](model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank, size in enumerate(sizes):
            other = make_model()
            other.load_state_dict(model.state_dict())
            local_step(other, torch.optim.SGD(other.parameters(), lr=0.0), rank, size, step)
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                share = its.grad * size / sum(sizes)
                mine.grad = share if mine.grad is None else mine.grad + share
        optimizer.step()
    assert_equal(found, nn.utils.parameters_to_vector(model.parameters()).detach(), 1e-12)


@pytest.mark.parametrize(
    ("steps", "told", "momentum", "because"),
    [
        (500 * H, None, 0.9, "500 rounds"),
        (499 * H, None, 0.5, "499 rounds: 0.9 needs 500"),
        (499 * H + 1, None, 0.9, "500 rounds"),
        (None, None, 0.5, "nobody has said"),
        (1, 0.3, 0.3, "policy.outer_momentum"),
        (1, 0.0, 0.0, "policy.outer_momentum"),
    ],
)
def test_momentum_is_for_runs_with_many_rounds(steps, told, momentum, because):
    outer = policy(2, steps=steps, **({} if told is None else {"outer_momentum": told})).outer
    assert outer is not None and because in outer.reason
    assert outer.arguments == {"lr": 0.7, "momentum": momentum, "nesterov": momentum > 0}


@pytest.mark.parametrize(
    ("codec", "told", "momentum", "because"),
    [
        ("sparse", None, 0.0, "keeps most of every difference for later"),
        ("sparse", 0.5, 0.5, "policy.outer_momentum"),
        ("q4", None, 0.9, "500 rounds"),
    ],
)
def test_sparse_goes_without_momentum_unless_it_is_asked_for(codec, told, momentum, because):
    policy = {"local_steps": H, **({} if told is None else {"outer_momentum": told})}
    run = {"mode": "diloco", "steps": 500 * H}
    outer = make_policy(Config.model_validate({"run": run, "policy": policy, "worker": {"codec": codec}})).outer
    assert outer is not None and because in outer.reason
    assert outer.arguments == {"lr": 0.7, "momentum": momentum, "nesterov": momentum > 0}
