"""The store computes: weights, the mean of a round, the optimizer, the Polyak average.

Everything works on flat runs (`common/layout.py`), so a commit of any model is a few fused
calls. The store knows neither modes nor workers' names; it is called from one thread, in order:

    fold(body, weight) ... fold(body, weight); commit()

Bodies are uint8 tensors of `layout.exchange_bytes`. The first body folded becomes the mean
itself, without a copy, so memory is: weights, optimizer state, one mean, one Polyak average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..common.layout import DTYPES, Kind, Layout, Run
from ..common.optimizers import (
    Hyperparameters,
    OptimizerSpec,
    apply_hyperparameters,
    build_optimizer,
)

Buffers = Literal["average", "lowest_rank", "keep"]


@dataclass
class _Mean:
    """The weighted mean being formed: `body` holds it, `weight` is the sum of weights so far."""

    body: torch.Tensor
    weight: float
    num_folded: int
    lowest_rank: int  # whose integer buffers `body` holds


class Store:
    """Versioned weights, uint8 [layout.total_bytes], and what moves them.

    `optimizer` is None when workers contribute weights: a commit then takes the mean as the
    new weights. `version` counts commits.
    """

    def __init__(
        self,
        layout: Layout,
        weights: torch.Tensor,
        optimizer: OptimizerSpec | None,
        *,
        buffers: Buffers = "average",
        polyak: float | None = None,
    ) -> None:
        self.layout = layout
        self.weights = weights
        self.version = 0
        self._buffers = buffers
        self._parameter_runs = layout.runs_of(Kind.PARAMETER)
        self._buffer_runs = layout.runs_of(Kind.BUFFER)
        self._mean: _Mean | None = None
        self._polyak = polyak
        self.averaged = weights.clone() if polyak is not None else None
        self._flat: list[_FlatParameter] = []
        self._optimizer = self._build(optimizer) if optimizer is not None else None

    def _build(self, spec: OptimizerSpec) -> torch.optim.Optimizer:
        """The optimizer over flat parameters: consecutive tensors of one group and dtype are one."""
        group_of = {name: index for index, group in enumerate(spec.groups) for name in group.tensors}
        members: list[list[torch.nn.Parameter]] = [[] for _ in spec.groups]
        last: tuple[int, torch.dtype] | None = None
        for entry in self.layout.entries:
            if entry.spec.kind is not Kind.PARAMETER or entry.spec.name not in group_of:
                last = None
                continue
            group = group_of[entry.spec.name]
            run = Run(Kind.PARAMETER, DTYPES[entry.spec.dtype], entry.offset, entry.spec.num_elements)
            if last == (group, run.dtype):
                run = Run(
                    run.kind,
                    run.dtype,
                    self._flat[-1].run.offset,
                    self._flat[-1].run.num_elements + run.num_elements,
                )
                self._flat.pop()
                members[group].pop()
            flat = _FlatParameter(run, torch.nn.Parameter(run.view(self.weights), requires_grad=True))
            self._flat.append(flat)
            members[group].append(flat.parameter)
            last = (group, run.dtype)
        groups = [
            {"params": params, **group.hyperparameters} for params, group in zip(members, spec.groups, strict=True)
        ]
        return build_optimizer(spec.name, groups)

    # ---- contributions ------------------------------------------------------------------

    def is_finite(self, body: torch.Tensor) -> bool:
        """True when no float of a contribution is NaN or Inf. One pass over the memory where all is well."""
        for run in self._parameter_runs + self._buffer_runs:
            # A sum is several times faster than isfinite and sees every NaN and Inf; only a sum that
            # overflows by itself needs the slow look.
            if run.is_float:
                values = run.view(body)
                if not math.isfinite(values.sum().item()) and not bool(torch.isfinite(values).all()):
                    return False
        return True

    def fold(self, body: torch.Tensor, weight: float, rank: int) -> torch.Tensor | None:
        """Add a contribution to the mean; returns the body when it may be reused at once.

        mean_k = mean_(k-1) + (x_k - mean_(k-1)) w_k / (w_1 + ... + w_k): one pass, and equal
        contributions give exactly themselves.
        """
        mean = self._mean
        if mean is None:
            self._mean = _Mean(body, weight, 1, rank)
            return None
        mean.weight += weight
        mean.num_folded += 1
        share = weight / mean.weight
        for run in self._parameter_runs + self._buffer_runs:
            if run.is_float and not (run.kind is Kind.BUFFER and self._buffers == "lowest_rank"):
                run.view(mean.body).lerp_(run.view(body), share)
            elif rank < mean.lowest_rank:
                run.view(mean.body).copy_(run.view(body))
        mean.lowest_rank = min(mean.lowest_rank, rank)
        return body

    def commit(self, num_live: int, lowest_live: int, hyperparameters: list[Hyperparameters] | None) -> torch.Tensor:
        """Make the mean the next version; returns the mean's body, which may be reused.

        `hyperparameters`, one per group, are those the contribution was computed under. Buffers
        move by the share of the `num_live` workers that the mean stands for.
        """
        mean = self._mean
        assert mean is not None, "commit without a fold"
        self._mean = None
        if self._optimizer is None:
            for run in self._parameter_runs:
                run.view(self.weights).copy_(run.view(mean.body))
        else:
            self._step(self._optimizer, mean.body, hyperparameters)
        self._commit_buffers(mean, num_live, lowest_live)
        if self.averaged is not None and self._polyak is not None:
            for run in self._parameter_runs:
                run.view(self.averaged).lerp_(run.view(self.weights), 1 - self._polyak)
        self.version += 1
        return mean.body

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        mean: torch.Tensor,
        hyperparameters: list[Hyperparameters] | None,
    ) -> None:
        for group, values in zip(optimizer.param_groups, hyperparameters or [], strict=False):
            apply_hyperparameters(group, values)
        for flat in self._flat:
            flat.parameter.grad = flat.run.view(mean)
        # Without the profiler record and hooks that torch wraps around step(): nobody can have asked for them.
        step = type(optimizer).step
        getattr(step, "__wrapped__", step)(optimizer)
        for flat in self._flat:
            flat.parameter.grad = None  # the body goes back to the pool

    def _commit_buffers(self, mean: _Mean, num_live: int, lowest_live: int) -> None:
        if self._buffers == "keep":
            return
        share = min(1.0, mean.num_folded / max(1, num_live))
        for run in self._buffer_runs:
            target, source = run.view(self.weights), run.view(mean.body)
            if run.is_float and self._buffers == "average":
                target.lerp_(source, share)
            elif mean.lowest_rank <= lowest_live:
                target.copy_(source)
        if self.averaged is not None:
            for run in self._buffer_runs:
                run.view(self.averaged).copy_(run.view(self.weights))

    # ---- reading --------------------------------------------------------------------------

    def tensors(self, averaged: bool = False) -> dict[str, torch.Tensor]:
        """The weights by name, aliases included, as `model.load_state_dict` takes them; copies."""
        body = self.averaged if averaged and self.averaged is not None else self.weights
        found: dict[str, torch.Tensor] = {}
        for spec, tensor in self.layout.views(body):
            for name in (spec.name, *spec.aliases):
                found[name] = tensor.clone()
        return found

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes held: weights, mean, optimizer state, Polyak average."""
        state = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)]
        return {
            "weights": self.weights.numel(),
            "mean": self._mean.body.numel() if self._mean is not None else 0,
            "optimizer": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            "averaged": self.averaged.numel() if self.averaged is not None else 0,
        }


@dataclass
class _FlatParameter:
    """Part of a run that one parameter group holds, as a parameter of the server's optimizer."""

    run: Run
    parameter: torch.nn.Parameter
