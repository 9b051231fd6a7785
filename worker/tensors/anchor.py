"""What local steps began from, where their difference is contributed."""

from __future__ import annotations

from itertools import compress

import torch

from ...common.tensors.layout import Kind
from .transfer import ModelTensors


class Anchor:
    """A copy of a model's parameters as they came; while a contribution is exchanged, the difference to what they have
    become, in the same memory: anchor - weights, which points downhill as a gradient does (the other way round it
    climbs, torchft#233). Used on the training thread."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._is_trained = [entry.spec.kind is Kind.PARAMETER for entry in model.layout.entries]
        self._held = [tensor.detach().clone() for tensor in self._trained]
        model.deltas = dict(zip(compress(range(len(self._is_trained)), self._is_trained), self._held, strict=True))

    @property
    def _trained(self) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in compress(self._model.tensors, self._is_trained)]

    def measure(self) -> None:
        """The local steps are taken: from here on it is the difference."""
        for held, now in zip(self._held, self._trained, strict=True):
            if held.device != now.device:  # the model was moved
                held.data = held.to(now.device)
            held.sub_(now)

    def note(self) -> None:
        """Weights have come: the next steps begin from these."""
        for held, now in zip(self._held, self._trained, strict=True):
            held.copy_(now)
