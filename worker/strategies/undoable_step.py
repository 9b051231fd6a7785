"""Steps of the local optimizer with the mean of all peers' gradients. A step can be undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.kinds import ContributionKind
from ...common.tensors.layout import Kind
from ..tensors.transfer import ModelTensors

NO_VERSION = -1
Mean = Sequence[torch.Tensor | None]


class UndoableStep:
    """The model and optimizer of an all-reduce peer.

    `version`: the version of the model's weights. `has_state`: the optimizer has the run's state, not a new one.
    `has_stepped`: this process has taken a step. To undo steps, call the function that `copy` returned before them.
    """

    def __init__(self, model: ModelTensors, optimizer: torch.optim.Optimizer, step_fn: Callable[[], object]) -> None:
        self.model, self.optimizer, self._step_fn = model, optimizer, step_fn
        self.version = NO_VERSION
        self.has_state = self.has_stepped = False

    def step(self, mean: Mean) -> None:
        """Run one optimizer step with `mean` as the gradient. The weights then have the next version."""
        self.apply(mean)
        self.version += 1
        self.has_stepped = self.has_state = True

    def apply(self, mean: Mean, has_buffers: bool = True) -> None:
        """Run one optimizer step with `mean` as the gradient, and leave the version as it is.

        Afterwards each `grad` is this worker's own gradient again, because a new group may have to average it again.
        `has_buffers`: also copy the buffers from `mean`, which are averaged or the lowest rank's.
        """
        model = self.model
        gradients = [tensor.grad for tensor in model.tensors]
        for entry, tensor, item in zip(model.layout.entries, model.tensors, mean, strict=False):
            if item is None:
                continue
            if entry.spec.kind is not Kind.BUFFER:
                tensor.grad = item.to(tensor.device)
            elif has_buffers:
                tensor.data.copy_(item)
        try:
            self._step_fn()
        finally:
            for tensor, gradient in zip(model.tensors, gradients, strict=True):
                tensor.grad = gradient

    def weights(self) -> list[torch.Tensor]:
        """Return the tensors that are equal on all peers: the parameters and buffers that peers share."""
        return [tensor for tensor in self.model.sources(ContributionKind.WEIGHTS) if tensor is not None]

    def copy(self) -> Callable[[], None]:
        """Copy weights, optimizer state and version now. Returns a function that restores them from the copy."""
        version, restore = self.version, self.copy_state()
        copies = [(tensor, tensor.detach().clone()) for tensor in self.weights()]

        def undo() -> None:
            for tensor, before in copies:
                tensor.data.copy_(before)
            restore()
            self.version = version

        return undo

    def copy_state(self) -> Callable[[], None]:
        """Copy the optimizer state now. Returns a function that restores it from the copy."""
        state: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        return lambda: self.optimizer.load_state_dict(state)

    def state_for_server(self) -> dict[str, dict[str, torch.Tensor]] | None:
        """Return the optimizer state by parameter and key, or None if the server cannot store a state of this form."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for tensor, state in self.optimizer.state.items():
            values = {
                key: torch.as_tensor(value, device="cpu").detach() for key, value in state.items() if value is not None
            }
            if any(item.dim() and (item.shape, item.dtype) != (tensor.shape, tensor.dtype) for item in values.values()):
                return None
            if tensor.numel():
                found[self.model.names[id(tensor)]] = values
        return found


def has_memory(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps state between steps."""
    return not (
        isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    )
