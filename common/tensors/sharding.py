"""Divides a model among the shards of a server. The division depends only on the layout, so all machines agree.

The tensors of each kind (parameters, buffers, frozen), in the order of a payload, are one sequence of bytes. It is cut
into S shares of equal size. If a share ends inside a tensor, the tensor is cut at the nearest row (first dimension). So
a large tensor is spread over several shards, and shares differ by less than two rows. A part of a tensor is a tensor
itself, `NAME[FIRST:END]`, and a shard's share has an ordinary layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..errors import Reason, refusal
from .layout import Kind, Layout, TensorSpec
from .optimizers import OptimizerSpec


class Part(NamedTuple):
    """Rows [first, end) of a tensor of the model. A scalar has one row."""

    spec: TensorSpec  # of the whole tensor
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
        """Return this part of `tensor`. It shares memory."""
        return tensor if self.is_whole else tensor[self.first : self.end]


@dataclass(frozen=True)
class Share:
    """The share of shard `number` of `count`: parts of tensors, in the order of `layout.specs`, and rows of tables."""

    parts: tuple[Part, ...]
    layout: Layout
    number: int = 0
    count: int = 1

    def optimizer(self, whole: OptimizerSpec) -> OptimizerSpec:
        """Return the model's optimizer over this shard's parts. Groups without a part here stay, without tensors."""
        names = {part.spec.name: part.name for part in self.parts}  # a shard has at most one part of a tensor
        groups = tuple(
            replace(group, tensors=tuple(names[tensor] for tensor in group.tensors if tensor in names))
            for group in whole.groups
        )
        tables = tuple(table.part(self.number, self.count) for table in whole.tables)
        return replace(whole, groups=groups, tables=tables)


def divide(whole: Layout, num_shards: int) -> list[Share]:
    """Return the shares of a model, one for each shard.

    Raises a LIMIT_EXCEEDED refusal if a shard would have no trained parameter.
    """
    if num_shards == 1:
        return [Share(tuple(Part(spec, 0, _num_rows(spec)) for spec in whole.specs), whole)]
    parts: list[list[Part]] = [[] for _ in range(num_shards)]
    for kind in Kind:
        _divide_kind([entry.spec for entry in whole.entries if entry.spec.kind is kind], parts)
    for index, found in enumerate(parts):
        if not any(part.spec.kind is Kind.PARAMETER and part.as_spec().num_elements for part in found):
            rows = sum(_num_rows(spec) for spec in whole.specs if spec.kind is Kind.PARAMETER)
            message = f"a model of {rows} row{'s' if rows != 1 else ''} cannot be divided among {num_shards} shards: "
            fix = "start fewer shards (--shards)"
            raise refusal(Reason.LIMIT_EXCEEDED, f"{message}shard {index} would have none", fix=fix)
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
        # Continue with the next share once this one is full.
        if shard < num_shards - 1 and at >= total * (shard + 1) // num_shards and total:
            shard += 1


def _num_rows(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1
