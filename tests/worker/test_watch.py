"""Whether weights are still those that came, also where they lie differently now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import Contribution
from paramserver.worker.conversation.messages import Outgoing
from paramserver.worker.session import Progress
from paramserver.worker.strategies.base import Strategy
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.tensors.watch import Watch

FORMATS = (torch.contiguous_format, torch.channels_last)


def moved(module: torch.nn.Module, model: ModelTensors, to: torch.memory_format) -> None:
    module.to(memory_format=to)
    assert model.has_moved()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("changes", [False, True])
def test_weights_that_lie_differently_are_compared(order, changes):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.Linear(3, 2))
    first, *others = [FORMATS[index] for index in order]
    module.to(memory_format=first)
    model = ModelTensors(module)
    watch = Watch(model)
    for other in others:
        moved(module, model, other)
        assert watch.changed() == []
    if changes:
        with torch.no_grad():
            module[0].weight[0, 0, 0] += 1
        assert watch.names(watch.changed()) == "'0.weight'"
        watch.note()
        assert watch.changed() == []


def test_what_changes_while_it_moves_is_seen():
    module = torch.nn.Conv2d(3, 4, 2)
    model = ModelTensors(module)
    watch = Watch(model)
    with torch.no_grad():
        module.weight[0, 0, 0] += 1
    moved(module, model, torch.channels_last)
    assert watch.names(watch.changed()) == "'weight'"


def test_each_tensor_is_compared_at_its_own_precision() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())
    watch = Watch(ModelTensors(module))
    with torch.no_grad():
        module[0].weight.mul_(0.95)
    assert watch.names(watch.changed()) == "'0.weight'"


def large() -> tuple[torch.nn.Module, Watch]:
    """A model with a tensor beyond the size that is compared as it is, and one below."""
    model = torch.nn.Linear(129, 67)
    return model, Watch(ModelTensors(model))


@pytest.mark.parametrize("index", [0, 63, 64, 5000, 8639, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_element_anywhere_is_seen_through_data(index: int, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(129, 67).to(dtype)
    watch = Watch(ModelTensors(model))
    assert not watch.changed()
    model.weight.data.view(-1)[index] += 0.5 if dtype is torch.bfloat16 else 1e-4
    assert watch.names(watch.changed()) == "'weight'"


def test_elements_that_change_places_are_seen() -> None:
    model, watch = large()
    flat = model.weight.data.view(-1)
    flat[[10, 11]] = flat[[11, 10]]
    assert watch.changed()


def test_what_is_restored_is_the_same_but_for_roundings_and_so_is_nan() -> None:
    model, watch = large()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    assert len(watch.changed()) == 2
    model.load_state_dict(saved)
    assert not watch.changed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
            parameter.sub_(0.3)
    assert not watch.changed()
    with torch.no_grad():
        model.weight[3, 3] = float("nan")
    assert watch.changed()
    watch.note()
    assert not watch.changed()


class Peer(Strategy):
    """One whose optimizer gives the weights other memory in each step."""

    def _start(self, *_: Any) -> None:
        pass

    def _contribute(self, outgoing: Outgoing) -> None:
        for tensor in self._model.tensors:
            tensor.data = tensor.data - 1


def test_weights_that_a_peers_optimizer_moves_were_not_changed_by_the_script() -> None:
    settings = SimpleNamespace(kind=ContributionKind.COMPLETION)
    peer = Peer(SimpleNamespace(settings=settings, progress=Progress(), moved=lambda: None))  # type: ignore[arg-type]
    peer.start(ModelTensors(torch.nn.Linear(3, 2)), None)  # type: ignore[arg-type]
    for _ in range(2):
        peer.contribute(Outgoing(Contribution()))
        assert peer.changes() == {}
