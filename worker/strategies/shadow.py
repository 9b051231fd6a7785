"""A second copy of a model in host memory, which an exchange uses while the model computes.

The exchange treats it like any model: it gathers contributions from the newest snapshot, and writes weights into a
second payload. Each contribution costs two copies on the training thread, into memory that is reused.
"""

from __future__ import annotations

from itertools import islice

import torch

from ...common.kinds import ContributionKind
from ..tensors.staged import SideStream
from ..tensors.transfer import ModelTensors


class Shadow(ModelTensors):
    """A model whose `tensors` are the newest received weights, and whose `sources()` are the newest snapshot."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self.layout = layout = model.layout
        self.names = model.names
        self._stream = SideStream(model.tensors)
        sent = layout.views(self._stream.new_payload(layout.exchange_bytes))
        self._sent = [view for _, view in islice(sent, self.num_exchanged)]
        self.tensors = [view for _, view in layout.views(self._stream.new_payload(layout.total_bytes))]
        with torch.no_grad():
            for view, tensor in zip(self.tensors, model.tensors, strict=True):
                view.copy_(tensor)

    def sources(self, kind: ContributionKind, indices: range | None = None) -> list[torch.Tensor | None]:
        """The snapshot, whatever its kind."""
        return list(self._sent if indices is None else self._sent[indices.start : indices.stop])

    # ---- on the training thread ---------------------------------------------------------------

    def snapshot(self, kind: ContributionKind) -> None:
        """Copy the next contribution. The model may change as soon as this returns."""
        with torch.no_grad(), self._stream.copies():
            for view, tensor in zip(self._sent, self._model.sources(kind), strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor, non_blocking=True)
        self._stream.precede()

    def take(self) -> None:
        """Write received parameters and buffers into the model."""
        self._take(self.num_exchanged)

    def take_all(self) -> None:
        """Write all received tensors, including frozen ones, into the model."""
        self._take(len(self.tensors))

    def take_buffers(self) -> None:
        """Write received buffers into the model."""
        self._take(self.num_exchanged, self.num_trained)

    def _take(self, end: int, start: int = 0) -> None:
        with torch.no_grad(), self._stream.copies():
            for tensor, view in islice(zip(self._model.tensors, self.tensors, strict=True), start, end):
                tensor.copy_(view, non_blocking=True)
        self._stream.precede()

    def rebase(self) -> None:
        """Set each parameter to the received one plus its own change since the snapshot."""
        trained = zip(self._model.tensors, self._sent, self.tensors, strict=False)
        with torch.no_grad(), self._stream.copies():
            for tensor, sent, received in islice(trained, self.num_trained):
                tensor.sub_(sent.to(tensor.device, non_blocking=True))
                tensor.add_(received.to(tensor.device, non_blocking=True))
        self._stream.precede()

    # ---- on the helper thread -----------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the copies. Then the snapshot is complete, and received weights may be overwritten."""
        self._stream.synchronize()
