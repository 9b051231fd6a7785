"""Copies between a GPU and host memory, beside the training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.tensors.layout import new_payload


class SideStream:
    """A stream of its own for copies, on the GPU that some of these tensors are on, so that training never waits for
    one. Without a GPU (`device` is None) there is none, and a copy is over when it returns."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        self._stream = torch.cuda.Stream(self.device) if self.device is not None else None

    def new_payload(self, num_bytes: int) -> torch.Tensor:
        """Host memory, uint8 [num_bytes], pinned where there is a GPU."""
        payload = new_payload(num_bytes)
        return payload.pin_memory() if self.device is not None else payload

    def copies(self) -> torch.cuda.StreamContext:
        """Copies in this `with` begin after what the training stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def precede(self) -> None:
        """What the training stream is given next begins after the copies; no thread waits."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def event(self) -> torch.cuda.Event:
        """Comes when the copies given so far are over; only where there is a GPU."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """This thread waits until the copies are over."""
        if self._stream is not None:
            self._stream.synchronize()
