"""Transfers for tensors that are not plain host memory: on a GPU, or in other memory formats.

Two host buffers stand between, one for each direction; pinned where there is a GPU, with copies on a
stream of their own, so that the training stream never waits for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...common.tensors.layout import as_bytes, new_body
from .pinned import PinnedMemory
from .transfer import (
    DirectTransfer,
    Indices,
    ModelTensors,
    Source,
    Stretch,
    Transfer,
    exchanged_views,
    start_of,
    stretches,
)


def make_transfer(model: ModelTensors) -> Transfer:
    """In place where every tensor is plain CPU memory, staged otherwise."""
    if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in model.tensors):
        return DirectTransfer(model)
    return StagedTransfer(model)


class StagedTransfer:
    """Through two host buffers, one for each direction; pinned and on a side stream with CUDA."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._device = next((t.device for t in model.tensors if t.device.type == "cuda"), None)
        self._out = self._new_buffer(model.layout.total_bytes)
        self._in = self._new_buffer(model.layout.total_bytes)
        self._out_views = [view for _, view in model.layout.views(self._out)]
        self._in_views = [view for _, view in model.layout.views(self._in)]
        self._in_bytes = as_bytes(self._in)
        self._is_copying = False  # out of `_in`
        self._segment: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []  # of the exchanged tensors in `_segment`
        self._pinned: PinnedMemory | None = None  # `_segment`, where there is a GPU
        self._copied: dict[int, torch.cuda.Event] = {}  # copies that began, by tensor
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        body = new_body(num_bytes)
        return body.pin_memory() if self._device is not None else body

    def gather(self, source: Source, indices: Indices = None) -> list[Stretch]:
        layout, body = self._model.layout, as_bytes(self._out)
        groups = stretches(layout, indices)
        self._copy_out(source, groups, self._out_views)
        return [
            Stretch(start := start_of(layout, group.start), [body[start : layout.entries[group.stop - 1].end]])
            for group in groups
        ]

    def gather_all(self) -> list[memoryview]:
        self._copy_out("weights", [range(len(self._out_views))], self._out_views)
        return [as_bytes(self._out)]

    def place(self, source: Source, segment: torch.Tensor, indices: Indices = None) -> Iterator[tuple[int, int]]:
        groups = stretches(self._model.layout, indices)
        self._copy_out(source, groups, self._places_in(segment))
        for group in groups:
            start, end = start_of(self._model.layout, group.start), self._model.layout.entries[group.stop - 1].end
            if start < end:
                yield start, end

    def prepare(self, indices: Sequence[int], segment: torch.Tensor | None) -> bool:
        if self._stream is None:
            return False
        views = self._out_views if segment is None else self._places_in(segment)
        self._begin_copies("gradient", stretches(self._model.layout, indices), views)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._copied.update(dict.fromkeys(indices, event))
        return True

    def _places_in(self, segment: torch.Tensor) -> list[torch.Tensor]:
        if segment is not self._segment:
            self.leave_segment()
            self._segment, self._places = segment, exchanged_views(self._model.layout, segment)
            if self._device is not None:
                self._pinned = PinnedMemory(segment, torch.cuda.cudart())
        return self._places

    def _copy_out(self, source: Source, groups: list[range], views: list[torch.Tensor]) -> None:
        """Copy, and wait for it: this thread does, the training stream does not."""
        events = [self._copied.pop(index) for group in groups for index in group if index in self._copied]
        if len(events) == sum(map(len, groups)):  # all of it began before
            for event in dict.fromkeys(events):
                event.synchronize()
            return
        self._begin_copies(source, groups, views)
        if self._stream is not None:
            self._stream.synchronize()

    def _begin_copies(self, source: Source, groups: list[range], views: list[torch.Tensor]) -> None:
        with self._side_stream():
            for group in groups:
                for index, tensor in zip(group, self._model.sources(source, group), strict=True):
                    if tensor is None:
                        views[index].zero_()
                    else:
                        views[index].copy_(tensor.detach(), non_blocking=True)

    def write(self, offset: int, data: memoryview) -> None:
        if self._is_copying and self._stream is not None:
            self._stream.synchronize()  # the last copy out of this buffer must be over
            self._is_copying = False
        self._in_bytes[offset : offset + len(data)] = data

    def finish_write(self, num_bytes: int) -> None:
        self._is_copying = True
        with torch.no_grad(), self._side_stream():
            entries = self._model.layout.entries
            for entry, tensor, view in zip(entries, self._model.tensors, self._in_views, strict=True):
                if entry.end <= num_bytes:
                    tensor.copy_(view, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def leave_segment(self) -> None:
        self._copied.clear()
        if self._pinned is not None:
            if self._stream is not None:
                self._stream.synchronize()  # copies into it may be on their way
            self._pinned.release()
        self._segment, self._places, self._pinned = None, [], None

    def _side_stream(self) -> torch.cuda.StreamContext:
        if self._stream is not None:
            # Copies begin after what the training stream has been given so far.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)
