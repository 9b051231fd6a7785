"""Detects changes of the trained weights by anyone but the server, in modes where only the server may change them."""

from __future__ import annotations

import torch

from ...common.tensors.layout import as_bytes
from .transfer import ModelTensors

_SAMPLED = 16  # elements of each tensor
# Adding a value to the weights and subtracting it again, as sharpness-aware steps do, causes this many roundings.
_ROUNDINGS = 16


class Watch:
    """Compares a few elements of every trained tensor. Weights that were swapped and restored compare equal.

    On the CPU it compares bytes. On a GPU a comparison would block, so `changed` compares only after torch has counted
    an in-place change.
    """

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._names = [entry.spec.name for entry in model.layout.entries[: model.num_trained]]
        self._places: list[int] | None = None
        self._corners: list[torch.Tensor] = []
        self._bytes: list[memoryview] = []  # the same elements as bytes; only on the CPU
        self._versions: list[int] = []
        self.note()

    def note(self) -> None:
        """Remember the weights that arrived."""
        self._look_up()
        if self._bytes:
            self._noted = list(map(bytes, self._bytes))
            return
        self._keep(self._corners)
        self._versions = self._count()

    def changed(self) -> list[str]:
        """Names of the tensors that differ from the remembered weights."""
        self._look_up()
        if self._bytes:
            if list(map(bytes, self._bytes)) == self._noted:
                return []
            noted = self._kept()
        else:
            if self._versions and self._versions == self._count():
                return []
            if torch.equal(torch.cat(self._corners), self._sample):
                return []
            noted = self._kept()
        triples = zip(self._names, self._corners, noted, strict=True)
        return [name for name, new, old in triples if (new - old).norm() > _limit(new) * old.norm()]

    def sample(self) -> bytes:
        """The bytes of the compared elements, as they are now."""
        self._look_up()
        return b"".join(map(bytes, self._bytes or [as_bytes(torch.cat(self._corners).cpu())]))

    def norm(self) -> float:
        """The 2-norm of the compared elements."""
        self._look_up()
        return float(torch.stack([corner.double().norm() for corner in self._corners]).norm())

    def _count(self) -> list[int]:
        trained = self._model.tensors[: self._model.num_trained]
        return [tensor._version for tensor in trained] if self._sample.is_cuda else []

    def _look_up(self) -> None:
        """Look up the first elements of each tensor again."""
        if self._places is not self._model.places:
            noted = self._kept() if self._places is not None else []
            self._places = self._model.places
            trained = self._model.tensors[: self._model.num_trained]
            self._corners = [_corner(tensor.detach()).to(trained[0].device) for tensor in trained]
            is_plain = all(corner.device.type == "cpu" and corner.is_contiguous() for corner in self._corners)
            self._bytes = list(map(as_bytes, self._corners)) if is_plain else []
            if noted:
                self._keep([old.to(new) for old, new in zip(noted, self._corners, strict=True)])
                self._versions = []  # torch's counts belong to the old tensors

    def _keep(self, noted: list[torch.Tensor]) -> None:
        """Store remembered elements in the form in which they are compared."""
        if self._bytes:
            self._noted = [bytes(as_bytes(tensor)) for tensor in noted]
        else:
            self._sample = torch.cat(noted)
            self._samples = self._sample.split([tensor.numel() for tensor in noted])

    def _kept(self) -> list[torch.Tensor]:
        if self._bytes:
            return list(map(_from_bytes, self._noted, self._corners))
        return list(self._samples)


def _limit(corner: torch.Tensor) -> float:
    return _ROUNDINGS * torch.finfo(corner.dtype).eps


def _from_bytes(noted: bytes, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(noted), dtype=like.dtype) if noted else torch.empty_like(like)


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    """A view of at most 16 elements of a tensor, of any shape and strides."""
    while tensor.dim() > 1 and tensor.numel():
        tensor = tensor[0]
    return tensor.view(-1)[:_SAMPLED]
