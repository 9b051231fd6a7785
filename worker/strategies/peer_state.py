"""The state of an all-reduce peer: its steps along means, which can be undone, and its transfer to other members."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...common.errors import UnreachableError
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Kind
from .group import Group

if TYPE_CHECKING:
    from .all_reduce import AllReduceStrategy

log = get_logger()

NO_VERSION = -1
Mean = Sequence[torch.Tensor | None]
StepFn = Callable[[], object]


class PeerState:
    """A peer's model and optimizer; `step_fn` runs one step of the optimizer.

    `version`: of the model's weights. `has_state`: the optimizer's state is the run's, if any peer has it.
    `has_stepped`: this process has taken a step.
    """

    def __init__(self, strategy: AllReduceStrategy, optimizer: torch.optim.Optimizer, step_fn: StepFn) -> None:
        self._strategy = strategy
        self._exchange, self._lifecycle, self.model = strategy._exchange, strategy._lifecycle, strategy._model
        self.optimizer, self._step_fn = optimizer, step_fn
        self.version = NO_VERSION
        self.has_state = self.has_stepped = False
        self._initial = copy.deepcopy(optimizer.state_dict()["state"])

    # ---- steps --------------------------------------------------------------------------------

    def step(self, mean: Mean) -> None:
        """Take the step to the next version."""
        self.apply(mean)
        self.version += 1
        self.has_stepped = self.has_state = True

    def apply(self, mean: Mean, has_buffers: bool = True) -> None:
        """Step along the mean. Gradients stay this worker's own, because it may have to average them again.

        `has_buffers`: buffers take the mean's values, or the lowest rank's.
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
        """The tensors that all peers share."""
        return [tensor for tensor in self.model.sources(ContributionKind.WEIGHTS) if tensor is not None]

    def copy(self) -> Callable[[], None]:
        """Copy weights and state. Returns the function that restores them."""
        version, restore = self.version, self.copy_state()
        copies = [(tensor, tensor.detach().clone()) for tensor in self.weights()]

        def undo() -> None:
            for tensor, before in copies:
                tensor.data.copy_(before)
            restore()
            self.version = version

        return undo

    def copy_state(self) -> Callable[[], None]:
        """Copy the optimizer's state. Returns the function that restores it."""
        state: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        return lambda: self.optimizer.load_state_dict(state)

    # ---- the server's copy --------------------------------------------------------------------

    def state_for_server(self) -> dict[str, dict[str, torch.Tensor]] | None:
        """The optimizer's state by parameter and key; None: the server cannot store a state of this form."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for tensor, state in self.optimizer.state.items():
            values = {key: torch.as_tensor(value).detach().cpu() for key, value in state.items() if value is not None}
            if any(item.dim() and (item.shape, item.dtype) != (tensor.shape, tensor.dtype) for item in values.values()):
                return None
            if tensor.numel():
                found[self.model.names[id(tensor)]] = values
        return found

    def restore(self) -> None:
        """Load the optimizer state of the server's snapshot, after weights came from the server.

        The snapshot may be from mode sync.
        """
        version, optimizer = self._exchange.progress.version, self.optimizer
        self.has_state = True
        if not (version or self.has_stepped):
            return
        state = self._exchange.pull_optimizer() if version else {}
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        names = enumerate(self.model.names[id(param)] for param in parameters)
        found = {index: state[name] for index, name in names if name in state}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": found or self._initial, "param_groups": groups})
        if version and not found and self.has_memory:
            self.has_state = False
            self.warn_of_new_state()

    @property
    def has_memory(self) -> bool:
        """Whether the optimizer keeps state between steps."""
        is_sgd = isinstance(self.optimizer, torch.optim.SGD)
        return not is_sgd or any(group["momentum"] for group in self.optimizer.param_groups)

    def warn_of_new_state(self) -> None:
        if not self._exchange.progress.is_done:
            log.warning("optimizer_state_anew", meaning="the server has no state of this version: moments restart")

    # ---- other members ------------------------------------------------------------------------

    def initial_state(self) -> Any:
        """The optimizer's state before the first step."""
        return self.optimizer.state_dict()["state"]

    def level(self, group: Group) -> None:
        """Give all members the weights of the newest version, and the optimizer state of a member that has both.

        Raises UnreachableError if no member has the weights, and Broken.
        """
        newest, level = self._exchange.progress.version, 2 * self.version + self.has_state
        states = self._lifecycle.run(lambda: group.gather_numbers(level))
        best = max(states)
        if best // 2 != newest:
            raise version_is_lost(newest)
        if all(state == best for state in states):
            return
        source = states.index(best)
        values = self.broadcast(group, source)
        if level != best:
            self.load(values)
            self.version, self.has_state = newest, bool(best % 2)
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
        tensors = [tensor.detach().cpu() for tensor in self.weights()]
        return {"tensors": tensors, "optimizer": self.optimizer.state_dict()}

    def load(self, values: dict[str, Any]) -> None:
        """Load the state that another member has dumped."""
        for tensor, other in zip(self.weights(), values["tensors"], strict=True):
            tensor.data.copy_(other)
        self.optimizer.load_state_dict(values["optimizer"])


def version_is_lost(version: int) -> UnreachableError:
    return UnreachableError(
        f"no worker has the weights of version {version} any more: all workers that had them are gone",
        fix="keep snapshots (--checkpoint-dir), from which a run resumes",
    )
