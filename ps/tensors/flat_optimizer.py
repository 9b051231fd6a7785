"""Torch optimizers over flat weights, stepped window by window.

Consecutive tensors of one parameter group and dtype are one flat parameter, cut at the borders of windows. Right for
optimizers that treat every element by itself, which `common/tensors/optimizers.py` tries out for each class. A window's
gradient, weights and state pass through the cache once, and it can be read while the next one is stepped. Tensors that
torch would have skipped for want of a gradient become flat parameters of their own when that first happens.

Torch's fused kernels step up to 64 bytes at a time, and by scalar code the elements that are left over. The two round
differently in SGD with momentum and in Adam, so bits would depend on where a flat parameter ends: on the number of
shards. What a flat parameter has beyond whole lines of 64 bytes is therefore stepped in a line of its own, which is
filled up with zeros.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...common.errors import ParamServerError
from ...common.tensors.fused import kernel_of
from ...common.tensors.layout import Entry, FlatRun, Layout, View, joined
from ...common.tensors.optimizers import (
    Hyperparameters,
    JointOptimizer,
    OptimizerSpec,
    apply_hyperparameters,
    current_hyperparameters,
    has_fused,
)
from ..policies.shared.late import momentum_left
from .windows import Window


class TensorState(NamedTuple):
    """What is remembered of one tensor: `keys` say of which state it has a value for each element (exp_avg), `scalars`
    hold the rest (step), 0-dim. Nothing before its first step."""

    keys: frozenset[str] = frozenset()
    scalars: Mapping[str, torch.Tensor] = MappingProxyType({})


class GroupState(NamedTuple):
    """Of one parameter group; `tensors` by name."""

    hyperparameters: Hyperparameters
    tensors: dict[str, TensorState]


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


class _Line:
    """A parameter of 64 bytes for `weights`, which are fewer. `filled`: their places in it, and in its gradient."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.parameter = _parameter(_filled_up(weights))
        self.gradient = torch.zeros_like(self.parameter)
        here = slice(weights.numel())
        self.filled = self.parameter.data[here], self.gradient[here]


class _Flat(NamedTuple):
    """Part of a run that one parameter group holds, as a parameter of the optimizer. The tensors that lie in it have
    always been stepped together."""

    run: FlatRun
    parameter: torch.nn.Parameter
    tensors: list[Entry]
    line: _Line | None = None  # where the parameter is not the weights' own memory


_LINE_BYTES = 64  # of the widest vectors
_NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


class FlatOptimizer:
    """Steps the parameters of `weights`, uint8 [layout.total_bytes], in windows."""

    def __init__(self, spec: OptimizerSpec, layout: Layout, weights: torch.Tensor, windows: list[Window]) -> None:
        self._layout = layout
        self._windows: list[list[list[_Flat]]] = [[] for _ in windows]  # of each window, those of each group
        groups = []
        entries = {entry.spec.name: entry for entry in layout.entries}
        self._has_lines = [
            _has_lines(cls, group.hyperparameters) for cls, group in zip(spec.classes, spec.groups, strict=True)
        ]
        for group, has_lines in zip(spec.groups, self._has_lines, strict=True):
            held = [entries[name] for name in group.tensors if entries[name].num_bytes]
            held.sort(key=lambda entry: entry.offset)
            runs = joined(held)
            for (start, end, _), flats in zip(windows, self._windows, strict=True):
                parts = [part for run in runs if (part := run.within(start, end)) is not None]
                flats.append([flat for one in parts for flat in _flats(one, one.view(weights), held, has_lines)])
            members = [flat.parameter for flats in self._windows for flat in flats[-1]]
            groups.append({"params": members, **group.hyperparameters})
        self.name, self.torch = spec.name, JointOptimizer(spec.classes, groups)
        self._kernels = [
            kernel_of(cls) if group.get("fused") and len({one.dtype for one in group["params"]}) == 1 else None
            for cls, group in zip(spec.classes, self.torch.param_groups, strict=True)
        ]
        self._is_parted = False  # some flats have missed steps that others took

    def set_hyperparameters(self, groups: list[Hyperparameters]) -> None:
        for group, values in zip(self.torch.param_groups, groups, strict=False):
            apply_hyperparameters(group, values)

    def late(self, lr_scale: float, momentum_among: int) -> AbstractContextManager[None]:
        """Steps taken inside are with every group's learning rate times `lr_scale`, 0 or more, and what is left of its
        momentum, where it has one, among so many workers that step one by one."""
        if lr_scale == 1.0 and (momentum_among == 1 or not any(one.get("momentum") for one in self.torch.param_groups)):
            return nullcontext()
        return self._late(lr_scale, momentum_among)

    @contextmanager
    def _late(self, lr_scale: float, momentum_among: int) -> Iterator[None]:
        groups = self.torch.param_groups
        told = [(group["lr"], group.get("momentum")) for group in groups]
        for group, (rate, momentum) in zip(groups, told, strict=True):
            group["lr"] = rate * lr_scale
            if momentum:
                group["momentum"] = momentum_left(momentum, momentum_among)
        yield
        for group, (rate, momentum) in zip(groups, told, strict=True):  # a failed step leaves no state to go on with
            group["lr"] = rate
            if momentum:
                group["momentum"] = momentum

    def move(self, index: int, weights: torch.Tensor) -> None:
        """Step window `index` in other memory from now on, which must hold the same weights."""
        for flats in self._windows[index]:
            for flat in flats:
                if flat.line is not None:
                    flat.line.weights = flat.run.view(weights)
                else:
                    flat.parameter.data = flat.run.view(weights)

    def step(
        self, index: int, gradient: torch.Tensor, view: View, without: frozenset[str] | set[str] = frozenset()
    ) -> None:
        """One step of window `index` along `gradient`, uint8 [exchange_bytes]. Tensors `without` a gradient are left as
        they are, as torch leaves them: no decay, no momentum, and their next step is one step later."""
        window = self._windows[index]
        if without:
            for group in range(len(window)):
                self._part(index, group, lambda name: name in without)
        elif self._step_directly(window, gradient, view):
            return
        stepped = [flat for flats in window for flat in flats if not (without and flat.tensors[0].spec.name in without)]
        for flat, its in zip(stepped, _gradients_of(stepped, gradient, view), strict=True):
            flat.parameter.grad = its
        # Torch's fused steps take no parameters that were stepped before together with others.
        for has_state in (True, False) if self._is_parted else (None,):
            self._step_those(window, has_state)
        _empty_lines(stepped)
        for flat in stepped:
            flat.parameter.grad = None  # its memory is used again

    def _step_directly(self, window: list[list[_Flat]], gradient: torch.Tensor, view: View) -> bool:
        """By their kernels, if all groups have one and all that it needs is remembered; False, and nothing is done."""
        if gradient.numel() < self._layout.exchange_bytes:  # a kernel would read beyond; torch says what is wrong
            return False
        steps = []
        for kernel, group, flats in zip(self._kernels, self.torch.param_groups, window, strict=True):
            if kernel is None:
                return False
            if flats:
                step = kernel(group, [self.torch.state.get(flat.parameter, _NOTHING) for flat in flats])
                if step is None:
                    return False
                steps.append((step, flats))
        for step, flats in steps:
            step([flat.parameter for flat in flats], _gradients_of(flats, gradient, view))
            _empty_lines(flats)
        return True

    def _step_those(self, window: list[list[_Flat]], has_state: bool | None) -> None:
        """Those of a window that have been stepped before, or have not; None: all."""
        if len(self._windows) > 1 or has_state is not None:
            state = self.torch.state
            for group, flats in zip(self.torch.param_groups, window, strict=True):
                group["params"] = [
                    flat.parameter for flat in flats if has_state in (None, bool(state.get(flat.parameter)))
                ]
        self.torch.step()

    def _part(self, index: int, group: int, kind: Callable[[str], object]) -> None:
        """From now on tensors of different `kind` are not stepped as one: each flat of a window's group becomes as many
        as there are stretches of one kind in it, with the state that it has."""
        window = self._windows[index]
        found: list[_Flat] = []
        for flat in window[group]:
            stretches = [list(same) for _, same in groupby(flat.tensors, lambda entry: kind(entry.spec.name))]
            if len(stretches) > 1:
                found += self._cut(flat, stretches, self._has_lines[group])
            else:
                found.append(flat)
        if len(found) > len(window[group]):
            window[group], self._is_parted = found, True

    def _cut(self, flat: _Flat, stretches: list[list[Entry]], has_lines: bool) -> Iterator[_Flat]:
        remembered = self.torch.state.pop(flat.parameter, None)
        values = flat.parameter.data if flat.line is None else flat.line.weights
        for stretch in stretches:
            run = flat.run.within(stretch[0].offset, stretch[-1].end)
            assert run is not None
            first = (run.offset - flat.run.offset) // run.dtype.itemsize
            for part in _flats(run, values[first : first + run.num_elements], stretch, has_lines):
                first = (part.run.offset - flat.run.offset) // run.dtype.itemsize
                here = slice(first, first + part.run.num_elements)
                if remembered is not None:
                    self.torch.state[part.parameter] = {
                        key: value if value is None else _state_of(part, value[here]) if value.dim() else value.clone()
                        for key, value in remembered.items()
                    }
                yield part

    def state(self, into: OptimizerState | None = None) -> OptimizerState:
        """A copy of what is remembered, in the memory of an earlier copy when one is given."""
        state = OptimizerState(bodies=into.bodies if into is not None else {})
        for index, torch_group in enumerate(self.torch.param_groups):
            group = GroupState(current_hyperparameters(torch_group), {})
            state.groups.append(group)
            for flat in self._flats_of(index):
                of_all = self._copy(flat, state)
                group.tensors.update((entry.spec.name, of_all) for entry in flat.tensors)
        return state

    def _copy(self, flat: _Flat, state: OptimizerState) -> TensorState:
        """What is remembered of a flat, its elementwise part in the bodies of `state`."""
        keys, scalars = [], {}
        for key, value in self.torch.state.get(flat.parameter, {}).items():
            if value is None:
                continue
            if value.dim() == 0:
                scalars[key] = value.clone()
                continue
            if (value.dtype, value.shape) != (flat.run.dtype, flat.parameter.shape):
                raise ParamServerError(f"{self.name} keeps {key} in a form unlike its weights")
            keys.append(key)
            flat.run.view(state.body(key, self._layout)).copy_(value[: flat.run.num_elements])
        return TensorState(frozenset(keys), scalars)

    def set_state(self, state: OptimizerState) -> None:
        """Go on from `state`, of an optimizer of the same groups; its memory is this optimizer's from now on."""
        self.set_hyperparameters([group.hyperparameters for group in state.groups])
        for number, (_, tensors) in enumerate(state.groups):

            def kind(name: str, tensors: dict[str, TensorState] = tensors) -> object:
                keys, scalars = tensors.get(name, TensorState())
                return keys, {key: value.item() for key, value in scalars.items()}

            for window in range(len(self._windows)):
                self._part(window, number, kind)
            for flat in self._flats_of(number):
                keys, scalars = tensors.get(flat.tensors[0].spec.name, TensorState())
                if keys or scalars:  # before the first step what the constructor made is right
                    elementwise = {key: _state_of(flat, flat.run.view(state.bodies[key])) for key in keys}
                    self.torch.state[flat.parameter] = elementwise | {k: v.clone() for k, v in scalars.items()}

    def _flats_of(self, group: int) -> Iterator[_Flat]:
        for window in self._windows:
            yield from window[group]

    @property
    def num_state_bytes(self) -> int:
        tensors = [v for entry in self.torch.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    """In the place of `values`. Nobody asks for its gradient: it is told."""
    return torch.nn.Parameter(values, requires_grad=False)


def _has_lines(cls: str, told: Hyperparameters) -> bool:
    """Whether the two ways of a class round differently. Those of SGD without momentum are equal: such a run is spared
    two copies a step, and a momentum that somebody sets later is not looked for."""
    return has_fused(cls) and (cls.lower() != "sgd" or bool(told.get("momentum")))


def _flats(run: FlatRun, values: torch.Tensor, entries: list[Entry], has_lines: bool) -> Iterator[_Flat]:
    """A run whose weights are `values`: its whole lines of 64 bytes, and what is left over."""
    size = run.dtype.itemsize
    whole = run.num_elements - (run.num_elements % (_LINE_BYTES // size) if has_lines else 0)
    if whole:
        part = replace(run, num_elements=whole)
        yield _Flat(part, _parameter(values[:whole]), _lying_in(part, entries))
    if whole < run.num_elements:
        part = replace(run, offset=run.offset + whole * size, num_elements=run.num_elements - whole)
        line = _Line(values[whole:])
        yield _Flat(part, line.parameter, _lying_in(part, entries), line)


def _gradients_of(flats: Sequence[_Flat], gradient: torch.Tensor, view: View) -> list[torch.Tensor]:
    """What each is stepped along; lines are filled."""
    found = [view(flat.run, gradient) for flat in flats]
    filled: list[torch.Tensor] = []
    told: list[torch.Tensor] = []
    for index, (_, _, _, line) in enumerate(flats):
        if line is not None:
            filled += line.filled
            told += line.weights, found[index]
            found[index] = line.gradient
    if filled:
        torch._foreach_copy_(filled, told)
    return found


def _empty_lines(flats: Sequence[_Flat]) -> None:
    """The weights are those that were stepped."""
    if lines := [line for _, _, _, line in flats if line is not None]:
        torch._foreach_copy_([line.weights for line in lines], [line.filled[0] for line in lines])


def _state_of(flat: _Flat, values: torch.Tensor) -> torch.Tensor:
    """What is remembered of each element, as its optimizer keeps it."""
    return values if flat.line is None else _filled_up(values)


def _filled_up(values: torch.Tensor) -> torch.Tensor:
    """To a line of 64 bytes, with zeros."""
    line = torch.zeros(_LINE_BYTES // values.element_size(), dtype=values.dtype)
    line[: values.numel()] = values
    return line


def _lying_in(run: FlatRun, entries: list[Entry]) -> list[Entry]:
    """Of tensors in the order of a body, those of which the run holds something."""
    first = bisect_right(entries, run.offset, key=lambda entry: entry.end)
    return entries[first : bisect_left(entries, run.end, key=lambda entry: entry.offset)]
