"""Torch optimizers over flat weights, stepped window by window.

Consecutive tensors of one parameter group and dtype form one flat parameter, cut at the borders of windows. This is
correct for elementwise optimizers, which `common/tensors/optimizers.py` checks for each class. A window's gradient,
weights and state pass through the cache once, and readers can read a window while the next one is stepped. When tensors
have no gradient for the first time, they become separate flat parameters, as torch would skip them.

Torch's fused kernels step 64 bytes at a time, and use scalar code for the remaining elements. In SGD with momentum and
in Adam the two round differently. The bits would then depend on where a flat parameter ends, and so on the number of
shards. Therefore the elements beyond whole lines of 64 bytes are copied into one parameter for each window, which is
padded with zeros to whole lines.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...common.errors import ParamServerError
from ...common.tensors.fused import kernel_of
from ...common.tensors.layout import Entry, FlatRun, Kind, Layout, View, joined
from ...common.tensors.optimizers import (
    GroupSpec,
    Hyperparameters,
    JointOptimizer,
    OptimizerSpec,
    apply_hyperparameters,
    current_hyperparameters,
    has_fused,
    state_keys,
)
from ..policies.shared.late import momentum_left

# ---- windows -------------------------------------------------------------------------------------
# Windows: the parts of a payload that are processed at once, small enough for the cache.


# Measured on 100 MB, SGD, one thread: windows of 256 KiB 8.8 ms, 1 MiB 6.1, 2 MiB 5.7, 4 MiB 5.5, one window 5.8.
WINDOW_BYTES = 4 << 20


class Window(NamedTuple):
    """Bytes [start, end) of every payload, and the flat runs in them, parameters first."""

    start: int
    end: int
    pieces: tuple[FlatRun, ...]
    floats: tuple[FlatRun, ...]  # of the pieces, those that may have NaN and Inf


def windows_of(layout: Layout) -> list[Window]:
    """Return all windows of a layout's contributions. A small model has one window."""
    runs, num_bytes = layout.runs_of(Kind.PARAMETER) + layout.runs_of(Kind.BUFFER), layout.exchange_bytes
    windows = []
    for start in range(0, max(1, num_bytes), WINDOW_BYTES):
        end = min(start + WINDOW_BYTES, num_bytes)
        pieces = tuple(filter(None, (run.within(start, end) for run in runs)))
        windows.append(Window(start, end, pieces, tuple(piece for piece in pieces if piece.is_float)))
    return windows


# ---- flat optimizer ------------------------------------------------------------------------------

# Changes no result. torch's RMSprop makes the buffer of its momentum at its first step only, if momentum is above 0.
_LEAST_MOMENTUM = 1e-30
_offset = attrgetter("offset")  # of an entry


class TensorState(NamedTuple):
    """The state of one tensor. Both fields are empty before its first step.

    `keys` are the names of elementwise state (exp_avg). `scalars` has the other state (step), as 0-dim tensors.
    """

    keys: frozenset[str] = frozenset()
    scalars: Mapping[str, torch.Tensor] = MappingProxyType({})


class GroupState(NamedTuple):
    """The state of one parameter group, with its tensors by name."""

    hyperparameters: Hyperparameters
    tensors: dict[str, TensorState]


@dataclass
class OptimizerState:
    """An optimizer's state, independent of windows.

    `payloads` has elementwise state by key, uint8 [layout.parameter_bytes], each element at the offset of its weight.
    """

    groups: list[GroupState] = field(default_factory=list)
    payloads: dict[str, torch.Tensor] = field(default_factory=dict)

    def payload(self, key: str, layout: Layout) -> torch.Tensor:
        """Return the payload of `key`. A new payload is uninitialized."""
        if key not in self.payloads:
            self.payloads[key] = torch.empty(layout.parameter_bytes, dtype=torch.uint8)
        return self.payloads[key]


class _Flat:
    """One flat parameter of the optimizer, a run of weights.

    Its tensors have always been stepped together. The same holds for all flats of a window and group with the same
    `history`.
    """

    def __init__(self, run: FlatRun, weights: torch.Tensor, tensors: list[Entry], history: int) -> None:
        self.tensors, self.history = tensors, history
        self._run = run
        self.parameter = torch.nn.Parameter(run.view(weights), requires_grad=False)  # autograd is not used

    def move(self, weights: torch.Tensor) -> None:
        """Use the weights in this payload from now on."""
        self.parameter.data = self._run.view(weights)

    def prepare(self, gradient: torch.Tensor, view: View) -> torch.Tensor:
        """Load the weights into the parameter, and return its part of the payload `gradient`, [n]."""
        return view(self._run, gradient)

    def finish(self) -> None:
        """Store the weights after a step of the parameter."""

    def read(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a payload's values for the elements of the parameter. The result may share memory."""
        return self._run.view(payload)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Write values of the parameter's elements to a payload."""
        self._run.view(payload).copy_(values)


class _Lines(_Flat):
    """The ends of runs, less than 64 bytes each, as one parameter with its own memory."""

    def __init__(self, runs: list[FlatRun], weights: torch.Tensor, tensors: list[Entry], history: int) -> None:
        self.tensors, self.history = tensors, history
        self._dtype, self._end, size = runs[0].dtype, runs[-1].end, runs[0].dtype.itemsize
        self._places = torch.cat([torch.arange(run.offset // size, run.end // size) for run in runs])
        num_per_line = _LINE_BYTES // size
        num_elements = -(-len(self._places) // num_per_line) * num_per_line
        self._weights = weights
        self._gradient = torch.zeros(num_elements, dtype=self._dtype)
        self.parameter = torch.nn.Parameter(self.read(weights), requires_grad=False)

    def move(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def prepare(self, gradient: torch.Tensor, view: View) -> torch.Tensor:
        self._gather(self._weights, self.parameter.data)
        self._gather(gradient, self._gradient)
        return self._gradient

    def finish(self) -> None:
        self.write(self.parameter.data, self._weights)

    def read(self, payload: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(self._gradient)
        self._gather(payload, out)
        return out

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        payload[: self._end].view(self._dtype).index_copy_(0, self._places, values[: len(self._places)])

    def _gather(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(payload[: self._end].view(self._dtype), 0, self._places, out=out[: len(self._places)])


_LINE_BYTES = 64  # size of the widest SIMD vectors
_NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


class FlatOptimizer:
    """Steps the parameters of `weights`, uint8 [layout.total_bytes], in windows."""

    def __init__(
        self, spec: OptimizerSpec, layout: Layout, weights: torch.Tensor, windows: list[Window], view: View
    ) -> None:
        self._layout, self._view = layout, view
        self._ranges = [(window.start, window.end) for window in windows]
        self._weights = [weights] * len(windows)  # for each window, the payload with its weights
        self._has_lines = [_has_lines(*item) for item in zip(spec.classes, spec.groups, strict=True)]
        names = [set(group.tensors) for group in spec.groups]
        members = [[entry for entry in layout.entries if entry.num_bytes and entry.spec.name in of] for of in names]
        # The flats by window, then by group.
        self._windows = [
            [list(self._build(index, group, entries)) for group, entries in enumerate(members)]
            for index in range(len(windows))
        ]
        groups = [
            {"params": [flat.parameter for flat in self._flats_of(index)], **group.hyperparameters}
            for index, group in enumerate(spec.groups)
        ]
        self.name, self._classes, self.torch = spec.name, spec.classes, JointOptimizer(spec.classes, groups)
        self._kernels = [
            kernel_of(cls) if group.get("fused") and len({param.dtype for param in group["params"]}) == 1 else None
            for cls, group in zip(spec.classes, self.torch.param_groups, strict=True)
        ]
        self._is_parted = False  # whether some flats have skipped steps that others took
        self._newest: list[Hyperparameters] = []  # hyperparameters that were set last
        self.unscaled: list[Hyperparameters] = []  # of each group, what `begin` has scaled

    def _build(self, index: int, group: int, entries: list[Entry], history: int = 0) -> Iterator[_Flat]:
        """Yield the flats for the parts of these tensors that are in window `index`, in the order of a payload."""
        start, end = self._ranges[index]
        weights = self._weights[index]
        ends: defaultdict[torch.dtype, list[FlatRun]] = defaultdict(list)
        for run in filter(None, (run.within(start, end) for run in joined(_lying_in(start, end, entries)))):
            size = run.dtype.itemsize
            num_left = run.num_elements % (_LINE_BYTES // size) if self._has_lines[group] else 0
            if num_whole := run.num_elements - num_left:
                whole = replace(run, num_elements=num_whole)
                yield _Flat(whole, weights, _lying_in(whole.offset, whole.end, entries), history)
            if num_left:
                ends[run.dtype].append(replace(run, offset=run.offset + num_whole * size, num_elements=num_left))
        for runs in ends.values():
            tensors = [entry for run in runs for entry in _lying_in(run.offset, run.end, entries)]
            yield _Lines(runs, weights, tensors, history)

    def set_hyperparameters(self, groups: Sequence[Hyperparameters]) -> None:
        """Set the hyperparameters of each group."""
        self._newest = [dict(values) for values in groups]
        for index, (group, values) in enumerate(zip(self.torch.param_groups, groups, strict=False)):
            before = _switches(group)
            apply_hyperparameters(group, values)
            if _switches(group) != before:
                self._complete(index)

    def _complete(self, index: int) -> None:
        """Add the state that a group's tensors would have, had they begun with its present hyperparameters: zeros.

        torch makes such state at a tensor's first step only (RMSprop's momentum buffer, Adam's max_exp_avg_sq). SGD
        makes its buffer when it needs one.
        """
        group = self.torch.param_groups[index]
        wanted = set() if "dampening" in group else state_keys(self._classes[index], group)
        for flat in self._flats_of(index):
            if state := self.torch.state.get(flat.parameter):
                state.update({key: torch.zeros_like(flat.parameter) for key in wanted - state.keys()})

    def begin(
        self, version: int, groups: Sequence[Hyperparameters], lr_scale: float = 1.0, momentum_among: int = 1
    ) -> None:
        """Prepare the steps of the windows that make the next of `version`. `end` follows.

        `groups`: the hyperparameters of each group; empty: they stay. `lr_scale`, 0 or more, multiplies every learning
        rate. `momentum_among` is the number of workers whose gradients step one by one. Their delay already acts as
        momentum, so `momentum_left` reduces the group's momentum.
        """
        if groups and self._newest != list(groups):
            self.set_hyperparameters(groups)
        for item in self.torch.onebit:  # a worker's codec counts its warm-up by versions, too
            item.taken = version
        if lr_scale == 1.0 and momentum_among == 1:
            return
        for group in self.torch.param_groups:
            momentum = group.get("momentum") if momentum_among != 1 else None
            self.unscaled.append({"lr": group["lr"], "momentum": momentum} if momentum else {"lr": group["lr"]})
            group["lr"] = group["lr"] * lr_scale
            if momentum:
                least = 0.0 if "dampening" in group else _LEAST_MOMENTUM  # SGD makes its buffer when it needs one
                group["momentum"] = max(least, momentum_left(momentum, momentum_among))

    def end(self) -> None:
        """Restore the learning rates and momenta that `begin` scaled."""
        for group, values in zip(self.torch.param_groups, self.unscaled, strict=True):
            group.update(values)
        self.unscaled.clear()

    def move(self, index: int, weights: torch.Tensor) -> None:
        """Step window `index` in this payload from now on. It must have the same weights."""
        self._weights[index] = weights
        for flats in self._windows[index]:
            for flat in flats:
                flat.move(weights)

    def step(self, index: int, gradient: torch.Tensor, without: frozenset[str] | set[str] = frozenset()) -> None:
        """Step window `index` along `gradient`, uint8 [exchange_bytes].

        Tensors `without` a gradient stay unchanged, as in torch: no decay, no momentum, and no step is counted.
        """
        window = self._windows[index]
        if without:
            for number in range(len(window)):
                self._part(index, number, lambda name: name in without)
        elif self._step_directly(window, gradient):
            return
        stepped = [flat for flats in window for flat in flats if not (without and flat.tensors[0].spec.name in without)]
        for flat in stepped:
            flat.parameter.grad = flat.prepare(gradient, self._view)
        # A fused step of torch cannot mix parameters with state and parameters without.
        for has_state in (True, False) if self._is_parted else (None,):
            # The flats of the window with state (True), without state (False), or all (None).
            if len(self._windows) > 1 or has_state is not None:
                state = self.torch.state
                for group, flats in zip(self.torch.param_groups, window, strict=True):
                    group["params"] = [
                        flat.parameter for flat in flats if has_state in (None, bool(state.get(flat.parameter)))
                    ]
            self.torch.step()
        for flat in stepped:
            flat.finish()
            flat.parameter.grad = None  # the gradient's memory is reused

    def _step_directly(self, window: list[list[_Flat]], gradient: torch.Tensor) -> bool:
        """Step with the groups' kernels, and return True. If a kernel or its state is missing, only return False."""
        if gradient.numel() < self._layout.exchange_bytes:  # a kernel would read beyond the end; torch raises an error
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
            step([flat.parameter for flat in flats], [flat.prepare(gradient, self._view) for flat in flats])
            for flat in flats:
                flat.finish()
        return True

    def _part(self, index: int, group: int, kind: Callable[[str], Hashable]) -> None:
        """Divide the flats of a window's group, so that tensors of different `kind` are in different flats."""
        flats = self._windows[index][group]
        members: dict[tuple[int, Hashable], dict[str, Entry]] = {}
        for flat in flats:
            for entry in flat.tensors:
                members.setdefault((flat.history, kind(entry.spec.name)), {})[entry.spec.name] = entry
        if len(members) == len({flat.history for flat in flats}):
            return
        copied = OptimizerState([GroupState({}, {})])
        for flat in flats:
            self._copy(flat, copied)
            self.torch.state.pop(flat.parameter, None)
        self._windows[index][group] = [
            flat
            for history, entries in enumerate(members.values())
            for flat in self._build(index, group, sorted(entries.values(), key=_offset), history)
        ]
        for flat in self._windows[index][group]:
            self._restore(flat, copied, copied.groups[0], is_copied=True)
        self._is_parted = True

    def state(self, into: OptimizerState | None = None) -> OptimizerState:
        """Return a copy of the state, in the memory of the earlier copy `into`, if given."""
        state = OptimizerState(payloads=into.payloads if into is not None else {})
        for index, torch_group in enumerate(self.torch.param_groups):
            group = GroupState(current_hyperparameters(torch_group), {})
            state.groups.append(group)
            for flat in self._flats_of(index):
                self._copy(flat, state)
        return state

    def _copy(self, flat: _Flat, state: OptimizerState) -> None:
        """Copy the state of a flat to the last group of `state`, and its elementwise part to the payloads."""
        keys, scalars = [], {}
        for key, value in self.torch.state.get(flat.parameter, {}).items():
            if value is not None and value.dim() == 0:
                scalars[key] = value.clone()
            elif value is not None:
                if (value.dtype, value.shape) != (flat.parameter.dtype, flat.parameter.shape):
                    raise ParamServerError(f"{self.name} keeps {key} in a form unlike its weights")
                keys.append(key)
                flat.write(value, state.payload(key, self._layout))
        of_all = TensorState(frozenset(keys), scalars)
        state.groups[-1].tensors.update((entry.spec.name, of_all) for entry in flat.tensors)

    def set_state(self, state: OptimizerState) -> None:
        """Continue from `state`, of an optimizer with the same groups. This optimizer then owns the state's memory."""
        self.set_hyperparameters([group.hyperparameters for group in state.groups])
        for number, group in enumerate(state.groups):

            def kind(name: str, tensors: dict[str, TensorState] = group.tensors) -> Hashable:
                keys, scalars = tensors.get(name, TensorState())
                return keys, frozenset((key, value.item()) for key, value in scalars.items())

            for window in range(len(self._windows)):
                self._part(window, number, kind)
            for flat in self._flats_of(number):
                self._restore(flat, state, group)

    def _restore(self, flat: _Flat, state: OptimizerState, group: GroupState, is_copied: bool = False) -> None:
        """Set the state of a flat, in the memory of `state`, or with `is_copied` in new memory."""
        keys, scalars = group.tensors.get(flat.tensors[0].spec.name, TensorState())
        if not keys and not scalars:  # not stepped yet: the state that the constructor made is right
            return
        elementwise = {key: flat.read(state.payloads[key]) for key in keys}
        if is_copied:
            elementwise = {key: value.clone() for key, value in elementwise.items()}
        self.torch.state[flat.parameter] = elementwise | {key: value.clone() for key, value in scalars.items()}

    def _flats_of(self, group: int) -> Iterator[_Flat]:
        for window in self._windows:
            yield from window[group]

    @property
    def num_state_bytes(self) -> int:
        values = (value for state in self.torch.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _switches(group: Mapping[str, Any]) -> list[bool]:
    """Return the hyperparameters of a group that decide which state a tensor has."""
    return [bool(group.get(name)) for name in ("momentum", "centered", "amsgrad")]


def _has_lines(cls: str, group: GroupSpec) -> bool:
    """Whether the fused kernel and the scalar code of a class round differently.

    In SGD without momentum they do not, which saves two copies for each step. This ignores a momentum that is set
    later.
    """
    return has_fused(cls) and (cls.lower() != "sgd" or bool(group.hyperparameters.get("momentum")))


def _lying_in(start: int, end: int, entries: list[Entry]) -> list[Entry]:
    """Return the entries with bytes in [start, end). `entries` are in the order of a payload."""
    first = bisect_right(entries, start, key=lambda entry: entry.end)
    return entries[first : bisect_left(entries, end, key=_offset)]
