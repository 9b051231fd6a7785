"""diloco with fragments: a server's policy and store and workers' own parts, against a few lines of plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from paramserver.common.errors import UsageError
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import check_fragments
from paramserver.common.tensors.layout import new_payload
from paramserver.common.wire.frames import without_zeros
from paramserver.ps.policies.base import Commit, Fold, Policy
from paramserver.ps.tensors.model import outer_spec
from paramserver.ps.tensors.store import Store, StoreOptions
from paramserver.tests.numeric.test_diloco_equals_reference import (
    INNER,
    SIZES,
    Worker,
    assert_equal,
    local_step,
    make_model,
    one_thread,
    policy,
)
from paramserver.worker.tensors.fragments import Fragments, divided
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors

from ..records import contribution_of

__all__ = ["one_thread"]  # the fixture
H, STEPS, LR = 6, 27, 0.7


def reference(
    sizes: tuple[int, ...], num: int, momentum: float, fragment_of: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Nothing of ours: theta and one buffer by name, local models, and one fragment at a time that is set to theta."""
    models = [make_model() for _ in sizes]
    inner = [INNER["adamw"](model) for model in models]
    theta = {name: tensor.detach().clone() for name, tensor in models[0].named_parameters()}
    buffer = {name: torch.zeros_like(item) for name, item in theta.items()}
    for number, begin in enumerate(range(0, STEPS, H // num)):
        end = min(STEPS, begin + H // num)
        for rank, size in enumerate(sizes):
            for step in range(begin, end):
                local_step(models[rank], inner[rank], rank, size, step)
        for name in theta:
            if end < STEPS and fragment_of[name] != number % num:
                continue
            local = [dict(model.named_parameters())[name].data for model in models]
            delta = sum(size * (theta[name] - item) for size, item in zip(sizes, local, strict=True)) / sum(sizes)
            buffer[name] = momentum * buffer[name] + delta
            theta[name] = theta[name] - LR * (delta + momentum * buffer[name])
            for entry in local:
                entry.copy_(theta[name])
    return theta


@dataclass
class Streaming(Worker):
    num: int
    without: frozenset[str] = frozenset()
    positions: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        super().__init__("adamw")
        self.anchor = self.fragments = Fragments(self.tensors, self.num)

    def choose(self, fragment: int | None) -> None:
        specs = self.tensors.layout.specs
        self.without = frozenset(specs[place].name for place in self.fragments.choose(fragment))

    def receive(self, weights: torch.Tensor) -> None:
        self.fragments.replied(True)
        super().receive(weights)


def ours(sizes: tuple[int, ...], num: int, policy: Policy, joins_at: int = -1) -> Store:
    workers = [Streaming(num) for _ in sizes]
    layout = workers[0].tensors.layout
    weights = new_payload(layout.total_bytes)
    weights.copy_(torch.frombuffer(bytearray(b"".join(workers[0].transfer.gather_all())), dtype=torch.uint8))
    assert policy.outer is not None
    store = Store(
        layout,
        weights,
        outer_spec(policy.outer.name, policy.outer.arguments, layout),
        StoreOptions(measures_direction=True),
    )
    for rank in range(len(sizes)):
        policy.joined(rank, 0.0)
    step = 0
    while taken := policy.next_local_steps(0):
        staged = {}
        for rank, (worker, size) in enumerate(zip(workers, sizes, strict=True)):
            for number in range(step, step + taken):
                local_step(worker.model, worker.optimizer, rank, size, number)
            worker.choose(None if step + taken == STEPS else policy.version % num)
            staged[rank] = worker.delta()
        for rank in reversed(range(len(sizes))):
            said = contribution_of(policy.num_counted[rank] + 1, policy.version, taken * sizes[rank])
            for decision in policy.contributed(rank, said, 0.0):
                if isinstance(decision, Fold):
                    without = workers[decision.rank].without
                    store.fold(staged.pop(decision.rank), decision.weight, decision.rank, without=without)
                elif isinstance(decision, Commit):
                    store.commit(len(sizes), 0, [dict(policy.outer.arguments)])
        for worker in workers:
            worker.receive(store.weights)
        step += taken
    return store


def fragments_of(num: int) -> dict[str, int]:
    layout = ModelTensors(make_model()).layout
    return dict(zip([entry.spec.name for entry in layout.entries], divided(layout.entries, num), strict=True))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("num", "momentum"), [(1, 0.5), (2, 0.0), (2, 0.5), (3, 0.9)])
def test_each_fragment_is_stepped_when_its_turn_comes(sizes, num, momentum):
    store = ours(sizes, num, policy(len(sizes), H, STEPS, outer_momentum=momentum, fragments=num))
    found, wanted = store.tensors(), reference(sizes, num, momentum, fragments_of(num))
    for name, tensor in wanted.items():
        assert_equal(found[name], tensor, 1e-12)
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
    found = dict(zip([entry.spec.name for entry in entries], divided(entries, 4), strict=True))
    assert {found[name] for name in found if name.startswith("blocks.0")} == {2}, "a layer is in one piece"
    assert found["embedding.weight"] != found["head.weight"]
    layers = [found[f"blocks.{number}.0.weight"] for number in range(6)]
    assert layers == [2, 3, 2, 3, 2, 3]
    with pytest.raises(UsageError, match="fragments is 30, and the model has 27 parameter tensors"):
        divided(entries, 30)


def test_a_round_that_went_by_keeps_the_steps_of_the_other_fragments():
    model = make_model()
    fragments = Fragments(ModelTensors(model), 2)
    was = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        without = fragments.choose(0)
        fragments.measure()
        assert all(torch.equal(item, was[name]) for name, item in model.named_parameters()), "what the server has"
        for parameter in model.parameters():  # replied by a version in which all fragments have changed
            parameter.sub_(3.0)
        fragments.replied(True)
        fragments.note()
    names = [spec.name for spec in ModelTensors(model).layout.specs]
    for name, parameter in model.named_parameters():
        stays = name in {names[place] for place in without}
        assert torch.allclose(parameter, was[name] - 3.0 + stays), name
    fragments.show()
    assert all(torch.allclose(item, was[name] - 3.0) for name, item in model.named_parameters()), "the server's"
    fragments.show(False)
    assert sum(torch.allclose(item, was[name] - 2.0) for name, item in model.named_parameters()) == len(without)


def test_local_steps_that_do_not_divide_name_both_values():
    options = policy(2, 25, fragments=4).options
    with pytest.raises(UsageError, match=r"policy\.fragments is 4, and policy\.local_steps is 25") as refused:
        check_fragments("diloco", options, False)
    assert "--local-steps 28" in str(refused.value.fix)


@pytest.mark.slow
def test_a_contribution_of_one_of_five_fragments_has_at_most_a_tenth_more_than_a_fifth_of_the_bytes():
    layers = (nn.utils.skip_init(nn.Linear, 1024, 1024) for _ in range(10))
    model = nn.Sequential(*layers)
    tensors = ModelTensors(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    fragments, transfer = Fragments(tensors, 5), DirectTransfer(tensors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    fragments.choose(0)
    fragments.measure()
    pieces = transfer.gather(ContributionKind.DELTA)[0].pieces
    num_sent = sum(len(part) for _, parts, _ in without_zeros(pieces) for part in parts)
    assert 0.2 <= num_sent / tensors.layout.exchange_bytes <= 1.1 / 5
