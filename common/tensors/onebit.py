"""Adam whose second moment stands still once it has warmed up, so that what is left is linear in the gradient.

1-bit Adam (Tang et al. 2021, arXiv:2102.02888): after `warmup_steps` steps of Adam, v stays as it is, and a step is one
of momentum with a rate for each element: m <- b1 m + (1 - b1) g, theta <- theta - lr m / (sqrt(v) + eps). Then workers
may send signs of their momentum (codec `onebit_adam`). Weight decay is AdamW's.

Three things are otherwise than in the paper, whose warm-ups are long. v keeps the correction for its short history that
it had in the last warm step. No element moves further than lr in a step, which is about as far as Adam goes: one whose
gradient was next to nothing while v warmed up would be thrown far away by a sign (digits, 80 warm steps: chance,
9.2 %, without this; `docs/claims.md`, N12). Where v is 0 nothing moves at all, as with DeepSpeed's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OneBitAdam(torch.optim.AdamW):
    """As torch.optim.AdamW for `warmup_steps` steps, then with v as it is: 15 to 25 % of a run in the paper. ValueError
    for numbers that make no optimizer."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int = 100,
    ) -> None:
        if not 1 <= warmup_steps == int(warmup_steps):
            raise ValueError(f"warmup_steps is {warmup_steps:g}: v needs a whole number of steps, 1 or more")
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in self.param_groups:
            group.setdefault("warmup_steps", warmup_steps)
        self.defaults["warmup_steps"] = warmup_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        everything = [group["params"] for group in self.param_groups]
        for group, parameters in zip(self.param_groups, everything, strict=True):
            group["params"] = [number for number in parameters if not self._step_frozen(number, group)]
        if any(group["params"] for group in self.param_groups):
            super().step()
        for group, parameters in zip(self.param_groups, everything, strict=True):
            group["params"] = parameters
        return loss

    def _step_frozen(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        """False: it is not, as its v has not warmed up."""
        state, (beta1, beta2), warm = self.state.get(parameter), group["betas"], group["warmup_steps"]
        if parameter.grad is None or not state or float(state["step"]) < warm:
            return False
        state["step"] += 1
        m = state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
        v = state["exp_avg_sq"]
        change = (m / (v / (1 - beta2**warm)).sqrt_().add_(group["eps"])).clamp_(-1, 1).masked_fill_(v == 0, 0)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])
        return True
