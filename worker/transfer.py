"""A model's tensors as bodies of bytes: gathered from wherever they lie, written back in place.

On the CPU nothing is staged: frames are made from views of the gradients' own memory, and
received bytes go straight into the parameters. Elsewhere (CUDA, other memory formats) two
host buffers stand between, pinned where there is a GPU, copied on a stream of their own.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import nn

from ..common.errors import UsageError
from ..common.layout import DTYPES, Kind, Layout, TensorSpec, as_bytes, new_body

_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}

Source = Literal["gradient", "weights"]


class ModelTensors:
    """The tensors of a model that take part in the run, in the order of its layout."""

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, TensorSpec] = {}
        tensors: dict[str, torch.Tensor] = {}
        # keep_vars: the parameters themselves, so that tied ones are seen to be one.
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                continue  # get_extra_state()
            if (known := found.get(id(value))) is not None:
                found[id(value)] = TensorSpec(known.name, known.kind, known.dtype, known.shape, (*known.aliases, name))
                continue
            found[id(value)] = _describe(name, value)
            tensors[name] = value
        if not tensors:
            raise UsageError("the model has no parameters", fix="pass the module you train to session.optimizer()")
        self.layout = Layout(found.values())
        self.tensors = [tensors[entry.spec.name] for entry in self.layout.entries]
        self.names = {id(tensor): name for name, tensor in tensors.items()}

    def sources(self, source: Source) -> list[torch.Tensor | None]:
        """For every exchanged entry, the tensor whose bytes are sent; None means zeros (no gradient came)."""
        found: list[torch.Tensor | None] = []
        for entry, tensor in zip(self.layout.entries, self.tensors, strict=True):
            if entry.spec.kind is Kind.FROZEN:
                break  # frozen tensors lie last
            if source == "gradient" and entry.spec.kind is Kind.PARAMETER:
                gradient = tensor.grad
                found.append(gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient)
            else:
                found.append(tensor)
        return found


def _describe(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = _NAME_OF_DTYPE.get(tensor.dtype)
    if dtype is None:
        raise UsageError(f"tensor '{name}' is {tensor.dtype}; these can be exchanged: {', '.join(DTYPES)}")
    if not isinstance(tensor, nn.Parameter):
        kind = Kind.BUFFER
    else:
        kind = Kind.PARAMETER if tensor.requires_grad else Kind.FROZEN
    return TensorSpec(name, kind, dtype, tuple(tensor.shape))


class Transfer(Protocol):
    """Bodies out of and into a model."""

    def gather(self, source: Source) -> list[memoryview]:
        """The body of a contribution, as pieces that stay valid until the next call or backward."""

    def gather_all(self) -> list[memoryview]:
        """The body of initial weights."""

    def write(self, offset: int, data: memoryview) -> None:
        """Take a piece of a body of weights."""

    def finish_write(self) -> None:
        """The body is whole: the model has the new weights when this returns, or its stream's next kernel runs."""


def make_transfer(model: ModelTensors) -> Transfer:
    """In place where every tensor is plain CPU memory, staged otherwise."""
    if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in model.tensors):
        return DirectTransfer(model)
    return StagedTransfer(model)


class DirectTransfer:
    """No staging: views of the tensors' own memory."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._entries = model.layout.entries
        self._offsets = [entry.offset for entry in self._entries]
        self._targets = [as_bytes(tensor) for tensor in model.tensors]
        self._zeros = memoryview(bytes(64))

    def gather(self, source: Source) -> list[memoryview]:
        return self._pieces(self._model.sources(source))

    def gather_all(self) -> list[memoryview]:
        return self._pieces(self._model.tensors)

    def _pieces(self, tensors: Sequence[torch.Tensor | None]) -> list[memoryview]:
        pieces, at = [], 0
        for entry, tensor in zip(self._entries, tensors, strict=False):
            if entry.offset > at:
                pieces.append(self._zero_bytes(entry.offset - at))
            at = entry.end
            if tensor is None:
                pieces.append(self._zero_bytes(entry.num_bytes))
            elif entry.num_bytes:
                pieces.append(as_bytes(tensor.contiguous()))
        return pieces

    def _zero_bytes(self, num_bytes: int) -> memoryview:
        if len(self._zeros) < num_bytes:
            self._zeros = memoryview(bytes(num_bytes))
        return self._zeros[:num_bytes]

    def write(self, offset: int, data: memoryview) -> None:
        index = bisect.bisect_right(self._offsets, offset) - 1
        at, end = offset, offset + len(data)
        while at < end and index < len(self._entries):
            entry = self._entries[index]
            first, last = max(at, entry.offset), min(end, entry.end)
            if first < last:
                self._targets[index][first - entry.offset : last - entry.offset] = data[first - offset : last - offset]
            at = max(at, entry.end)
            index += 1

    def finish_write(self) -> None:
        pass


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
        self._received = 0
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        body = new_body(num_bytes)
        return body.pin_memory() if self._device is not None else body

    def gather(self, source: Source) -> list[memoryview]:
        return self._copy_out(self._model.sources(source), self._model.layout.exchange_bytes)

    def gather_all(self) -> list[memoryview]:
        return self._copy_out(self._model.tensors, self._model.layout.total_bytes)

    def _copy_out(self, tensors: Sequence[torch.Tensor | None], num_bytes: int) -> list[memoryview]:
        with self._side_stream():
            for view, tensor in zip(self._out_views, tensors, strict=False):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor.detach(), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # this thread waits; the training stream does not
        return [as_bytes(self._out)[:num_bytes]]

    def write(self, offset: int, data: memoryview) -> None:
        if offset == 0 and self._stream is not None:
            self._stream.synchronize()  # the last copy out of this buffer must be over
        self._in_bytes[offset : offset + len(data)] = data
        self._received = offset + len(data)

    def finish_write(self) -> None:
        received = self._received
        with torch.no_grad(), self._side_stream():
            entries = self._model.layout.entries
            for entry, tensor, view in zip(entries, self._model.tensors, self._in_views, strict=True):
                if entry.end <= received:
                    tensor.copy_(view, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _side_stream(self) -> torch.cuda.StreamContext:
        if self._stream is not None:
            # Copies begin after what the training stream has been given so far.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)
