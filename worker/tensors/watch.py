"""Detects changes of weights by anyone but the run and its optimizer, in every element."""

from __future__ import annotations

import torch

from ...common.tensors.layout import as_bytes
from .transfer import ModelTensors

_WHOLE = 4096  # elements of a tensor that is compared as it is; of a larger one, weighted sums of blocks
_BLOCK = 64  # elements of a block
_NUM_SAMPLED = 16  # elements of each tensor that are compared with those of other processes
# Adding a value to the weights and subtracting it again, as sharpness-aware steps do, causes roundings. They are this
# many times the precision of the largest element, or of the largest sum of a block's magnitudes.
_ROUNDINGS, _ROUNDINGS_OF_BLOCK = 64, 4


class Watch:
    """Remembers a model's weights, and tells which of them differ now.

    It reads every element, in one pass over the weights, because a change through `.data` is counted nowhere. The
    elements of a block have different weights in its sum, so it is not the same after an exchange of two of them.
    Weights that were swapped and restored compare equal. Frozen tensors may be many times the trained ones: in a step
    only those are read that torch has counted a write to.
    """

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._names = [entry.spec.name for entry in model.layout.entries]
        self._places: list[int] | None = None
        self._small: dict[int, memoryview] = {}  # tensors that are compared as bytes, by index
        self._rest: dict[int, torch.Tensor] = {}  # the others
        self._before: dict[int, torch.Tensor] = {}  # remembered values of tensors that have moved since
        self.frozen: dict[int, torch.Tensor] = {}  # what is remembered of frozen tensors, by index
        self._frozen_versions: list[tuple[int, int]] = []
        self.note()

    def note(self) -> None:
        """Remember the weights as they are."""
        if self._places is not self._model.places:
            self._look_up()
        self._before = {}
        self._noted, self._sums = list(map(bytes, self._small.values())), list(map(_value, self._rest.values()))
        first, last = self._model.num_trained, self._model.num_exchanged
        self._buffers = [] if first == last else self._versions(first, last)
        if last < len(self._model.tensors) and (versions := self._versions(last)) != self._frozen_versions:
            self._frozen_versions = versions
            found = {index: tensor.detach() for index, tensor in enumerate(self._model.tensors[last:], last)}
            self.frozen = {
                at: _value(each).clone()
                for at, each in found.items()
                if not each.is_inference() and each.dtype.is_floating_point
            }

    def has_other_buffers(self) -> bool:
        """Whether a buffer was written or replaced since, as a forward pass of BatchNorm in training does."""
        return self._buffers != self._versions(self._model.num_trained, self._model.num_exchanged)

    def _versions(self, first: int, last: int | None = None) -> list[tuple[int, int]]:
        tensors = self._model.tensors[first:last]
        return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors]

    def changed_frozen(self, is_last: bool) -> list[int]:
        """Indices of frozen tensors that differ. `is_last`: also of those that were changed through `.data`."""
        if not is_last and self._versions(self._model.num_exchanged) == self._frozen_versions:
            return []
        return [index for index, value in self.frozen.items() if _differs(self._model.tensors[index].detach(), value)]

    def changed(self) -> list[int]:
        """Indices of the tensors that differ from the remembered weights."""
        if self._places is not self._model.places:
            self._look_up()
        if not self._before:
            is_same = list(map(bytes, self._small.values())) == self._noted
            if is_same and all(map(_has_same_bits, map(_value, self._rest.values()), self._sums)):
                return []
        before = self._before or self._kept()
        tensors = self._model.tensors[: self._model.num_trained]
        return [index for index, tensor in enumerate(tensors) if _differs(tensor.detach(), before[index])]

    def names(self, indices: list[int]) -> str:
        """These tensors in words."""
        rest = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
        return f"'{self._names[indices[0]]}'{rest}"

    def _look_up(self) -> None:
        """Find the weights again, because they have moved in memory."""
        if self._places is not None:
            self._before = self._before or self._kept()
        self._places = self._model.places
        self._small, self._rest = {}, {}
        for index, tensor in enumerate(self._model.tensors[: self._model.num_trained]):
            plain = tensor.detach()
            if plain.numel() <= _WHOLE and plain.device.type == "cpu" and plain.is_contiguous():
                self._small[index] = as_bytes(plain)
            else:
                self._rest[index] = plain

    def _kept(self) -> dict[int, torch.Tensor]:
        """The remembered values by index."""
        found = dict(zip(self._rest, self._sums, strict=True))
        for index, noted in zip(self._small, self._noted, strict=True):
            saved = torch.tensor(list(noted), dtype=torch.uint8, device="cpu")
            found[index] = saved.view(self._model.tensors[index].dtype)
        return found


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """What is compared of a tensor: its elements, or weighted sums of blocks, and the elements after the last block."""
    flat = tensor.reshape(-1)
    if tensor.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if tensor.numel() <= _WHOLE:
        return flat if flat.data_ptr() != tensor.data_ptr() else flat.clone()
    if flat.itemsize < torch.float32.itemsize:
        flat = flat.float()
    whole = flat.numel() - flat.numel() % _BLOCK
    weights = torch.linspace(0.5, 1.5, _BLOCK, dtype=flat.dtype, device=flat.device)
    sums = flat[:whole].view(-1, _BLOCK) @ weights
    return torch.cat((sums, flat[whole:])) if whole < flat.numel() else sums


def _has_same_bits(now: torch.Tensor, then: torch.Tensor) -> bool:
    """Whether two values are equal. NaN is equal to itself."""
    return torch.equal(now, then) or torch.equal(now.view(torch.uint8), then.view(torch.uint8))


def _differs(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether the tensor's value is another one, by more than roundings."""
    is_whole, precision = tensor.numel() <= _WHOLE, torch.finfo(tensor.dtype).eps
    value = _value(tensor)
    before = before.to(value.device)
    if before.is_complex():
        before = torch.view_as_real(before).reshape(-1)
    if not value.numel() or _has_same_bits(value, before):
        return False
    largest = value.abs().max() if is_whole else _value(tensor.abs()).max()
    limit = (_ROUNDINGS if is_whole else _ROUNDINGS_OF_BLOCK) * precision * largest
    return not bool((value - before).abs().max() <= limit)


class Sample:
    """A few elements of each trained tensor, to compare them with those of other processes."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._places: list[int] | None = None
        self._corners: list[torch.Tensor] = []

    def _look_up(self) -> list[torch.Tensor]:
        if self._places is not self._model.places:
            self._places = self._model.places
            trained = self._model.tensors[: self._model.num_trained]
            self._corners = [_corner(tensor.detach()).to(trained[0].device) for tensor in trained]
        return self._corners

    def bytes(self) -> bytes:
        """The elements as they are now."""
        return bytes(as_bytes(torch.cat(self._look_up()).cpu()))

    def norm(self) -> float:
        """Their 2-norm."""
        return float(torch.stack([corner.double().norm() for corner in self._look_up()]).norm())


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few elements of a tensor, of any shape and strides."""
    while tensor.dim() > 1 and tensor.numel():
        tensor = tensor[0]
    return tensor.view(-1)[:_NUM_SAMPLED]
