"""Whether weights are still those that came, also where they lie differently now."""

from __future__ import annotations

import pytest
import torch

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
        assert watch.changed() == ["0.weight"]
        watch.note()
        assert watch.changed() == []


def test_what_changes_while_it_moves_is_seen():
    module = torch.nn.Conv2d(3, 4, 2)
    model = ModelTensors(module)
    watch = Watch(model)
    with torch.no_grad():
        module.weight[0, 0, 0] += 1
    moved(module, model, torch.channels_last)
    assert watch.changed() == ["weight"]


def test_each_tensor_is_compared_at_its_own_precision() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())
    watch = Watch(ModelTensors(module))
    with torch.no_grad():
        module[0].weight.mul_(0.95)
    assert watch.changed() == ["0.weight"]
