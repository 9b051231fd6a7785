"""A second copy of a model in host memory, which an exchange may use while the model computes.

To the exchange it is a model like any other: contributions are gathered from the last snapshot,
weights are written into a second body. Two copies a step on the training thread, into memory that
is kept; pinned where the model is on a GPU, with copies on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...common.tensors.layout import DTYPES, Entry, Kind, new_body
from ..tensors.transfer import ModelTensors, Source


class Shadow(ModelTensors):
    """`tensors` is what was received last, `sources()` what was snapshot last."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self.layout = model.layout
        self.names = model.names
        self._device = next((t.device for t in model.tensors if t.device.type == "cuda"), None)
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None
        entries = self.layout.entries
        self._exchanged = [entry for entry in entries if entry.spec.kind is not Kind.FROZEN]
        self._trained = [entry for entry in entries if entry.spec.kind is Kind.PARAMETER]
        self._sent = self._views(self._exchanged, self.layout.exchange_bytes)
        self.tensors = self._views(entries, self.layout.total_bytes)
        with torch.no_grad():
            for view, tensor in zip(self.tensors, model.tensors, strict=True):
                view.copy_(tensor)

    def _views(self, entries: list[Entry], num_bytes: int) -> list[torch.Tensor]:
        """New memory, as the tensors of these entries."""
        body = new_body(num_bytes)
        if self._device is not None:
            body = body.pin_memory()
        return [body[e.offset : e.end].view(DTYPES[e.spec.dtype]).view(e.spec.shape) for e in entries]

    def sources(self, source: Source, indices: range | None = None) -> list[torch.Tensor | None]:
        """What was snapshot, whichever source it came from."""
        return list(self._sent if indices is None else self._sent[indices.start : indices.stop])

    # ---- on the training thread ---------------------------------------------------------------

    def snapshot(self, source: Source) -> None:
        """Keep what is to be contributed; the model's own may change as soon as this returns."""
        with torch.no_grad(), self._side_stream():
            for view, tensor in zip(self._sent, self._model.sources(source), strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor, non_blocking=True)
        self._wait_on_device()

    def take(self) -> None:
        """Received parameters and buffers into the model."""
        self._take(self._exchanged)

    def take_all(self) -> None:
        """Frozen tensors too, as they come with a start."""
        self._take(self.layout.entries)

    def _take(self, entries: Iterable[Entry]) -> None:
        with torch.no_grad(), self._side_stream():
            for _, tensor, view in zip(entries, self._model.tensors, self.tensors, strict=False):
                tensor.copy_(view, non_blocking=True)
        self._wait_on_device()

    def rebase(self) -> None:
        """Parameters become what was received plus what they have changed since the snapshot."""
        with torch.no_grad(), self._side_stream():
            for _, tensor, sent, received in zip(
                self._trained, self._model.tensors, self._sent, self.tensors, strict=False
            ):
                tensor.sub_(sent.to(tensor.device, non_blocking=True))
                tensor.add_(received.to(tensor.device, non_blocking=True))
        self._wait_on_device()

    # ---- on the helper thread -----------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the copies begun so far are over: the snapshot is whole, what was received may be overwritten."""
        if self._stream is not None:
            self._stream.synchronize()

    # ---- streams ------------------------------------------------------------------------------

    def _side_stream(self) -> torch.cuda.StreamContext:
        if self._stream is not None:
            # Copies begin after what the training stream has been given so far.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _wait_on_device(self) -> None:
        """What the training stream is given next begins after the copies; no thread waits."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
