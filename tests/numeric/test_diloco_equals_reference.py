"""diloco is what its papers say: a server's policy and store, and workers' own parts, against plain torch.

Of all parameters or of a fragment at a time, with exchanges that are waited for or that take local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paramserver.common.config.schema import Config
from paramserver.common.errors import UsageError
from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.frames import without_zeros
from paramserver.ps.engine.modes import make_policy, policy_of
from paramserver.ps.policies.base import Commit, Fold, Policy
from paramserver.ps.tensors.model import outer_spec
from paramserver.ps.tensors.store import Step, Store, StoreOptions
from paramserver.worker.strategies.delayed_update import Shadow
from paramserver.worker.tensors.local_steps import Anchor, Overlap, fragments_of
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors

from ..records import contribution_of
from .replica import Replica

INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
}
TWO, THREE = (4, 4), (5, 2, 9)  # samples of each worker's batch
Tensors = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, step: int) -> None:
    chance = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(size, 6, generator=chance, dtype=torch.float64)
    targets = torch.randint(3, (size,), generator=chance)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def names_of_fragments(num: int) -> dict[str, int]:
    entries = ModelTensors(make_model()).layout.entries
    return dict(zip([entry.spec.name for entry in entries], fragments_of(entries, num), strict=True))


def reference(
    sizes: tuple[int, ...], steps: int, h: int, lr: float, momentum: float, inner: str = "adamw", num: int = 1,
    tau: int = 0,
) -> Tensors:  # fmt: skip
    """Nothing of ours: an anchor of each worker and what it sent last, for the server theta and a buffer, by name."""
    models = [make_model() for _ in sizes]
    optimizers = [INNER[inner](model) for model in models]
    weights = [dict(model.named_parameters()) for model in models]
    theta = {name: weight.detach().clone() for name, weight in weights[0].items()}
    buffer = {name: torch.zeros_like(item) for name, item in theta.items()}
    anchors = [{name: item.clone() for name, item in theta.items()} for _ in sizes]
    sent: list[Tensors] = [{} for _ in sizes]
    of, since = names_of_fragments(num), 0
    for step in range(steps):
        for rank, size in enumerate(sizes):
            local_step(models[rank], optimizers[rank], rank, size, step)
        since += 1
        if tau and (since == tau or step + 1 == steps):
            for local, anchor, then in zip(weights, anchors, sent, strict=True):
                for name, before in then.items():
                    now, new = local[name].data, theta[name]
                    now.copy_(new + (now - before))
                    anchor[name] = new.clone()
                then.clear()
        if (step + 1) % (h // num) and step + 1 < steps:
            continue
        for name in theta:
            if step + 1 < steps and of[name] != step // (h // num) % num:
                continue
            delta = sum(
                size * (anchor[name] - local[name].data)
                for size, anchor, local in zip(sizes, anchors, weights, strict=True)
            ) / sum(sizes)
            buffer[name] = momentum * buffer[name] + delta
            theta[name] = theta[name] - lr * (delta + momentum * buffer[name])
            for local, anchor, then in zip(weights, anchors, sent, strict=True):
                then[name] = local[name].data.clone()
                if not tau:
                    local[name].data.copy_(theta[name])
                    anchor[name] = theta[name].clone()
        since = 0
    return theta


class Worker(Replica):
    """Waits for its exchanges of the whole model."""

    anchor: Anchor

    def __init__(self, inner: str = "adamw") -> None:
        super().__init__(make_model())
        self.optimizer, self.anchor = INNER[inner](self.model), Anchor(self.tensors)
        self.without = frozenset[str]()

    def depart(self) -> None:
        self.anchor.measure()

    def delta(self, fragment: int | None = None) -> torch.Tensor:
        if isinstance(self.anchor, Overlap):
            specs = self.tensors.layout.specs
            self.without = frozenset(specs[position].name for position in self.anchor.choose(fragment))
        self.depart()
        return self.gather(ContributionKind.DELTA)

    def receive(self, weights: torch.Tensor) -> None:
        super().receive(weights)
        self.anchor.note()

    def merge(self) -> None:
        """Nothing is on its way."""


class Overlapping(Worker):
    """What `Overlapped` does, with the parts that it does it with."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.shadow, self.anchor = Shadow(self.tensors), Overlap(self.tensors, num)
        self.transfer = DirectTransfer(self.shadow)

    def depart(self) -> None:
        self.anchor.measure()
        self.shadow.snapshot(ContributionKind.DELTA)
        self.anchor.depart()

    def receive(self, weights: torch.Tensor) -> None:
        Replica.receive(self, weights)

    def merge(self) -> None:
        self.anchor.merge(self.shadow.tensors)


class Streaming(Overlapping):
    """What `Overlapped` does where it waits for each fragment's exchange."""

    def receive(self, weights: torch.Tensor) -> None:
        super().receive(weights)
        self.merge()


def store_of(worker: Worker, policy: Policy, **options: Any) -> Store:
    assert policy.outer is not None
    spec = outer_spec(policy.outer.name, policy.outer.arguments, worker.tensors.layout)
    return Store(worker.tensors.layout, worker.weights(), spec, StoreOptions(**options))


def ours(sizes: tuple[int, ...], steps: int, policy: Policy, workers: list[Worker], num: int = 1) -> Store:
    store = store_of(workers[0], policy, measures_direction=num > 1)
    for rank in range(len(sizes)):
        policy.joined(rank, 0.0)
    step = 0
    while taken := policy.next_local_steps(0):
        staged = {}
        for rank, (worker, size) in enumerate(zip(workers, sizes, strict=True)):
            for number in range(taken):
                local_step(worker.model, worker.optimizer, rank, size, step + number)
                if step and number + 1 == min(taken, policy.overlap_steps):
                    worker.merge()
            staged[rank] = worker.delta(None if step + taken == steps else policy.version % num)
        for rank in reversed(range(len(sizes))):
            contribution = contribution_of(policy.seq(rank) + 1, policy.version, taken * sizes[rank], taken)
            for decision in policy.contributed(rank, contribution, 0.0):
                if isinstance(decision, Fold):
                    without = workers[decision.rank].without
                    store.fold(staged.pop(decision.rank), decision.weight, decision.rank, without=without)
                elif isinstance(decision, Commit):
                    store.commit(Step(len(sizes), 0, [dict(policy.outer.arguments)]))
        for worker in workers:
            worker.receive(store.weights)
        step += taken
    return store


def policy_for(num_workers: int, h: int, steps: int | None, **options: Any) -> Policy:
    settings = {"training_steps": steps, "num_workers": num_workers, "local_steps": h, **options}
    return policy_of("diloco", settings)


def assert_same(found: Tensors, wanted: Tensors) -> None:
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    for name, item in wanted.items():
        assert (found[name] - item).abs().max().item() / largest <= 1e-12, name


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, within: float = 1e-12) -> None:
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= within


# ---- exchanges that are waited for -------------------------------------------------------------------

H, STEPS = 5, 23  # the last round has 3 steps


@pytest.mark.parametrize(
    ("inner", "sizes", "lr", "momentum"),
    [("sgd", TWO, 0.7, 0.5), ("sgd", THREE, 1.0, 0.0), ("adamw", TWO, 0.3, 0.9), ("adamw", THREE, 0.7, 0.5)],
    ids=str,
)
def test_it_equals_an_independent_reference(inner, sizes, lr, momentum):
    policy = policy_for(len(sizes), H, STEPS, outer_lr=lr, outer_momentum=momentum)
    found = ours(sizes, STEPS, policy, [Worker(inner) for _ in sizes])
    assert_same(found.tensors(), reference(sizes, STEPS, H, lr, momentum, inner))


def test_localsgd_whose_codec_leaves_out_much_is_the_mean_of_weights_by_differences():
    settings = {"training_steps": STEPS, "num_workers": 3, "local_steps": H}
    policy = policy_of("localsgd", settings | {"rounds": True})
    assert policy_of("localsgd", settings).kind == ContributionKind.WEIGHTS and policy.kind.holds_differences
    found = ours(THREE, STEPS, policy, [Worker() for _ in THREE])
    assert_same(found.tensors(), reference(THREE, STEPS, H, 1.0, 0.0))


@pytest.mark.parametrize(
    ("codec", "steps", "given", "momentum", "because"),
    [
        ("raw", 500 * H, None, 0.9, "500 rounds"),
        ("raw", 499 * H, None, 0.5, "499 rounds: 0.9 needs 500"),
        ("raw", 499 * H + 1, None, 0.9, "500 rounds"),
        ("raw", 1, 0.3, 0.3, "policy.outer_momentum"),
        ("raw", 1, 0.0, 0.0, "policy.outer_momentum"),
        ("sparse", 500 * H, None, 0.0, "sends most of every delta later"),
        ("sparse", 500 * H, 0.5, 0.5, "policy.outer_momentum"),
        ("q4", 500 * H, None, 0.9, "500 rounds"),
    ],
)
def test_momentum_is_for_runs_with_many_rounds_and_codecs_that_send_all(codec, steps, given, momentum, because):
    policy = {"local_steps": H, **({} if given is None else {"outer_momentum": given})}
    run = {"mode": "diloco", "steps": steps}
    outer = make_policy(Config.model_validate({"run": run, "policy": policy, "worker": {"codec": codec}})).outer
    assert outer is not None and because in outer.reason
    assert outer.arguments == {"lr": 0.7, "momentum": momentum, "nesterov": momentum > 0}
    assert "nobody has said" in policy_for(2, H, None).outer.reason


# ---- fragments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [TWO, THREE], ids=str)
@pytest.mark.parametrize(("num", "momentum"), [(1, 0.5), (2, 0.0), (2, 0.5), (3, 0.9)])
def test_each_fragment_is_stepped_when_its_turn_comes(sizes, num, momentum):
    policy = policy_for(len(sizes), 6, 27, outer_momentum=momentum, outer_lr=0.7, fragments=num)
    store = ours(sizes, 27, policy, [Streaming(num) for _ in sizes], num)
    assert_same(store.tensors(), reference(sizes, 27, 6, 0.7, momentum, num=num))
    if num > 1:
        assert store.direction is not None and store.direction.cosine is not None
        assert abs(store.direction.cosine) > 0.05, "compared with the same fragment's last, not with zeros"


def test_layers_are_dealt_out_and_what_is_large_lies_apart():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(100, 8),
            "blocks": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(6)),
            "head": nn.Linear(8, 90),
        }
    )
    entries = ModelTensors(model).layout.entries
    found = dict(zip([entry.spec.name for entry in entries], fragments_of(entries, 4), strict=True))
    assert {found[name] for name in found if name.startswith("blocks.0")} == {2}, "a layer is in one piece"
    assert found["embedding.weight"] != found["head.weight"]
    layers = [found[f"blocks.{number}.0.weight"] for number in range(6)]
    assert layers == [2, 3, 2, 3, 2, 3]
    with pytest.raises(UsageError, match="fragments is 30, and the model has 27 parameter tensors"):
        fragments_of(entries, 30)


def test_a_round_that_went_by_keeps_the_steps_of_the_other_fragments():
    model = make_model()
    tensors = ModelTensors(model)
    overlap = Overlap(tensors, 2)
    was = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        without = overlap.choose(0)
        overlap.measure()
        overlap.depart()
        server = [was[entry.spec.name] - 3.0 for entry in tensors.layout.entries]  # all fragments have changed
        overlap.merge(server)
    names = [spec.name for spec in tensors.layout.specs]
    for name, parameter in model.named_parameters():
        stays = name in {names[position] for position in without}
        assert torch.allclose(parameter, was[name] - 3.0 + stays), name
    assert sum(torch.allclose(item, was[name] - 2.0) for name, item in model.named_parameters()) == len(without)


@pytest.mark.slow
def test_a_contribution_of_one_of_five_fragments_has_at_most_a_tenth_more_than_a_fifth_of_the_bytes():
    layers = (nn.utils.skip_init(nn.Linear, 1024, 1024) for _ in range(10))
    model = nn.Sequential(*layers)
    tensors = ModelTensors(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    overlap, transfer = Overlap(tensors, 5), DirectTransfer(tensors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    overlap.choose(0)
    overlap.measure()
    pieces = transfer.gather(ContributionKind.DELTA)[0].pieces
    num_sent = sum(len(part) for _, parts, _ in without_zeros(pieces) for part in parts)
    assert 0.2 <= num_sent / tensors.layout.exchange_bytes <= 1.1 / 5


# ---- exchanges that take local steps -----------------------------------------------------------------

CASES = [(1, 7), (1, 30), (2, 15), (2, 4), (3, 10), (3, 1), (5, 6), (5, 2)]  # fragments, and steps until the merge


@pytest.mark.parametrize(("num", "tau"), [*CASES, (1, 1), (5, 3)])
def test_exchanges_that_take_local_steps_equal_an_independent_reference(num, tau):
    policy = policy_for(3, 30, 97, outer_momentum=0.9, delayed_update=True, fragments=num, overlap_steps=tau)
    assert policy.overlap_steps == tau
    found = ours(THREE, 97, policy, [Overlapping(num) for _ in THREE], num)
    assert_same(found.tensors(), reference(THREE, 97, 30, 0.7, 0.9, num=num, tau=tau))
