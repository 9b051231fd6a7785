"""A model's tensors as payloads of bytes: gathered from their memory, and written back in place.

On the CPU there is no staging: frames use views of the gradients' memory, and received bytes go directly into the
parameters. `staged.py` has transfers for tensors on other devices.
"""

from __future__ import annotations

import bisect
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...common.errors import UsageError
from ...common.kinds import ContributionKind
from ...common.tensors.layout import DTYPES, Kind, Layout, TensorSpec, as_bytes
from ...common.tensors.sharding import Part, Share
from ...common.tensors.statistics import statistics_of
from ...common.wire.segments import SegmentError

_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}

# Bytes to copy before the server is notified. It checks them while the next bytes are copied.
_COPIED_AT_ONCE = 8 << 20

_COPIED_WITH_GIL = 64 << 10

_OURS = 2  # references to a gradient's storage: the gradient, and the object that asks; 0: this torch cannot count

_gradient = operator.attrgetter("grad")

Indices = Sequence[int] | None  # of the layout's entries; None: all exchanged entries


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers by name; tied ones appear once.

    The names are those of the unwrapped model, so that a saved file loads into it.
    """
    found = bare(model).state_dict(keep_vars=True).items()
    # `_orig_mod.` comes from torch.compile of a part. Values of get_extra_state() are not tensors.
    return {name.replace("_orig_mod.", ""): value for name, value in found if isinstance(value, torch.Tensor)}


def bare(model: nn.Module) -> nn.Module:
    """The module without its wrapper (DistributedDataParallel, DataParallel, torch.compile)."""
    found: Any = model
    while isinstance(found, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(found, "_orig_mod"):
        found = found._orig_mod if hasattr(found, "_orig_mod") else found.module
    return found


def together(modules: Mapping[str, nn.Module]) -> nn.Module:
    """Combine several modules into one, whose tensor names begin with the modules' names."""
    whole = nn.Module()
    # set directly, because add_module refuses names that nn.Module uses
    whole._modules.update({name: bare(module) for name, module in modules.items()})
    return whole


class ModelTensors:
    """The tensors of a model that take part in the run, in the order of its layout."""

    deltas: Mapping[int, torch.Tensor] = {}  # of parameters, by index, when deltas are sent
    # makes a transfer for this model or a part of it; None: by device
    transfer_of: Callable[[ModelTensors], DirectTransfer] | None = None
    _stepped: frozenset[int] | None = None  # with several optimizers: indices of the tensors of the one that steps
    # Gradients may lie in shared memory: with one optimizer no other contribution uses their places.
    may_lend = True

    def __init__(
        self,
        model: nn.Module,
        stepped: Iterable[torch.Tensor] = (),
        averaged_buffers: Collection[str] = (),
        statistics: Collection[str] | None = None,
    ) -> None:
        """`stepped`: the optimizers' tensors. They take part in training once they require a gradient.

        `statistics`: names of the buffers to average; None: those of known layers and `averaged_buffers`. Raises
        UsageError for a name that is not a buffer.
        """
        trained = {id(tensor) for tensor in stepped}
        found: dict[int, TensorSpec] = {}
        tensors: dict[str, torch.Tensor] = {}
        homes, named = homes_of(model), named_tensors(model)
        if statistics is None:
            statistics = statistics_of(model, named, averaged_buffers)
        for name, value in named.items():
            if (known := found.get(id(value))) is not None:
                found[id(value)] = replace(
                    known, aliases=(*known.aliases, name), averaged=known.averaged or name in statistics
                )
                continue
            found[id(value)] = _describe(name, value, id(value) in trained, name in statistics)
            tensors[name] = value
        if not any(tensor.requires_grad for tensor in tensors.values()):
            have = f"none of its {len(tensors)} tensors is a parameter with requires_grad" if tensors else "it has none"
            message = f"the model has no parameters to train: {have}"
            raise UsageError(message, fix="pass the module you train to session.optimizer()")
        check_memory(tensors)
        self.module = model
        self.layout = Layout(found.values())
        self.tensors = [tensors[entry.spec.name] for entry in self.layout.entries]
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        # Moving a model replaces the buffers in these dicts and the memory of the parameters.
        self._homes: list[Home] = [homes.get(id(tensor), ({"": tensor}, "")) for tensor in self.tensors]
        self.places = list(map(torch.Tensor.data_ptr, self.tensors))

    def has_moved(self) -> bool:
        """Look the tensors up again. Returns whether any tensor has moved since the last call (43 us for 300 tensors).

        Raises UsageError if a tensor is no longer the one that was offered to the run.
        """
        found: list[torch.Tensor | None] = list(starmap(dict.get, self._homes))
        is_same = all(map(operator.is_, found, self.tensors))
        if not is_same:
            for entry, tensor, old in zip(self.layout.entries, found, self.tensors, strict=True):
                check_still(entry.spec, tensor, old)
            self.tensors = [tensor for tensor in found if tensor is not None]
        places = list(map(torch.Tensor.data_ptr, self.tensors))
        if is_same and places == self.places:
            return False
        for entry, tensor in zip(self.layout.entries, self.tensors, strict=True):
            check_still(entry.spec, tensor, tensor)
        self.places = places
        return True

    @cached_property
    def num_trained(self) -> int:
        """Number of parameters in a contribution. They come before the buffers."""
        return sum(entry.spec.kind is Kind.PARAMETER for entry in self.layout.entries)

    @cached_property
    def num_exchanged(self) -> int:
        """Number of tensors in a contribution. Frozen tensors come after them."""
        return sum(entry.spec.kind is not Kind.FROZEN for entry in self.layout.entries)

    @cached_property
    def positions(self) -> list[int]:
        """The position of each parameter in the layout's specs, by its index."""
        places = {spec.name: position for position, spec in enumerate(self.layout.specs)}
        return [places[entry.spec.name] for entry in self.layout.entries[: self.num_trained]]

    def names_at(self, positions: Iterable[int]) -> frozenset[str]:
        """Names of this model's tensors at these positions in the specs of the whole model."""
        specs = self.layout.specs
        return frozenset(specs[position].name for position in positions)

    def step_only(self, parameters: Iterable[torch.Tensor]) -> None:
        """Send only the gradients of these parameters. The others belong to another optimizer's step."""
        stepped = {id(parameter) for parameter in parameters}
        self._stepped = frozenset(index for index, tensor in enumerate(self.tensors) if id(tensor) in stepped)
        self.may_lend = False

    def gradients(self, indices: range) -> list[torch.Tensor | None]:
        """The gradient to send for each of these parameters, or None."""
        found = list(map(_gradient, self.tensors[indices.start : indices.stop]))
        if self._stepped is not None:
            found = [grad if at in self._stepped else None for at, grad in zip(indices, found, strict=True)]
        return found

    def without_gradient(self) -> tuple[int, ...]:
        """Positions in the layout's specs of parameters without a gradient. torch's optimizers skip these."""
        found = []
        for at, gradient in zip(self.positions, self.gradients(range(self.num_trained)), strict=True):
            if gradient is None:
                found.append(at)
        return tuple(found)

    @cached_property
    def _offsets(self) -> list[int]:
        return [entry.offset for entry in self.layout.entries]

    def overlaps(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Return (index, first, last) of each tensor that has bytes [first, last) of [start, end) of a payload."""
        found = []
        begin = max(0, bisect.bisect_right(self._offsets, start) - 1)
        for index in range(begin, bisect.bisect_left(self._offsets, end)):
            entry = self.layout.entries[index]
            first, last = max(start, entry.offset), min(end, entry.end)
            if first < last:
                found.append((index, first, last))
        return found

    def views(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Views of the exchanged tensors in `payload`, uint8 [exchange_bytes].

        It uses `data` because each tensor then counts its own in-place changes instead of the whole payload's.
        """
        return [view.data for _, view in islice(self.layout.views(payload), self.num_exchanged)]

    def stretches(self, indices: Indices) -> list[range]:
        """Group these exchanged tensors (None: all) into ranges of neighbours."""
        if indices is None:
            return [range(self.num_exchanged)]
        found: list[range] = []
        for index in sorted(indices):
            if found and found[-1].stop == index:
                found[-1] = range(found[-1].start, index + 1)
            else:
                found.append(range(index, index + 1))
        return found

    @cached_property
    def starts(self) -> list[int]:
        """Where each tensor's bytes begin in a payload, including the gap before it; then where the last one's end."""
        return [0, *(entry.end for entry in self.layout.entries)]

    def indices_of(self, wanted: list[int]) -> list[int]:
        """Indices in this model of these tensors of the whole model, or of their parts."""
        return wanted

    def place_of(self, index: int) -> tuple[int, int]:
        """The index in the whole model of this tensor, and the number of bytes before it.

        For a part of a tensor, the index is that of the whole tensor.
        """
        return index, 0

    def sources(self, kind: ContributionKind, indices: range | None = None) -> list[torch.Tensor | None]:
        """The tensors to send for these entries (None: all exchanged entries). A None in the result means zeros."""
        indices = range(self.num_exchanged) if indices is None else indices
        found: list[torch.Tensor | None] = list(self.tensors[indices.start : indices.stop])
        trained = range(indices.start, min(indices.stop, self.num_trained))
        if kind.holds_gradients:
            for at, gradient in enumerate(self.gradients(trained)):
                found[at] = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        elif kind.holds_differences:
            found[: len(trained)] = map(self.deltas.get, trained)  # None for parameters of other fragments
        return found


Home = tuple[dict[str, Any], str]  # a module's dict of tensors and a key in it


def homes_of(model: nn.Module) -> dict[int, Home]:
    """Where the model's modules keep each tensor, by the tensor's id."""
    return {
        id(tensor): (tensors, key)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
    }


def check_still(spec: TensorSpec, tensor: torch.Tensor | None, old: torch.Tensor) -> None:
    """Raises UsageError if a tensor no longer matches its spec. A buffer may be replaced by another tensor."""
    if tensor is None or (spec.kind is Kind.PARAMETER and tensor is not old):
        happened = "was removed from the model" if tensor is None else "was replaced by another parameter"
        message = f"'{spec.name}' {happened} after session.optimizer(): the run cannot train it any more"
        raise UsageError(message, fix="change the model's modules before session.optimizer()")
    if tensor.dtype is not DTYPES[spec.dtype] or tuple(tensor.shape) != spec.shape:
        got = f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
        message = f"the model has changed after session.optimizer(): the run trains {spec}, and it is {got} now"
        raise UsageError(message, fix="convert the model (.half(), .double(), .to(dtype)) before session.optimizer()")


def _describe(name: str, tensor: torch.Tensor, is_stepped: bool, is_statistic: bool) -> TensorSpec:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        message = f"'{name}' of a lazy module has no shape yet"
        raise UsageError(message, fix="run one batch through the model before session.optimizer()")
    dtype = _NAME_OF_DTYPE.get(tensor.dtype)
    if dtype is None:
        raise UsageError(f"tensor '{name}' is {tensor.dtype}; these can be exchanged: {', '.join(DTYPES)}")
    if not isinstance(tensor, nn.Parameter):
        kind = Kind.BUFFER
    else:
        kind = Kind.PARAMETER if tensor.requires_grad or is_stepped else Kind.FROZEN
    return TensorSpec(name, kind, dtype, tuple(tensor.shape), averaged=is_statistic or kind is not Kind.BUFFER)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes. Large copies release the GIL, so that other threads can send and receive meanwhile."""
    if len(source) < _COPIED_WITH_GIL:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Stretch(NamedTuple):
    """Consecutive bytes of a payload from `offset` on, as pieces of memory."""

    offset: int
    pieces: Iterable[memoryview]


class DirectTransfer:
    """Gathers payloads from a model and writes them into it, with views of the tensors' memory instead of staging.

    Indices are those of the layout's entries.
    """

    lies_here = True  # this process has the whole model, so a payload can be gathered again
    _lent: Mapping[int, weakref.ref[Any]] = {}  # memory of places that are a `grad` of the script: dead once unused

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._entries = model.layout.entries
        self._targets = [as_bytes(tensor) for tensor in model.tensors]
        self._zeros = memoryview(bytes(64))
        self._segment: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []  # views of the exchanged tensors in `_segment`
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}  # the newest gradient copied to each place
        self._may_lend = True

    def gather(self, kind: ContributionKind, indices: Indices = None) -> list[Stretch]:
        """The parts of a contribution's payload with these tensors (None: all, as one stretch).

        The pieces are valid until the next call or the next backward.
        """
        model = self._model
        if indices is None:
            return [Stretch(0, self._pieces(range(model.num_exchanged), model.sources(kind)))]
        return [
            Stretch(model.starts[group.start], self._pieces(group, model.sources(kind, group)))
            for group in model.stretches(indices)
        ]

    def stream(self, kind: ContributionKind, indices: Indices = None) -> Iterable[Stretch]:
        """As `gather`, but in windows if several processes have parts of the payload."""
        return self.gather(kind, indices)

    def gather_all(self) -> Iterable[memoryview]:
        """The payload of initial weights, in pieces."""
        return self._pieces(range(len(self._entries)), self._model.tensors)

    def _pieces(self, indices: range, tensors: Sequence[torch.Tensor | None]) -> list[memoryview]:
        pieces, starts = [], self._model.starts
        for index, tensor in zip(indices, tensors, strict=True):
            at, (_, offset, end) = starts[index], self._entries[index]
            if offset > at:
                pieces.append(self._zero_bytes(offset - at))
            if tensor is None:
                pieces.append(self._zero_bytes(end - offset))
            elif end > offset:
                pieces.append(as_bytes(tensor.contiguous()))
        return pieces

    def gather_into(
        self, kind: ContributionKind, segment: torch.Tensor, indices: Indices = None
    ) -> Iterator[tuple[int, int]]:
        """Copy the stretches of `gather` to `segment`, uint8 [exchange_bytes].

        Yields (start, end) of the bytes copied so far.

        If a loop accumulates into the same gradient again, its place in the segment becomes the `grad`, and later calls
        do not copy it. Raises SegmentError, and lends no more, if the script keeps such a gradient and uses another
        one: the place would be overwritten.
        """
        if segment is not self._segment:
            self.leave_segment()
            self._segment, self._places = segment, self._model.views(segment)
        for group in self._model.stretches(indices):
            start = end = self._model.starts[group.start]
            num_copied = 0
            for index, tensor in zip(group, self._model.sources(kind, group), strict=True):
                if self._copy_to_segment(index, tensor):
                    num_copied += self._entries[index].num_bytes
                end = self._entries[index].end
                if num_copied >= _COPIED_AT_ONCE:
                    yield start, end
                    start, num_copied = end, 0
            if start < end:
                yield start, end

    def _copy_to_segment(self, index: int, tensor: torch.Tensor | None) -> bool:
        """Copy a tensor to its place in the segment. Returns False if it is there already."""
        view = self._places[index]
        if tensor is not None and tensor.data_ptr() == view.data_ptr():
            return False
        if index in self._lent and self._lent[index]() is not None:
            self._may_lend = False
            raise SegmentError("the script keeps a gradient that is in the memory shared with the server")
        if tensor is None:
            view.zero_()
        elif tensor.is_contiguous():
            copy_bytes(as_bytes(view), as_bytes(tensor))
        else:
            view.copy_(tensor.detach())
        gradient = self._model.tensors[index].grad
        if tensor is not None and tensor is gradient and self._may_lend and self._model.may_lend:
            self._lend(index, view, gradient)
        return True

    def _lend(self, index: int, view: torch.Tensor, gradient: torch.Tensor) -> None:
        """Let a place be the memory of its gradient, if the loop keeps the gradient and no other tensor shares it."""
        storage, seen = gradient.untyped_storage(), self._seen.get(index)
        if seen is None or seen() is not gradient:
            self._seen[index] = weakref.ref(gradient)
        elif (
            not gradient.requires_grad
            and gradient.is_contiguous()
            and storage.nbytes() == gradient.nbytes
            and getattr(torch._C, "_storage_Use_Count", lambda _: 0)(storage._cdata) == _OURS
        ):
            # a storage of its own: moving a model's gradients would otherwise move the segment's view
            memory = view.reshape(-1).view(torch.uint8).numpy()
            gradient.data = torch.from_numpy(memory).view(view.dtype).view(view.shape)
            self._lent = {**self._lent, index: weakref.ref(memory)}

    def prepare(self, indices: Sequence[int], segment: torch.Tensor | None) -> bool:
        """Start copying these gradients off their device. Returns False if they are on the host."""
        return False

    def forget_copies(self) -> None:
        """Do not use the copies that `prepare` started: the gradients have changed."""

    def _zero_bytes(self, num_bytes: int) -> memoryview:
        if len(self._zeros) < num_bytes:
            self._zeros = memoryview(bytes(num_bytes))
        return self._zeros[:num_bytes]

    def write(self, offset: int, data: memoryview) -> None:
        """Write a piece of a payload of weights into the model."""
        at = 0
        for target in self.targets(offset, len(data)):
            copy_bytes(target, data[at : at + len(target)])
            at += len(target)

    def targets(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """Iterate over the memory for these bytes of a payload of weights, in order.

        Bytes in gaps between tensors get dummy memory.
        """
        found: list[memoryview] = []
        at, end = offset, offset + num_bytes
        for index, first, last in self._model.overlaps(at, end):
            if at < first:
                found.append(memoryview(bytearray(first - at)))
            begin = self._entries[index].offset
            found.append(self._targets[index][first - begin : last - begin])
            at = last
        if at < end:
            found.append(memoryview(bytearray(end - at)))
        return iter(found)

    def finish_write(self, num_bytes: int, kept: Sequence[tuple[int, int]] = ()) -> None:
        """Complete a payload of `num_bytes`.

        The model has the new weights on return, or from the stream's next kernel on.

        Tensors that contain bytes of `kept`, ranges [start, end), keep their values.
        """

    def leave_segment(self) -> None:
        """Use the segment no more. Gradients that are in it stay there."""
        self._segment, self._places, self._seen, self._lent = None, [], {}, {}

    @property
    def has_lent(self) -> bool:
        """Whether gradients of the script are in the segment."""
        return any(memory() is not None for memory in self._lent.values())


class PartTensors(ModelTensors):
    """Rows of the tensors of `whole`, in the order of one shard's layout. The memory is shared."""

    may_lend = False

    def __init__(self, whole: ModelTensors, share: Share) -> None:
        self.layout = share.layout
        self.names, self.transfer_of = whole.names, whole.transfer_of
        self._whole = whole
        index_of = {entry.spec.name: index for index, entry in enumerate(whole.layout.entries)}
        parts = {part.name: part for part in share.parts}
        # the part for each entry, and the index of its tensor in the whole model
        self._parts: list[tuple[Part, int]] = [
            (parts[entry.spec.name], index_of[parts[entry.spec.name].spec.name]) for entry in share.layout.entries
        ]
        with torch.no_grad():
            self.tensors = [part.of(whole.tensors[index]) for part, index in self._parts]

    def names_at(self, positions: Iterable[int]) -> frozenset[str]:
        wanted = self._whole.names_at(positions)
        return frozenset(part.name for part, _ in self._parts if part.spec.name in wanted)

    def sources(self, kind: ContributionKind, indices: range | None = None) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for position in indices if indices is not None else range(self.num_exchanged):
            part, index = self._parts[position]
            (tensor,) = self._whole.sources(kind, range(index, index + 1))
            found.append(part.of(tensor.detach()) if tensor is not None else None)
        return found

    def place_of(self, index: int) -> tuple[int, int]:
        part, whole = self._parts[index]
        return whole, part.first * self.layout.entries[index].num_bytes // max(1, part.end - part.first)

    def indices_of(self, wanted: list[int]) -> list[int]:
        found = set(wanted)
        return [position for position, (_, index) in enumerate(self._parts) if index in found]


def part_of(whole: ModelTensors, share: Share) -> ModelTensors:
    """Return the model itself if one shard has all of it, else the shard's part."""
    return whole if share.count == 1 else PartTensors(whole, share)


# ---- parameters that share memory ----------------------------------------------------------------
# Refuses parameters that share memory with another tensor. Python's identity of tensors does not show it.


def check_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError for a trained parameter whose elements are also elements of another tensor, or of itself.

    Each tensor is stepped and written by itself, so two names of one memory would be two different tensors.
    """
    by_storage: dict[int, list[tuple[int, int, str]]] = {}  # first byte, end and name
    for name, tensor in tensors.items():
        if tensor.device.type == "meta" or is_divided(tensor) or not tensor.numel():
            continue
        if is_trained(tensor) and any(size > 1 and not step for size, step in _strides(tensor)):
            raise UsageError(
                f"parameter '{name}' is expanded: several of its elements are one number in memory",
                fix="give it memory of its own before session.optimizer(): nn.Parameter(tensor.expand(...).clone())",
            )
        start = int(tensor.storage_offset()) * tensor.itemsize
        length = 1 + sum((size - 1) * step for size, step in _strides(tensor))
        end = start + length * tensor.itemsize
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, end, name))
    for found in by_storage.values():
        found.sort()
        for index, (_, end, name) in enumerate(found):
            for start, _, other in found[index + 1 :]:
                if start >= end:
                    break
                first, second = tensors[name], tensors[other]
                if (is_trained(first) or is_trained(second)) and torch.isin(_places(first), _places(second)).any():
                    raise UsageError(
                        f"'{name}' and '{other}' share memory (tied through .data, or views of one buffer), but the "
                        "run would train them as two tensors",
                        fix="tie them as one parameter before session.optimizer(): decoder.weight = encoder.weight; or "
                        "give each its own memory: tensor.data = tensor.data.clone()",
                    )


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded over processes. It does not import DTensor, which takes 0.8 s."""
    return type(tensor).__name__ == "DTensor"


def is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The size and stride of each dimension."""
    return [(int(size), int(step)) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """The first byte of each element, counted from the begin of its storage."""
    found = torch.tensor(tensor.storage_offset(), device="cpu")
    for size, step in _strides(tensor):
        found = found.unsqueeze(-1) + torch.arange(size, device="cpu") * step
    return found * tensor.itemsize
