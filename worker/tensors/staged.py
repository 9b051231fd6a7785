"""Transfers for tensors on a GPU or in other memory formats.

The bytes pass through two host buffers, one per direction. With a GPU the buffers are pinned, and copies run on a
separate stream, so the training stream does not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.layout import as_bytes, new_payload
from .transfer import DirectTransfer, Indices, ModelTensors, Stretch

log = get_logger()


class PinnedMemory:
    """Existing memory, pinned until `release`, so that copies to and from a GPU do not block.

    If the driver refuses, copies are slower and a log line says why. `runtime` is CUDA's, from `torch.cuda.cudart()`.
    """

    def __init__(self, payload: torch.Tensor, runtime: Any) -> None:
        self._runtime = runtime
        self._address = payload.data_ptr()
        self.is_pinned = self._succeeded("register", runtime.cudaHostRegister(self._address, payload.numel(), 0))

    def release(self) -> None:
        """Unpin the memory. Call it once, before the memory is freed, or the driver keeps its pages."""
        if self.is_pinned:
            self.is_pinned = False
            self._succeeded("unregister", self._runtime.cudaHostUnregister(self._address))

    @staticmethod
    def _succeeded(call: str, error: Any) -> bool:
        """Whether CUDA's result `error` is 0, which means success."""
        if int(error) == 0:
            return True
        log.warning("not_pinned", call=call, cuda_error=int(error), meaning="copies to and from the GPU wait")
        return False


class SideStream:
    """A separate GPU stream for copies, so that training does not wait for them.

    It is on the GPU of the first tensor that is on one. Without a GPU `device` is None, and copies are synchronous.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        self._stream = torch.cuda.Stream(self.device) if self.device is not None else None

    def new_payload(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory, uint8 [num_bytes], which is pinned if there is a GPU."""
        payload = new_payload(num_bytes)
        return payload.pin_memory() if self.device is not None else payload

    def copies(self) -> torch.cuda.StreamContext:
        """Copies inside this `with` begin after the work that the training stream has so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def copy(self, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor | None]) -> None:
        """Begin to copy each source to its target. A source that is None stands for zeros."""
        with torch.no_grad(), self.copies():
            for target, source in zip(targets, sources, strict=True):
                if source is None:
                    target.zero_()
                else:
                    target.copy_(source.detach(), non_blocking=True)

    def precede(self) -> None:
        """Make later work of the training stream wait for the copies; no thread blocks."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def event(self) -> torch.cuda.Event:
        """An event that occurs when the copies so far are done. Needs a GPU."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Block this thread until the copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class StagedTransfer(DirectTransfer):
    """A transfer with copies through two host buffers."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._stream = SideStream(model.tensors)
        self._out = self._stream.new_payload(model.layout.total_bytes)
        self._in = self._stream.new_payload(model.layout.total_bytes)
        self._out_views = [view for _, view in model.layout.views(self._out)]
        self._in_views = [view for _, view in model.layout.views(self._in)]
        self._in_bytes = as_bytes(self._in)
        self._is_copying = False  # whether a copy out of `_in` may be running
        self._segment: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []  # views of the exchanged tensors in `_segment`
        self._pinned: PinnedMemory | None = None  # pins `_segment`; only with a GPU
        self._copied: dict[int, torch.cuda.Event] = {}  # events of the started copies, by tensor index

    def gather(self, kind: ContributionKind, indices: Indices = None) -> list[Stretch]:
        payload, groups = as_bytes(self._out), self._model.stretches(indices)
        self._copy_out(kind, groups, self._out_views)
        places = [self._place_of(group) for group in groups]
        return [Stretch(start, [payload[start:end]]) for start, end in places]

    def _place_of(self, group: range) -> tuple[int, int]:
        """The bytes [start, end) of these tensors in a payload."""
        return self._model.starts[group.start], self._model.starts[group.stop]

    def gather_all(self) -> list[memoryview]:
        self._copy_out(ContributionKind.WEIGHTS, [range(len(self._out_views))], self._out_views)
        return [as_bytes(self._out)]

    def gather_into(
        self, kind: ContributionKind, segment: torch.Tensor, indices: Indices = None
    ) -> Iterator[tuple[int, int]]:
        groups = self._model.stretches(indices)
        self._copy_out(kind, groups, self._places_in(segment))
        yield from ((start, end) for start, end in map(self._place_of, groups) if start < end)

    def prepare(self, indices: Sequence[int], segment: torch.Tensor | None) -> bool:
        if self._stream.device is None:
            return False
        views = self._out_views if segment is None else self._places_in(segment)
        self._begin_copies(ContributionKind.GRADIENT, self._model.stretches(indices), views)
        self._copied.update(dict.fromkeys(indices, self._stream.event()))
        return True

    def forget_copies(self) -> None:
        self._copied.clear()

    def _places_in(self, segment: torch.Tensor) -> list[torch.Tensor]:
        if segment is not self._segment:
            self.leave_segment()
            self._segment, self._places = segment, self._model.views(segment)
            if self._stream.device is not None:
                self._pinned = PinnedMemory(segment, torch.cuda.cudart())
        return self._places

    def _copy_out(self, kind: ContributionKind, groups: list[range], views: list[torch.Tensor]) -> None:
        """Copy, and block this thread until the copies are done. The training stream does not wait."""
        events = [self._copied.pop(index) for group in groups for index in group if index in self._copied]
        if len(events) == sum(map(len, groups)):  # all copies were started before
            for event in dict.fromkeys(events):
                event.synchronize()
            return
        self._begin_copies(kind, groups, views)
        self._stream.synchronize()

    def _begin_copies(self, kind: ContributionKind, groups: list[range], views: list[torch.Tensor]) -> None:
        for group in groups:
            self._stream.copy(views[group.start : group.stop], self._model.sources(kind, group))

    def targets(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        if self._is_copying:
            self._stream.synchronize()  # wait for the last copy out of this buffer
            self._is_copying = False
        return iter([self._in_bytes[offset : offset + num_bytes]])

    def finish_write(self, num_bytes: int, kept: Sequence[tuple[int, int]] = ()) -> None:
        self._is_copying = True
        with torch.no_grad(), self._stream.copies():
            entries = self._model.layout.entries
            for entry, tensor, view in zip(entries, self._model.tensors, self._in_views, strict=True):
                is_kept = any(start < entry.end and entry.offset < end for start, end in kept)
                if entry.end <= num_bytes and not is_kept:
                    tensor.copy_(view, non_blocking=True)
        self._stream.precede()

    def leave_segment(self) -> None:
        self._copied.clear()
        if self._pinned is not None:
            self._stream.synchronize()  # copies into the segment may be running
            self._pinned.release()
        self._segment, self._places, self._pinned = None, [], None


def make_transfer(model: ModelTensors) -> DirectTransfer:
    """Return the model's own transfer, a direct one if all tensors are plain CPU memory, or a staged one."""
    if model.transfer_of is not None:
        return model.transfer_of(model)
    if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in model.tensors):
        return DirectTransfer(model)
    return StagedTransfer(model)
