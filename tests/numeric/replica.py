"""A worker's copy of a model, whose contributions and replies are bytes, as over the wire."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from paramserver.common.kinds import ContributionKind
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors


class Replica:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.tensors = model, ModelTensors(model)
        self.transfer = DirectTransfer(self.tensors)

    def gather(self, kind: ContributionKind) -> torch.Tensor:
        """The payload of a contribution."""
        return _joined(self.transfer.gather(kind)[0].pieces)

    def weights(self) -> torch.Tensor:
        """The payload of initial weights."""
        return _joined(self.transfer.gather_all())

    def receive(self, weights: torch.Tensor) -> None:
        num_bytes = self.tensors.layout.exchange_bytes
        self.transfer.write(0, memoryview(weights[:num_bytes].numpy()))
        self.transfer.finish_write(num_bytes)


def _joined(pieces: Iterable[memoryview]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
