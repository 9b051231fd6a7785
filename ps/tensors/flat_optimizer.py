"""A torch optimizer over flat weights, stepped window by window.

Consecutive tensors of one parameter group and dtype are one flat parameter, cut at the borders of windows. Right for
optimizers that treat every element by itself, which `common/tensors/optimizers.py` tries out for each class. A window's
gradient, weights and state pass through the cache once, and it can be read while the next one is stepped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...common.errors import ParamServerError
from ...common.tensors.layout import FlatRun, Layout, View, joined
from ...common.tensors.optimizers import (
    Hyperparameters,
    OptimizerSpec,
    apply_hyperparameters,
    build_optimizer,
    current_hyperparameters,
    plain_step,
)
from .windows import Window


class GroupState(NamedTuple):
    """Of one parameter group. `keys` say of which state it has a value for each element (exp_avg); state with one value
    per parameter (step) is the same for all of a group, since they are stepped together: `scalars`, 0-dim."""

    hyperparameters: Hyperparameters
    keys: set[str]
    scalars: dict[str, torch.Tensor]


@dataclass
class OptimizerState:
    """What an optimizer remembers, independent of windows. Elementwise state lies in `bodies` by key, uint8
    [layout.parameter_bytes], where the weights have their element."""

    groups: list[GroupState] = field(default_factory=list)
    bodies: dict[str, torch.Tensor] = field(default_factory=dict)

    def body(self, key: str, layout: Layout) -> torch.Tensor:
        """The body of `key`; a new one holds anything."""
        if key not in self.bodies:
            self.bodies[key] = torch.empty(layout.parameter_bytes, dtype=torch.uint8)
        return self.bodies[key]


class _Flat(NamedTuple):
    """Part of a run that one parameter group holds, as a parameter of the optimizer."""

    run: FlatRun
    parameter: torch.nn.Parameter


class FlatOptimizer:
    """Steps the parameters of `weights`, uint8 [layout.total_bytes], in windows."""

    def __init__(self, spec: OptimizerSpec, layout: Layout, weights: torch.Tensor, windows: list[Window]) -> None:
        self._layout = layout
        self._windows: list[list[list[_Flat]]] = [[] for _ in windows]  # of each window, those of each group
        groups = []
        entries = {entry.spec.name: entry for entry in layout.entries}
        for group in spec.groups:
            runs = joined(
                sorted((entries[name] for name in group.tensors), key=lambda entry: (entry.offset, entry.end))
            )
            for (start, end, _), flats in zip(windows, self._windows, strict=True):
                parts = [part for run in runs if (part := run.within(start, end)) is not None]
                flats.append([_Flat(part, torch.nn.Parameter(part.view(weights))) for part in parts])
            members = [flat.parameter for flats in self._windows for flat in flats[-1]]
            groups.append({"params": members, **group.hyperparameters})
        self.torch = build_optimizer(spec.name, groups)
        self._step = plain_step(type(self.torch))

    def set_hyperparameters(self, groups: list[Hyperparameters]) -> None:
        for group, values in zip(self.torch.param_groups, groups, strict=False):
            apply_hyperparameters(group, values)

    @contextmanager
    def lr_times(self, scale: float) -> Iterator[None]:
        """Steps taken inside are with every group's learning rate times `scale`, 0 or more."""
        groups = self.torch.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale
        yield
        for group, rate in zip(groups, rates, strict=True):  # a failed step leaves no state to go on with
            group["lr"] = rate

    def move(self, index: int, weights: torch.Tensor) -> None:
        """Step window `index` in other memory from now on, which must hold the same weights."""
        for flats in self._windows[index]:
            for flat in flats:
                flat.parameter.data = flat.run.view(weights)

    def step(self, index: int, gradient: torch.Tensor, view: View) -> None:
        """One step of window `index` along `gradient`, uint8 [exchange_bytes]."""
        window = self._windows[index]
        if len(self._windows) > 1:
            for group, flats in zip(self.torch.param_groups, window, strict=True):
                group["params"] = [flat.parameter for flat in flats]
        for flats in window:
            for flat in flats:
                flat.parameter.grad = view(flat.run, gradient)
        self._step(self.torch)
        for flats in window:
            for flat in flats:
                flat.parameter.grad = None  # its memory is used again

    def state(self, into: OptimizerState | None = None) -> OptimizerState:
        """A copy of what is remembered, in the memory of an earlier copy when one is given."""
        state = OptimizerState(bodies=into.bodies if into is not None else {})
        for index, torch_group in enumerate(self.torch.param_groups):
            group = GroupState(current_hyperparameters(torch_group), set(), {})
            state.groups.append(group)
            for flat in self._flats_of(index):
                for key, value in self.torch.state.get(flat.parameter, {}).items():
                    if value is None:
                        continue
                    if value.dim() == 0:
                        group.scalars.setdefault(key, value.clone())
                        continue
                    if (value.dtype, value.shape) != (flat.run.dtype, flat.parameter.shape):
                        raise ParamServerError(f"{type(self.torch).__name__} keeps {key} in a form unlike its weights")
                    group.keys.add(key)
                    flat.run.view(state.body(key, self._layout)).copy_(value)
        return state

    def set_state(self, state: OptimizerState) -> None:
        """Go on from `state`, of an optimizer of the same groups; its memory is this optimizer's from now on."""
        self.set_hyperparameters([group.hyperparameters for group in state.groups])
        for index, (_, keys, scalars) in enumerate(state.groups):
            if not keys and not scalars:
                continue  # taken before the first step: what the constructor made is right
            for flat in self._flats_of(index):
                elementwise = {key: flat.run.view(state.bodies[key]) for key in keys}
                self.torch.state[flat.parameter] = elementwise | {k: v.clone() for k, v in scalars.items()}

    def _flats_of(self, group: int) -> Iterator[_Flat]:
        for window in self._windows:
            yield from window[group]

    @property
    def num_state_bytes(self) -> int:
        tensors = [v for entry in self.torch.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
