"""How a model is divided among the shards of a server: the same on every machine, from the layout alone.

Of each kind (parameters, buffers, frozen) the tensors in the order of a payload are one sequence of bytes, cut into
S shares of equal size. Where a share ends inside a tensor, the tensor is cut at the nearest row border (first
dimension), so a tensor larger than a share is spread over several shards, and shares differ by less than two rows.
A part of a tensor is a tensor of its own, `NAME[FIRST:END]`, and what a shard holds is a layout like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..errors import Reason, refusal
from .layout import Kind, Layout, TensorSpec
from .optimizers import GroupSpec, OptimizerSpec


class Part(NamedTuple):
    """Rows [first, end) of a tensor of the model; a scalar is one row."""

    spec: TensorSpec  # the tensor it is a part of
    first: int
    end: int

    @property
    def is_whole(self) -> bool:
        return (self.first, self.end) == (0, _num_rows(self.spec))

    @property
    def name(self) -> str:
        return self.spec.name if self.is_whole else f"{self.spec.name}[{self.first}:{self.end}]"

    def as_spec(self) -> TensorSpec:
        if self.is_whole:
            return self.spec
        return replace(self.spec, name=self.name, shape=(self.end - self.first, *self.spec.shape[1:]), aliases=())

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the tensor; shares memory."""
        return tensor if self.is_whole else tensor[self.first : self.end]


@dataclass(frozen=True)
class Share:
    """What one shard holds: parts, and the layout they make, in whose `specs` they stand in the same order; of tables
    the rows that `number` of `count` shards has."""

    parts: tuple[Part, ...]
    layout: Layout
    number: int = 0
    count: int = 1

    def optimizer(self, whole: OptimizerSpec) -> OptimizerSpec:
        """The model's optimizer over this shard's parts; all groups, also those without a part here."""
        names = {part.spec.name: part.name for part in self.parts}  # of a tensor there is one part at most
        groups = []
        for group in whole.groups:
            local_names = tuple(names[tensor] for tensor in group.tensors if tensor in names)
            groups.append(GroupSpec(local_names, group.hyperparameters))
        tables = tuple(table.part(self.number, self.count) for table in whole.tables)
        return OptimizerSpec(whole.name, tuple(groups), tables, whole.reduction)


def divide(whole: Layout, num_shards: int) -> list[Share]:
    """The shares of a model, one for each shard.

    Raises a LIMIT_EXCEEDED refusal when a shard would be left without a trained parameter.
    """
    if num_shards == 1:
        return [Share(tuple(Part(spec, 0, _num_rows(spec)) for spec in whole.specs), whole)]
    parts: list[list[Part]] = [[] for _ in range(num_shards)]
    for kind in Kind:
        _divide_kind([entry.spec for entry in whole.entries if entry.spec.kind is kind], parts)
    for index, found in enumerate(parts):
        if not any(part.spec.kind is Kind.PARAMETER and part.as_spec().num_elements for part in found):
            rows = sum(_num_rows(spec) for spec in whole.specs if spec.kind is Kind.PARAMETER)
            raise refusal(
                Reason.LIMIT_EXCEEDED,
                f"a model of {rows} row{'s' if rows != 1 else ''} cannot be divided among {num_shards} shards: "
                f"shard {index} would have none",
                fix="start fewer shards (--shards)",
            )
    layouts = [Layout(part.as_spec() for part in found) for found in parts]
    return [Share(tuple(parts[number]), layouts[number], number, num_shards) for number in range(num_shards)]


def _divide_kind(specs: list[TensorSpec], parts: list[list[Part]]) -> None:
    total, num_shards = sum(spec.num_bytes for spec in specs), len(parts)
    at = shard = 0
    for spec in specs:
        rows = _num_rows(spec)
        first = 0
        while True:
            share_end = total * (shard + 1) // num_shards
            left_bytes = spec.num_bytes * (rows - first) // max(1, rows)
            if shard == num_shards - 1 or not left_bytes or at + left_bytes <= share_end:
                end = rows
            else:
                end = min(rows, first + round(max(0, share_end - at) * rows / spec.num_bytes))
            if end > first or rows == 0:
                parts[shard].append(Part(spec, first, end))
                at += spec.num_bytes * (end - first) // max(1, rows)
            first = end
            if first >= rows:
                break
            shard += 1
        # A share that is full, or as full as rows let it be, is left to itself.
        if shard < num_shards - 1 and at >= total * (shard + 1) // num_shards and total:
            shard += 1


def _num_rows(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1
