"""diloco whose exchanges take local steps: a server's policy and store and workers' own parts, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paramserver.common.errors import UsageError
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import check_fragments
from paramserver.common.tensors.layout import new_payload
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.averaging.diloco import DilocoOptions
from paramserver.ps.policies.base import Commit, Fold, Policy
from paramserver.ps.tensors.model import outer_spec
from paramserver.ps.tensors.store import Store
from paramserver.worker.strategies.shadow import Shadow
from paramserver.worker.tensors.fragments import divided
from paramserver.worker.tensors.overlap import Merge, Overlap
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors

from ..records import contribution_of

H, STEPS, LR, MOMENTUM, SIZES = 30, 97, 0.7, 0.9, (5, 2, 9)
CASES = [(1, 7), (1, 30), (2, 15), (2, 4), (3, 10), (3, 1), (5, 6), (5, 2)]  # P and tau
RULES = [("shift", 0.0), ("blend", 0.5)]


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    chance = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(SIZES[rank], 6, generator=chance, dtype=torch.float64)
    targets = torch.randint(3, (SIZES[rank],), generator=chance)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def reference(num: int, tau: int, rule: str, alpha: float, of: dict[str, int]) -> dict[str, torch.Tensor]:
    """Nothing of ours: for each worker an anchor by name and what it sent last, for the server theta and a buffer."""
    models = [make_model() for _ in SIZES]
    inner = [make_inner(model) for model in models]
    weights = [dict(model.named_parameters()) for model in models]
    theta = {name: weight.detach().clone() for name, weight in weights[0].items()}
    buffer = {name: torch.zeros_like(item) for name, item in theta.items()}
    anchors = [{name: item.clone() for name, item in theta.items()} for _ in SIZES]
    sent: list[dict[str, torch.Tensor]] = [{} for _ in SIZES]
    since = 0
    for step in range(STEPS):
        for rank in range(len(SIZES)):
            local_step(models[rank], inner[rank], rank, step)
        since += 1
        if since == tau or step + 1 == STEPS:
            for local, anchor, then in zip(weights, anchors, sent, strict=True):
                for name, before in then.items():
                    now, new = local[name].data, theta[name]
                    now.copy_(new + (now - before) if rule == "shift" else alpha * now + (1 - alpha) * new)
                    anchor[name] = new.clone()
                then.clear()
        if (step + 1) % (H // num) and step + 1 < STEPS:
            continue
        for name in theta:
            if step + 1 == STEPS or of[name] == step // (H // num) % num:
                delta = sum(
                    size * (anchor[name] - local[name].data)
                    for size, anchor, local in zip(SIZES, anchors, weights, strict=True)
                ) / sum(SIZES)
                for then, local in zip(sent, weights, strict=True):
                    then[name] = local[name].data.clone()
                buffer[name] = MOMENTUM * buffer[name] + delta
                theta[name] = theta[name] - LR * (delta + MOMENTUM * buffer[name])
        since = 0
    return theta


class Worker:
    """What `Overlapped` does, with the parts that it does it with."""

    def __init__(self, num: int, merge: Merge) -> None:
        self.model = make_model()
        self.optimizer = make_inner(self.model)
        tensors = ModelTensors(self.model)
        self.shadow, self.overlap = Shadow(tensors), Overlap(tensors, num, merge)
        self.transfer = DirectTransfer(self.shadow)
        self.layout, self.without = tensors.layout, frozenset[str]()

    def measure(self, fragment: int | None) -> torch.Tensor:
        self.without = frozenset(self.layout.specs[place].name for place in self.overlap.choose(fragment))
        self.overlap.measure()
        self.shadow.snapshot(ContributionKind.DELTA)
        self.overlap.depart()
        return torch.frombuffer(
            bytearray(b"".join(self.transfer.gather(ContributionKind.DELTA)[0].pieces)), dtype=torch.uint8
        )

    def receive(self, weights: torch.Tensor) -> None:
        self.transfer.write(0, memoryview(weights.numpy()))
        self.transfer.finish_write(len(weights))


def policy(num: int, merge: Merge, steps: int | None = STEPS, **more: Any) -> Policy:
    told = {"training_steps": steps, "num_workers": len(SIZES), "local_steps": H, "outer_momentum": MOMENTUM}
    overlap = {"delayed_update": True, "fragments": num, "overlap_steps": merge.after_steps, "merge": merge.rule}
    return policy_of("diloco", told | overlap | {"merge_alpha": merge.alpha} | more)


def ours(num: int, merge: Merge) -> dict[str, torch.Tensor]:
    run = policy(num, merge)
    assert run.merge == merge
    workers = [Worker(num, merge) for _ in SIZES]
    layout = workers[0].layout
    weights = new_payload(layout.total_bytes)
    weights.copy_(torch.frombuffer(bytearray(b"".join(workers[0].transfer.gather_all())), dtype=torch.uint8))
    assert run.outer is not None
    store = Store(layout, weights, outer_spec(run.outer.name, run.outer.arguments, layout))
    for rank in range(len(SIZES)):
        run.joined(rank, 0.0)
    step = 0
    while taken := run.next_local_steps(0):
        staged = {}
        for rank, worker in enumerate(workers):
            for number in range(taken):
                local_step(worker.model, worker.optimizer, rank, step + number)
                if step and number + 1 == min(taken, merge.after_steps):
                    worker.overlap.merge(worker.shadow.tensors)
            staged[rank] = worker.measure(None if step + taken == STEPS else run.version % num)
        for rank in reversed(range(len(SIZES))):
            said = contribution_of(run.num_counted[rank] + 1, run.version, taken * SIZES[rank])
            for decision in run.contributed(rank, said, 0.0):
                if isinstance(decision, Fold):
                    without = workers[decision.rank].without
                    store.fold(staged.pop(decision.rank), decision.weight, decision.rank, without=without)
                elif isinstance(decision, Commit):
                    store.commit(len(SIZES), 0, [dict(run.outer.arguments)])
        for worker in workers:
            worker.receive(store.weights)
        step += taken
    return store.tensors()


@pytest.mark.parametrize(
    ("num", "tau", "rule", "alpha"),
    [(*case, *rule) for case in CASES for rule in RULES] + [(1, 1, "blend", 0.0), (5, 3, "blend", 0.8)],
)
def test_it_equals_an_independent_reference(num: int, tau: int, rule: str, alpha: float) -> None:
    entries = ModelTensors(make_model()).layout.entries
    of = dict(zip([entry.spec.name for entry in entries], divided(entries, num), strict=True))
    found, wanted = ours(num, Merge(rule, alpha, tau)), reference(num, tau, rule, alpha, of)
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    for name, item in wanted.items():
        assert (found[name] - item).abs().max().item() / largest <= 1e-12, name


def test_the_rules_are_the_two_lines() -> None:
    """And alpha 0 is the server's weights to the bit."""
    for rule, alpha, wanted in (("shift", 0.0, 7.0 + 3.0), ("blend", 0.25, 0.25 * 5 + 0.75 * 7), ("blend", 0.0, 7.0)):
        model = nn.Linear(1, 1, bias=False)
        tensors = ModelTensors(model)
        overlap = Overlap(tensors, 1, Merge(rule, alpha))
        with torch.no_grad():
            model.weight.fill_(2.0)
            overlap.measure()
            overlap.depart()
            model.weight.fill_(5.0)
            overlap.merge([torch.full((1, 1), 7.0)])
            assert model.weight.item() == wanted
            overlap.measure()
            assert tensors.deltas[0].item() == 7.0 - wanted, "the next difference is to the new weights"


def test_a_round_that_went_by_keeps_the_steps_of_the_other_fragments() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    overlap = Overlap(ModelTensors(model), 2, Merge("blend", 0.5))
    with torch.no_grad():
        for layer, value in ((model[0], 1.0), (model[1], 2.0)):
            layer.weight.fill_(value)
        overlap.note()
        for layer in (model[0], model[1]):
            layer.weight.add_(4.0)
        overlap.choose(0)
        overlap.measure()
        overlap.depart()
        overlap.merge([torch.full((1, 1), 10.0), torch.full((1, 1), 20.0)])
    assert model[0].weight.item() == 0.5 * 5.0 + 0.5 * 10.0
    assert model[1].weight.item() == 20.0 + 4.0


@pytest.mark.parametrize(
    ("options", "delayed_update", "told", "fix"),
    [
        ({"fragments": 4}, True, r"policy\.fragments is 4, and policy\.local_steps is 30", "--local-steps 32"),
        ({"overlap_steps": 31}, True, r"overlap_steps is 31.*30 local steps.*local_steps is 30", "--overlap-steps 30"),
        ({"fragments": 5, "overlap_steps": 7}, True, r"overlap_steps is 7.*6 local steps.*fragments 5", "-steps 6"),
        (
            {"overlap_steps": 2},
            False,
            r"policy\.overlap_steps is 2, and workers of mode diloco wait",
            "--delayed-update",
        ),
        ({"merge": "blend"}, False, r"policy\.merge is blend, and workers of mode diloco wait", "--delayed-update"),
        ({"merge_alpha": 0.3}, True, r"policy\.merge_alpha is 0\.3, and policy\.merge is shift", "--merge blend"),
    ],
)
def test_what_cannot_be_names_the_limit_and_the_value(
    options: dict[str, Any], delayed_update: bool, told: str, fix: str
) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        check_fragments("diloco", DilocoOptions(local_steps=H, **options), delayed_update)
    assert fix in str(refused.value.fix)


@pytest.mark.parametrize("alpha", [-0.1, 1.0, 1.5])
def test_an_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="never takes anything" if alpha == 1 else "greater than|less than"):
        DilocoOptions(merge="blend", merge_alpha=alpha)
