"""The model and optimizer of an all-reduce peer: steps with the mean, which can be undone, and transfers of the state.

A member of a group that lacks weights or optimizer state gets them from another member.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from ...common.config.addresses import join_address, split_address
from ...common.errors import UnreachableError, bad_request
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Kind
from ..conversation.channel import check_plaintext
from ..conversation.exchange import Exchange
from ..conversation.threads import Helper
from ..tensors.transfer import ModelTensors
from .collectives.backends import Broken, Generation, OutOfReach, Rendezvous
from .group import Group, own_address

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


# ---- group lifecycle -----------------------------------------------------------------------------
# Forms the group of all-reduce peers, and forms it again when members change.
#
# A dead peer is noticed in one of two ways. Its connections close, so a collective raises Broken (`Group`). Or it
# hangs or is cut off, and the server releases it after its lease (`GroupLifecycle.run`). The worker then reports that
# the generation has failed, and repeats the round in the next generation (`all_reduce.py`).


Found = TypeVar("Found")

_LOOK_UP_S = 0.2
_FORMING_S = 60.0  # Gloo tries to connect five times for 10 s
_RELEASED = "the server released a worker that left or was silent for server.lease_s; the others form a new group"
_IN_PLAINTEXT = (
    "the connection to the server uses TLS, but members use plain TCP among themselves, because torch's Gloo has no "
    "TLS: keep them on a private network (a tunnel), or use --mode sync"
)


class GroupLifecycle:
    """Keeps the group of the newest generation in `group`.

    Collectives run on a helper thread, so that signals can interrupt the calling thread.
    """

    _generation: Generation  # of the group, or of the group that is forming

    def __init__(self, exchange: Exchange, stage: int = 0) -> None:
        self._exchange, self._stage = exchange, stage
        host = own_address(exchange.server)
        check_plaintext(
            host, "this worker and the workers that it averages with", exchange.credentials.trusts_network,
            "or use --mode sync, in which workers connect to the server only",
        )  # fmt: skip
        self._rendezvous = Rendezvous(host)
        exchange.group_view.rendezvous = join_address(*self._rendezvous.address)
        self.group: Group | None = None
        self._failed_name = ""  # name of the generation whose group failed to form
        self._num_sent = 0.0  # bytes sent to peers in earlier groups
        self._num_failed: dict[tuple[int, ...], int] = {}  # in a row, with the same members
        self._helper = Helper("group")
        self._forming: list[Helper] = []  # helpers of abandoned groups
        if exchange.credentials.ca is not None:
            log.warning("group_in_plaintext", meaning=_IN_PLAINTEXT)

    @property
    def _rank(self) -> int:
        return self._exchange.progress.rank or 0

    def form(self, device: torch.device, joined: Callable[[Group], None]) -> bool:
        """Form the newest generation's group if needed, and call `joined`. Returns False if that failed.

        Raises UnreachableError after too many failures in a row.
        """
        progress, info = self._exchange.progress, self._exchange.group_view.info
        name = f"{progress.run}/{progress.server_incarnation}/{info.generation}"
        if self.group is not None and self.group.generation.name == name:
            return True
        if name == self._failed_name:
            return False
        self.close_group()
        if self._rank not in info.members or not info.rendezvous:
            description = f"a group of {len(info.members)} members without it, or without GroupInfo.rendezvous"
            raise bad_request(f"the server sent rank {self._rank} {description}")
        address = split_address(info.rendezvous)
        generation = Generation(info.generation, info.members, address, name, info.secret, self._stage)
        self._generation = generation
        try:
            group = self.group = self.run(lambda: Group(generation, self._rank, self._rendezvous, device))
            joined(group)
        except Broken as broken:
            self.log_broken(broken)
            self.close_group()
            self._failed_name = name
            self._count_failure(generation.members, broken)
            return False
        self._num_failed.clear()
        if group.not_over_nccl:
            log.info("not_over_nccl", rank=self._rank, reason=group.not_over_nccl)
        size = len(generation.members)
        log.routine("group", rank=self._rank, generation=generation.number, members=size, backend=group.backend)
        return True

    def log_broken(self, broken: Broken) -> None:
        log.warning("group_broken", rank=self._rank, reason=str(broken))

    def _count_failure(self, members: tuple[int, ...], broken: Broken) -> None:
        """Raises UnreachableError after too many failures in a row with the same members.

        A member that is gone is not in the server's next group, which restarts the count.
        """
        self._num_failed = {members: self._num_failed.get(members, 0) + 1}
        if self._num_failed[members] < broken.attempts:
            return
        message = str(broken)
        if not isinstance(broken, OutOfReach):
            message = f"rank {self._rank} and the workers that it averages with could not form a group: {broken}"
        raise UnreachableError(
            message,
            fix="let workers reach each other's ports, and start each with the server's address as other hosts know it "
            "(not 127.0.0.1); or --mode sync, where workers need to reach only the server",
        )

    def run(self, work: Callable[[], Found]) -> Found:
        """Run `work` on the helper thread and return its result.

        Raises Broken as `work` does, and when the server has released a member. A member that hangs or is cut off does
        not close its connections, so only the server notices it.
        """
        future: Future[Any] = self._helper.submit(work)
        while not wait([future], timeout=_LOOK_UP_S).done:
            if not self._exchange.group_view.is_over(self._generation.number):
                continue
            message = f"generation {self._generation.number} has ended: {_RELEASED}"
            if self.group is None:
                # Abandon the group that is forming: torch ends it only at its timeout, so nothing waits for it.
                future.add_done_callback(lambda item: item.exception() or item.result().close())
                self._helper.dismiss()
                self._forming.append(self._helper)
                self._helper = Helper("group")
                raise Broken(message)
            self.group.cut(message)
        found: Found = future.result()
        return found

    def take_num_sent(self) -> int:
        """Bytes sent to peers since the last call."""
        num_sent, self._num_sent = int(self._num_sent), 0.0
        if self.group is not None:
            num_sent, self.group.num_sent = num_sent + int(self.group.num_sent), 0.0
        return num_sent

    def close_group(self) -> None:
        if self.group is not None:
            self._num_sent += self.group.num_sent
            self.group.close()
            self.group = None

    def end(self) -> None:
        self._rendezvous.close()
        self._helper.end()
        for helper in self._forming:
            helper.end(_FORMING_S)
