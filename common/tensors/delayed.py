"""Nesterov's momentum for deltas that come one by one: it moves with every N-th, by what all since the last have done.

Delayed Nesterov (Liu et al. 2024, arXiv:2401.09135, algorithm 3). Deltas that come one by one are momentum by
themselves, and one that moves with each of them adds up to more than it should. With x the part that a step takes of
its delta (Delta / N in the paper):

    acc <- acc + x
    every N-th:  m <- mu m + acc;   theta <- theta - lr ((1 - c (N - 1)) mu m + x);   acc <- 0
    else:        theta <- theta - lr (c mu m + x)

Who steps counts to N and says it with the group's numbers: `share` is x / delta, `part` what stands before mu m, and
`moves` 1 where m moves. As they are at first it is Nesterov's momentum of torch.optim.SGD. Each line rounds once, so
that a tensor in pieces, on several shards, is the same bits.
"""

from __future__ import annotations

from typing import Any

import torch


class DelayedNesterov(torch.optim.Optimizer):
    """ValueError for a rate or momentum that makes no optimizer."""

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.5,
        *,
        share: float = 1.0,
        part: float = 1.0,
        moves: float = 1.0,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr is {lr:g} and momentum {momentum:g}: 0 or more, and 0 to less than 1")
        super().__init__(params, {"lr": lr, "momentum": momentum, "share": share, "part": part, "moves": moves})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a server has no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: torch.Tensor, delta: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"], state["accumulated"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        momentum, accumulated = state["momentum_buffer"], state["accumulated"]
        change = delta * group["share"]
        accumulated.add_(change)
        if group["moves"]:
            momentum.mul_(group["momentum"]).add_(accumulated)
            accumulated.zero_()
        if group["part"]:
            change.add_(momentum * (group["part"] * group["momentum"]))
        parameter.sub_(change.mul_(group["lr"]))
