"""Calls torch's fused kernels directly, since torch.optim's own work around a kernel is most of a small step.

A trial checks that a kernel gives the same bits as its class. If it does not, the class itself is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from .optimizers import build_optimizer, on_host, plain_step

State = Mapping[str, torch.Tensor]
Step = Callable[[list[torch.Tensor], list[torch.Tensor]], object]
# Makes the step function from a parameter group and the state of each parameter, all of one dtype. Returns None while a
# state is missing.
Kernel = Callable[[Mapping[str, Any], Sequence[State]], Step | None]

_TRIED: tuple[Mapping[str, Any], ...] = ({}, {"weight_decay": 0.01, "momentum": 0.9, "dampening": 0.5, "amsgrad": True})


@cache
def kernel_of(name: str) -> Kernel | None:
    """Return the kernel of a class in torch.optim, or None if there is none or its results differ from the class."""
    kernel = {"SGD": _sgd, "Adam": _adam, "AdamW": _adam}.get(name)
    return kernel if kernel is not None and all(_agrees(name, kernel, item) for item in _TRIED) else None


def _sgd(group: Mapping[str, Any], states: Sequence[State]) -> Step | None:
    buffers: list[torch.Tensor] = []
    if group["momentum"]:
        if not all(map(len, states)):
            return None
        buffers = [state["momentum_buffer"] for state in states]
    return partial(
        torch._fused_sgd_, momentum_buffer_list=buffers, weight_decay=group["weight_decay"],
        momentum=group["momentum"], lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"],
        maximize=group["maximize"], is_first_step=False,
    )  # fmt: skip


def _adam(group: Mapping[str, Any], states: Sequence[State]) -> Step | None:
    if not all(map(len, states)):
        return None
    steps = [state["step"] for state in states]
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_

    def step(weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        torch._foreach_add_(steps, 1)
        kernel(
            weights, gradients, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [], steps, lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=group["amsgrad"], maximize=group["maximize"],
        )  # fmt: skip

    return step


@on_host()
def _agrees(name: str, kernel: Kernel, options: Mapping[str, Any]) -> bool:
    def stepped(is_direct: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 37, device="cpu"), requires_grad=False)
        optimizer = build_optimizer(name, [{"params": [weight], "lr": 0.1, **options}])
        (group,) = optimizer.param_groups
        for number, scale in enumerate((1.0, -0.5, 2.0)):
            weight.grad = torch.linspace(2, -1, 37, device="cpu") * scale
            if number and is_direct and (step := kernel(group, [optimizer.state[weight]])) is not None:
                step([weight], [weight.grad])
            else:
                plain_step(type(optimizer))(optimizer)
        return weight

    try:
        return torch.equal(stepped(True), stepped(False))
    except Exception:  # another version of torch may fail in any way
        return False
