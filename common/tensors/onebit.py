"""1-bit Adam's optimizer: Adam whose second moment is fixed after a warm-up, so that steps are linear in the gradient.

Source: Tang et al. 2021, arXiv:2102.02888. After `warmup_steps` steps of Adam, v no longer changes. A step is then
momentum with a rate for each element: m <- b1 m + (1 - b1) g, theta <- theta - lr m / (sqrt(v) + eps). So workers may
send the signs of their momentum (codec `onebit_adam`). Weight decay is that of AdamW.

The paper assumes long warm-ups, so three rules differ here. First, v keeps the bias correction of the last warm-up
step. Second, no element moves further than lr in one step, which is about as far as Adam moves it. Without this rule a
sign would move an element too far if its gradient was tiny during the warm-up (`docs/claims.md`, N12). Third, elements
with v = 0 do not move, as with DeepSpeed's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OneBitAdam(torch.optim.AdamW):
    """torch.optim.AdamW for `warmup_steps` steps, then with fixed v. The paper warms up for 15 to 25 % of a run.

    Raises ValueError for invalid hyperparameters.
    """

    taken: int | None = None  # steps of the run before the next one; None: each parameter counts its own

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
            raise ValueError(f"warmup_steps is {warmup_steps:g}; it must be a whole number, 1 or more")
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
        """Step a parameter whose v is fixed. Returns False, without a step, while its v warms up."""
        state, (beta1, beta2), warm = self.state.get(parameter), group["betas"], group["warmup_steps"]
        if parameter.grad is None or not state:
            return False
        num_warm = float(state["step"])  # it does not grow after the warm-up
        if (num_warm if self.taken is None else self.taken) < warm:
            return False
        m = state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
        v = state["exp_avg_sq"]
        size = (v / (1 - beta2 ** min(num_warm, warm))).sqrt_().add_(group["eps"])
        change = (m / size).clamp_(-1, 1).masked_fill_(v == 0, 0)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])
        return True
