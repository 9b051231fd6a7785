"""Sends weights and optimizer state to members of a group that lack them."""

from __future__ import annotations

import copy
from typing import Any

from ...common.errors import UnreachableError
from ...common.reporting.log import get_logger
from ..conversation.exchange import Exchange
from .group import Group
from .group_lifecycle import GroupLifecycle
from .undoable_step import UndoableStep, has_memory

log = get_logger()


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
