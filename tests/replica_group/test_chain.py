"""The order of 1F1B and GPipe, and the description of a tensor between stages."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from paramserver.common.errors import UsageError
from paramserver.worker.replica_group.chain import Border, actions, num_ahead, with_gradient


@pytest.mark.parametrize(("schedule", "is_eager"), [("1F1B", False), ("1F1B", True), ("GPipe", False)])
@pytest.mark.parametrize("num", [1, 2, 8])
def test_each_microbatch_goes_forward_once_and_then_back_in_order(schedule: str, is_eager: bool, num: int) -> None:
    for index in range(4):
        ahead = num_ahead(schedule, 4, index, num, is_eager)
        assert schedule == "GPipe" or ahead == min(num, [[4, 3, 2, 1], [7, 5, 3, 1]][is_eager][index])
        found = list(actions(ahead, num))
        assert [number for is_forward, number in found if is_forward] == list(range(num))
        assert [number for is_forward, number in found if not is_forward] == list(range(num))
        kept = [sum(1 if item else -1 for item, _ in found[: end + 1]) for end in range(len(found))]
        assert max(kept) == ahead
        assert min(kept) == 0  # no backward pass comes before its forward pass


def test_a_border_travels_as_numbers() -> None:
    for shape in ((), (0,), (2, 3, 4)):
        border = Border.of(torch.ones(shape, dtype=torch.bfloat16, requires_grad=True))
        assert Border.from_numbers(border.numbers()) == border
        assert border.empty().shape == shape
    with pytest.raises(UsageError, match="13 axes"):
        Border.of(torch.ones([1] * 13)).numbers()


def test_a_gradient_goes_back_to_the_bit() -> None:
    torch.manual_seed(0)
    layer, inputs, gradient = torch.nn.Linear(5, 3), torch.randn(4, 5, requires_grad=True), torch.randn(4, 3)
    torch.autograd.backward(layer(inputs).tanh(), gradient)
    found = [item.grad for item in (inputs, *layer.parameters())]
    for item in (inputs, *layer.parameters()):
        item.grad = None
    with_gradient(layer(inputs).tanh(), gradient).backward()
    for item, expected in zip((inputs, *layer.parameters()), found, strict=True):
        assert item.grad is not None
        assert expected is not None
        assert torch.equal(item.grad, expected)


@pytest.mark.slow
def test_a_stage_of_a_chain_starts_without_torch_s_schedules_and_compiler() -> None:
    """They take 1.5 s to import, for which the worker waits when a stage was killed."""
    program = (
        "import sys, torch; from paramserver.worker.replica_group.pipeline import load, with_gradient\n"
        "with_gradient(torch.ones(2, requires_grad=True) * 2, torch.ones(2)).backward()\n"
        "load('1F1B', torch.device('cpu')); print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))\n"
        "load('LoopedBFS', torch.device('cpu')); print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["[]", "['sympy', 'torch._dynamo']"], done.stderr
