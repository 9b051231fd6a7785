"""Master weights: float32 copies of 16-bit weights, in modes whose workers take local steps.

The mean of the workers' steps may be smaller than the precision of 16 bits (2^-8 in bfloat16), and rounded weights
would then stand still. So the server steps float32 weights, and workers get them rounded (Micikevicius et al. 2018,
arXiv:1710.03740). Averaged running statistics of 16 bits have master values too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...common.tensors.layout import FlatRun, Kind, Layout, TensorSpec, joined, new_payload

NARROW = ("float16", "bfloat16")
Pair = tuple[FlatRun, FlatRun]  # the same elements in the workers' layout, and in the layout of the master weights


class Master:
    """Float32 values of a store's 16-bit tensors. Its other tensors keep their dtype.

    `layout` has the exchanged tensors of `narrow`, the workers' layout. `weights`, uint8 [layout.total_bytes], are what
    the store steps. With `averages_buffers`, 16-bit statistics are kept in float32 too.
    """

    def __init__(self, narrow: Layout, published: torch.Tensor, averages_buffers: bool) -> None:
        def widened(spec: TensorSpec) -> TensorSpec:
            is_stepped = spec.kind is Kind.PARAMETER or (averages_buffers and spec.averaged)
            return replace(spec, dtype="float32") if spec.dtype in NARROW and is_stepped else spec

        self.layout = Layout(widened(spec) for spec in narrow.specs if spec.kind is not Kind.FROZEN)
        self._pairs = _pairs(narrow, self.layout)
        self.weights = new_payload(self.layout.total_bytes)
        self.free: list[torch.Tensor] = []  # memory of contributions that were folded
        self.widened(published, self.weights)

    def widened(self, payload: torch.Tensor, wide: torch.Tensor | None = None) -> torch.Tensor:
        """Return a payload of the workers' layout in the layout of the master weights.

        It is written to `wide`, or to memory that `free` takes back.
        """
        if wide is None:
            wide = self.free.pop() if self.free else new_payload(self.layout.total_bytes)
        for narrow, run in self._pairs:
            run.view(wide).copy_(narrow.view(payload))
        return wide

    def contribution(self, payload: torch.Tensor, published: torch.Tensor, are_weights: bool) -> torch.Tensor:
        """Return a contribution in the layout of the master weights.

        Workers began at the `published` weights. To weights and statistics, this adds what rounding took from those.
        """
        wide = self.widened(payload)
        for narrow, run in self._pairs:
            if narrow.dtype is not run.dtype and (are_weights or narrow.kind is Kind.BUFFER):
                run.view(wide).sub_(narrow.view(published)).add_(run.view(self.weights))
        return wide

    def round(self, target: torch.Tensor, source: torch.Tensor | None = None) -> None:
        """Write the master weights, or other values of their layout, to a payload of the workers' layout."""
        source = self.weights if source is None else source
        for narrow, wide in self._pairs:
            narrow.view(target).copy_(wide.view(source))

    @property
    def num_bytes(self) -> int:
        return sum(payload.numel() for payload in (self.weights, *self.free))


def first_narrow(layout: Layout) -> TensorSpec | None:
    """Return the first 16-bit parameter, or None."""
    return next((spec for spec in layout.specs if spec.kind is Kind.PARAMETER and spec.dtype in NARROW), None)


def _pairs(narrow: Layout, wide: Layout) -> list[Pair]:
    """Return the pairs of all tensors of `wide`. Neighbours of one dtype in both layouts are one pair."""
    entries = {entry.spec.name: entry for entry in wide.entries}
    pairs: list[Pair] = []
    for entry in narrow.entries:
        if (other := entries.get(entry.spec.name)) is None:
            continue
        here, there = joined([entry])[0], joined([other])[0]
        if pairs:
            before, its_other = pairs[-1]
            ends = [(run.end, run.kind, run.dtype) for run in (before, its_other)]
            if ends == [(run.offset, run.kind, run.dtype) for run in (here, there)]:
                num = before.num_elements + here.num_elements
                pairs[-1] = replace(before, num_elements=num), replace(its_other, num_elements=num)
                continue
        pairs.append((here, there))
    return pairs
