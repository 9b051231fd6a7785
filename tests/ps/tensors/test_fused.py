"""Kernels called directly step as torch's own classes do, to the bit, and only where they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserver.common.tensors import fused
from paramserver.common.tensors.optimizers import build_optimizer, plain_step

TOLD: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.5, "dampening": 0.5, "maximize": True}),
    ("Adam", {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "weight_decay": 0.1, "eps": 1e-3}),
]


@pytest.mark.parametrize(("name", "settings"), TOLD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_steps_as_the_class_does(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    sizes, kernel = (3, 83), fused.kernel_of(name)
    assert kernel is not None

    def stepped(is_direct: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        draw = lambda: [torch.randn(size, generator=generator).to(dtype) for size in sizes]  # noqa: E731
        weights = [torch.nn.Parameter(item, requires_grad=False) for item in draw()]
        optimizer = build_optimizer(name, [{"params": weights, "lr": 0.1, **settings}])
        group, num_direct = optimizer.param_groups[0], 0
        for _ in range(4):
            gradients = draw()
            step = kernel(group, [optimizer.state.get(weight, {}) for weight in weights]) if is_direct else None
            if step is not None:
                num_direct += 1
                step(list(weights), gradients)
                continue
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            plain_step(type(optimizer))(optimizer)
        assert num_direct >= 3 * is_direct
        state = [value for weight in weights for value in optimizer.state.get(weight, {}).values()]
        return [*weights, *state]

    assert all(map(torch.equal, stepped(True), stepped(False)))


def test_kernel_of_a_torch_that_steps_otherwise_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused._agrees("SGD", fused._sgd, {})
    assert not fused._agrees("SGD", lambda group, states: lambda weights, gradients: None, {})
    fused.kernel_of.cache_clear()
    monkeypatch.delattr(torch, "_fused_sgd_")
    assert fused.kernel_of("SGD") is None
    fused.kernel_of.cache_clear()
    assert fused.kernel_of("RMSprop") is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {}])
def test_sgd_in_16_bits_is_not_torch_s_fused_one(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """That is off from float32 by 0.05 after four steps, with momentum by 0.13."""

    def stepped(kind: torch.dtype, **how: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1000, generator=generator).to(dtype).to(kind), requires_grad=False)
        group = {"params": [weight], "lr": 0.01, **settings}
        optimizer = torch.optim.SGD([group], **how) if how else build_optimizer("SGD", [group])
        for _ in range(4):
            weight.grad = torch.randn(1000, generator=generator).to(dtype).to(kind)
            plain_step(type(optimizer))(optimizer)
        return weight.data.float()

    exact = stepped(torch.float32, foreach=False)
    assert (stepped(dtype) - exact).abs().max() < 0.03  # of weights up to 4, in 8 bits
