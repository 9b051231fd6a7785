"""The model and optimizer of an all-reduce peer: steps with the mean, which can be undone, and transfers of the state.

A member of a group that lacks weights or optimizer state gets them from another member.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.errors import UnreachableError
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Kind
from ..conversation.exchange import Exchange
from ..tensors.transfer import ModelTensors
from .group import Group
from .group_lifecycle import GroupLifecycle

log = get_logger()

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
    return not isinstance(optimizer, torch.optim.SGD) or any(group["momentum"] for group in optimizer.param_groups)


class StateTransfer:
    """The transfers of one all-reduce peer. `step` has its model and optimizer."""

    def __init__(self, exchange: Exchange, lifecycle: GroupLifecycle, step: UndoableStep) -> None:
        self._exchange, self._lifecycle, self.step = exchange, lifecycle, step
        self._initial = copy.deepcopy(step.optimizer.state_dict()["state"])

    def state_to_compare(self) -> Any:
        """Return the optimizer state that must be equal on all members before the first step."""
        return self.step.optimizer.state_dict()["state"]

    def restore(self) -> None:
        """Load the optimizer state from the server's snapshot. Called after the weights came from the server.

        The snapshot may be of a run in mode sync.
        """
        step, version = self.step, self._exchange.progress.version
        optimizer, model = step.optimizer, step.model
        step.has_state = True
        if not (version or step.has_stepped):
            return
        state = self._exchange.pull_optimizer() if version else {}
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        names = enumerate(model.names[id(param)] for param in parameters)
        found = {index: state[name] for index, name in names if name in state}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": found or self._initial, "param_groups": groups})
        if version and not found and has_memory(optimizer):
            step.has_state = False
            self.warn_of_new_state()

    def warn_of_new_state(self) -> None:
        if not self._exchange.progress.is_done:
            log.warning("optimizer_state_anew", meaning="the server has no optimizer state: moments restart at 0")

    def level(self, group: Group) -> None:
        """Copy weights and optimizer state from a member that has the newest version to all others.

        Members that also have optimizer state are preferred. Raises UnreachableError if no member has these weights,
        and Broken if the group breaks.
        """
        step, newest = self.step, self._exchange.progress.version
        # Members compare by version first, then by optimizer state: with state is better than without.
        own_score = 2 * step.version + step.has_state
        scores = self._lifecycle.run(lambda: group.gather_numbers(own_score))
        best = max(scores)
        if best // 2 != newest:
            raise version_is_lost(newest)
        if all(score == best for score in scores):
            return
        source = scores.index(best)
        values = self.broadcast(group, source)
        if own_score != best:
            self.load(values)
            step.version, step.has_state = newest, bool(best % 2)
            self.log_loaded(group, source, version=newest)

    def log_loaded(self, group: Group, source: int, **fields: Any) -> None:
        ranks = group.generation.members
        log.info("taught", rank=ranks[group.index], by=ranks[source], **fields, bytes=group.num_broadcast)

    def broadcast(self, group: Group, source: int) -> dict[str, Any]:
        """Broadcast the state of the member `source`."""
        local_state = self.dump() if source == group.index else None
        return self._lifecycle.run(lambda: group.broadcast_values(local_state, source))

    def dump(self) -> dict[str, Any]:
        """Weights and optimizer state, for another member."""
        tensors = [tensor.detach().cpu() for tensor in self.step.weights()]
        return {"tensors": tensors, "optimizer": self.step.optimizer.state_dict()}

    def load(self, values: dict[str, Any]) -> None:
        """Load the state that another member has dumped."""
        for tensor, other in zip(self.step.weights(), values["tensors"], strict=True):
            tensor.data.copy_(other)
        self.step.optimizer.load_state_dict(values["optimizer"])


def version_is_lost(version: int) -> UnreachableError:
    return UnreachableError(
        f"no worker has the weights of version {version}: all workers that had them are gone",
        fix="write snapshots (--checkpoint-dir), from which a run can resume",
    )
