"""The part of a model that lies on one shard, as a model of its own (`common/tensors/sharding.py`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...common.kinds import ContributionKind
from ...common.tensors.sharding import Part, Share
from .transfer import ModelTensors


class PartTensors(ModelTensors):
    """Rows of the tensors of `whole`, in the order of the share's layout; memory is shared."""

    def __init__(self, whole: ModelTensors, share: Share) -> None:
        self.layout = share.layout
        self.names, self.transfer_of = whole.names, whole.transfer_of
        self._whole = whole
        index_of = {entry.spec.name: index for index, entry in enumerate(whole.layout.entries)}
        parts = {part.name: part for part in share.parts}
        # Of each entry here, the part and the index of its tensor in the whole model.
        self._parts: list[tuple[Part, int]] = [
            (parts[entry.spec.name], index_of[parts[entry.spec.name].spec.name]) for entry in share.layout.entries
        ]
        with torch.no_grad():
            self.tensors = [part.of(whole.tensors[index]) for part, index in self._parts]

    def names_at(self, positions: Iterable[int]) -> frozenset[str]:
        wanted = self._whole.names_at(positions)
        return frozenset(part.name for part, _ in self._parts if part.spec.name in wanted)

    @property
    def may_lend(self) -> bool:
        return self._whole.may_lend

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
    """The model itself where one shard holds all of it."""
    return whole if share.layout.total_bytes == whole.layout.total_bytes else PartTensors(whole, share)
