"""Delayed Nesterov: momentum for deltas that arrive one by one. Every N-th step updates the momentum.

Source: Liu et al. 2024, arXiv:2401.09135, algorithm 3. Late deltas already act as momentum, so a momentum that changes
at each of them would be too large. With x, the share of a delta that one step uses (Delta / N in the paper):

    acc <- acc + x
    every N-th:  m <- mu m + acc;   theta <- theta - lr ((1 - c (N - 1)) mu m + x);   acc <- 0
    else:        theta <- theta - lr (c mu m + x)

The caller counts to N and sets the group's numbers before each step: `share` is x / delta, `part` is the factor of mu
m, and `moves` is 1 if the step updates m. With the defaults, the optimizer equals torch.optim.SGD with nesterov=True.
Each line rounds once, so a tensor that is divided among shards gets the same bits.
"""

from __future__ import annotations

from typing import Any

import torch


class DelayedNesterov(torch.optim.Optimizer):
    """Nesterov's momentum with delayed updates. Raises ValueError for an invalid rate or momentum."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.5) -> None:
        if lr < 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr is {lr:g}, momentum {momentum:g}; lr must be at least 0, momentum in [0, 1)")
        super().__init__(params, {"lr": lr, "momentum": momentum, "share": 1.0, "part": 1.0, "moves": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a server has no closure
        for group in self.param_groups:
            for parameter in (item for item in group["params"] if item.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(momentum_buffer=torch.zeros_like(parameter), accumulated=torch.zeros_like(parameter))
                momentum, accumulated = state["momentum_buffer"], state["accumulated"]
                change = parameter.grad * group["share"]
                accumulated.add_(change)
                if group["moves"]:
                    momentum.mul_(group["momentum"]).add_(accumulated)
                    accumulated.zero_()
                if group["part"]:
                    change.add_(momentum * (group["part"] * group["momentum"]))
                parameter.sub_(change.mul_(group["lr"]))
