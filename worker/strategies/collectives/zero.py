"""ZeRO stage 1 for all-reduce peers (`worker.zero: 1`): each member keeps the optimizer state of a part of the model.

    backward | average over the group | completion -> reply | step the own share | shares to all | next batch

Source: Rajbhandari et al. 2020 (arXiv:1910.02054). The model is cut into one share per member. The cut is that of a
server's shards (`common/tensors/sharding.py`): equal bytes, cut between rows. So the optimizer must be elementwise. All
members average the whole gradient. Member i steps share i, and sends its new rows to all members.

The group changes without a restart. So with `worker.zero_copies` 2 the next member also keeps and steps a share. It has
the same mean, so this needs no bytes on the network, and any single member may die without a loss. With 1 copy each
member keeps 1 / N of the state. Then a death costs the run its progress since the newest snapshot.

When a group forms, each member publishes what it has. Members with state send it to all, one after another, and each
member keeps its rows of the new division. For an upload the lowest member gathers the whole state, in the form of all
other modes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ....common.errors import ParamServerError, UnreachableError, UsageError
from ....common.reporting.log import get_logger
from ....common.tensors.layout import Kind, Layout
from ....common.tensors.optimizers import is_elementwise, plain_step
from ....common.tensors.sharding import divide
from ....common.wire.records import Outcome, Reply
from ...conversation.exchange import Exchange
from ...conversation.messages import Final, Outgoing
from ...tensors.transfer import ModelTensors
from ..all_reduce import UPLOADS_OPTIMIZER, AllReduceStrategy
from ..group import Group
from ..peer_state import GroupLifecycle, Mean, StateTransfer, UndoableStep, has_memory, version_is_lost
from .backends import Broken

log = get_logger()

Rows = tuple[str, int, int]  # rows [first, end) of a tensor, by its name
State = dict[Rows, dict[str, Any]]  # the optimizer's state of these rows


class ShardedStep(UndoableStep):
    """A step of this member's rows, with the hyperparameters of the script's optimizer.

    The optimizer state is in `state`, not in the script's optimizer. `is_whole`: the whole model is of the newest
    version; otherwise only the rows in `state` are.
    """

    def __init__(self, model: ModelTensors, optimizer: torch.optim.Optimizer, step_fn: Callable[[], object]) -> None:
        super().__init__(model, optimizer, step_fn)
        self._plain_step: Callable[[torch.optim.Optimizer], Any] = plain_step(type(optimizer))
        self._rows_optimizer = copy.copy(optimizer)  # has the same groups, with views of rows as parameters
        self.groups: dict[str, int] = {}  # by name of a tensor
        for at, group in enumerate(optimizer.param_groups):
            self.groups |= {model.names[id(param)]: at for param in group["params"]}
        self.indices = {entry.spec.name: index for index, entry in enumerate(model.layout.entries)}
        initial = {model.names[id(item)]: dict(state) for item, state in optimizer.state.items()}
        self.initial: State = {rows: initial.get(rows[0], {}) for rows in self.all_rows()}
        optimizer.state.clear()
        self.state: State = copy.deepcopy(self.initial)
        self.is_whole = True

    def all_rows(self) -> Iterator[Rows]:
        """All rows of each tensor that the optimizer steps."""
        for name in self.groups:
            shape = self.model.layout.entries[self.indices[name]].spec.shape
            yield name, 0, shape[0] if shape else 1

    def view(self, rows: Rows) -> torch.Tensor:
        return _cut(self.model.tensors[self.indices[rows[0]]].detach(), rows)

    def device_of(self, rows: Rows, value: torch.Tensor) -> torch.device:
        """The device for a state value: scalars such as step counters stay where they are."""
        return self.model.tensors[self.indices[rows[0]]].device if value.dim() else value.device

    def apply(self, mean: Mean, has_buffers: bool = True) -> None:
        for entry, tensor, item in zip(self.model.layout.entries, self.model.tensors, mean, strict=False):
            if has_buffers and item is not None and entry.spec.kind is Kind.BUFFER:
                tensor.data.copy_(item)
        optimizer = self._rows_optimizer
        groups = optimizer.param_groups = [{**group, "params": []} for group in self.optimizer.param_groups]
        stepped: list[tuple[torch.Tensor, Rows]] = []
        optimizer.state = defaultdict(dict)
        for rows, state in self.state.items():
            gradient = mean[self.indices[rows[0]]]
            if gradient is None:
                continue
            view = self.view(rows)
            view.grad = _cut(gradient, rows).to(view.device)
            groups[self.groups[rows[0]]]["params"].append(view)
            stepped.append((view, rows))
            if state:
                optimizer.state[view] = state
        self._plain_step(optimizer)
        for view, rows in stepped:
            self.state[rows] = optimizer.state[view]
        optimizer.state = defaultdict(dict)
        self.is_whole = False

    def copy_state(self) -> Callable[[], None]:
        state = copy.deepcopy(self.state)

        def restore() -> None:
            self.state, self.is_whole = state, True

        return restore


class ShardedTransfer(StateTransfer):
    """Divides the optimizer state again when a group forms."""

    step: ShardedStep

    def __init__(self, exchange: Exchange, lifecycle: GroupLifecycle, step: ShardedStep) -> None:
        super().__init__(exchange, lifecycle, step)
        self._copies = exchange.config.zero_copies
        self.shares: list[list[Rows]] = []  # rows of the newest division, by member

    def state_to_compare(self) -> Any:
        return {str(rows): state for rows, state in self.step.initial.items() if state}

    def restore(self) -> None:
        step, version = self.step, self._exchange.progress.version
        step.has_state = step.is_whole = True
        found = self._exchange.pull_optimizer() if version else {}
        step.state = copy.deepcopy(step.initial)
        for rows in step.state:
            if values := found.get(rows[0]):
                step.state[rows] = {key: value.to(step.device_of(rows, value)) for key, value in values.items()}
        if version and not found and has_memory(step.optimizer):
            self.warn_of_new_state()

    def level(self, group: Group) -> None:
        """Give all members the weights of the newest version, and each member the optimizer state of its share."""
        step, newest, run = self.step, self._exchange.progress.version, self._lifecycle.run
        versions = run(lambda: group.gather_numbers(step.version))
        if max(versions) != newest:
            raise version_is_lost(newest)
        is_new = step.version == newest
        shares = _divided(step.model.layout, len(versions))
        self.shares = [[rows for rows in share if rows[0] in step.groups] for share in shares]
        # The rows that this member keeps.
        num = len(self.shares)
        numbers = {(group.index - back) % num for back in range(self._copies)} if group.index < num else ()
        wanted = Collected(rows for number in sorted(numbers) for rows in self.shares[number])
        if is_new:
            wanted.fill(step.state)
        words = run(lambda: group.gather_numbers(2 * (wanted.is_full and is_new) + (is_new and step.is_whole)))
        if any(word < 3 for word in words):
            have = [version == newest for version in versions]
            self._exchange_parts(group, have, [bool(word % 2) for word in words], wanted)
        if not all(run(lambda: group.gather_numbers(int(wanted.is_full)))):
            lost = "a part of the optimizer's state is lost with the workers that held it"
            fix = "keep snapshots (--checkpoint-dir), from which a run resumes; with worker.zero_copies 2 the run "
            fix += "survives the loss of any one worker"
            raise UnreachableError(f"{lost} (worker.zero is 1, worker.zero_copies {self._copies})", fix=fix)
        step.state, step.version = wanted.state, newest
        step.has_state = step.is_whole = True

    def _exchange_parts(self, group: Group, have: list[bool], are_whole: list[bool], wanted: Collected) -> None:
        """Send the parts of all members with the newest version, one after another. `have`, `are_whole`: by member."""
        step, index, any_whole = self.step, group.index, any(are_whole)
        sources = [member for member, has in enumerate(have) if has]
        first = are_whole.index(True) if any_whole else sources[0]
        local_part: dict[str, Any] = {}
        if index == first:
            local_part["tensors"] = [tensor.detach().cpu() for tensor in step.weights()]
        if have[index] and not any_whole:
            local_part["fresh"] = [[*rows, step.view(rows).cpu().clone()] for rows in step.state]
        fresh = Collected(step.all_rows())
        for source in sources:
            values = self._broadcast(group, source, **local_part)
            if "tensors" in values and not (have[index] and are_whole[index]):
                for tensor, other in zip(step.weights(), values["tensors"], strict=True):
                    tensor.data.copy_(other)
            for name, start, end, rows in values.get("fresh", ()):
                step.view((name, start, end)).copy_(rows)
                fresh.fill({(name, start, end): {}})
            wanted.fill(values["state"])
            if not have[index]:
                self.log_loaded(group, source)
        if not (any_whole or fresh.is_full):
            raise version_is_lost(self._exchange.progress.version)
        for found, state in wanted.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to(step.device_of(found, value))

    def _broadcast(self, group: Group, source: int, **local_part: Any) -> dict[str, Any]:
        """Return the optimizer state of the member `source`, by rows, with its other values."""
        state = [[*rows, state] for rows, state in self.step.state.items()]
        values = {"state": state, **local_part} if source == group.index else None
        found = self._lifecycle.run(partial(group.broadcast_values, values, source))
        found["state"] = {(name, first, end): state for name, first, end, state in found["state"]}
        return found

    def gather_state(self, group: Group) -> dict[str, dict[str, torch.Tensor]] | None:
        """Gather the whole optimizer state on the lowest member; the others return None. Raises Broken."""
        whole = Collected(self.step.all_rows())
        for source in range(len(group.generation.members)):
            values = self._broadcast(group, source)
            if group.index == 0:
                whole.fill(values["state"])
        if group.index:
            return None
        return {
            name: {key: torch.as_tensor(value, device="cpu") for key, value in state.items() if value is not None}
            for (name, _, end), state in whole.state.items()
            if end
        }

    def spread(self) -> None:
        """Send the rows that this member stepped to all members. Raises Broken."""
        group, step = self._lifecycle.group, self.step
        assert group is not None
        pieces = [[step.view(rows) for rows in share] for share in self.shares]
        self._lifecycle.run(lambda: group.broadcast_tensors(pieces))
        step.is_whole = True


class Zero(AllReduceStrategy):
    _step: ShardedStep
    _transfer: ShardedTransfer

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        kind = type(optimizer)
        if not is_elementwise(kind):  # type: ignore[arg-type]  # mypy takes no class for hashable
            message = f"{kind.__name__} is not elementwise: its state of a tensor cannot be divided"
            fix = "--set worker.zero=0, or an elementwise optimizer such as AdamW"
            raise UsageError(f"worker.zero is 1, but {message}", fix=fix)
        super().ready(optimizer, step)

    def _make_parts(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        self._step = ShardedStep(self._model, optimizer, step)
        self._transfer = ShardedTransfer(self._exchange, self._lifecycle, self._step)

    def _until_taken(
        self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool = True
    ) -> Reply:
        reply = super()._until_taken(gradients, outgoing, is_right)
        while not (self._step.is_whole or self._confirmed.is_done or reply.result.outcome is Outcome.START):
            reply = self._complete_failed()  # a member died while rows were exchanged: the next group repeats it
            if reply.result.outcome is not Outcome.START:
                self._form_group()
        return reply

    def _steps_first(self, group: Group) -> bool:
        return bool(group.metadata[-1][0])  # an upload needs the shares of all members

    def _take_step(self, mean: Mean) -> None:
        self._step.step(mean)
        with suppress(Broken):
            self._transfer.spread()

    def _upload(self, outgoing: Outgoing, mean: Mean) -> Reply:
        group = self._lifecycle.group
        assert group is not None
        undo = self._step.copy()
        try:
            self._step.step(mean)
            self._transfer.spread()
            if group.metadata[-1][0] & UPLOADS_OPTIMIZER:
                outgoing = outgoing._replace(optimizer=self._transfer.gather_state(group))
        except Broken as broken:
            undo()
            self._lifecycle.log_broken(broken)
            return self._complete_failed(outgoing)
        return self._complete_upload(group, outgoing, undo)

    def _finish(self) -> Final | None:
        states = [value for state in self._step.state.values() for value in state.values()]
        num, copies = len(self._transfer.shares), self._exchange.config.zero_copies
        num_bytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        fields: dict[str, Any] = {"bytes": num_bytes, "shares": num}
        if copies >= num:
            fields["meaning"] = f"nothing is divided: zero_copies {copies} covers all {num} shares"
        log.info("optimizer_state", rank=self._confirmed.rank, **fields)
        return super()._finish()


class Collected:
    """Optimizer state of some rows, as far as it has arrived."""

    def __init__(self, rows: Iterable[Rows]) -> None:
        self.state: State = {row: {} for row in rows}
        self._are_there = {rows: torch.zeros(rows[2] - rows[1], dtype=torch.bool, device="cpu") for rows in self.state}

    @property
    def is_full(self) -> bool:
        return all(bool(rows.all()) for rows in self._are_there.values())

    def fill(self, found: Mapping[Rows, Mapping[str, Any]]) -> None:
        """Copy the wanted rows from `found`."""
        by_name = defaultdict[str, list[tuple[Rows, Mapping[str, Any]]]](list)
        for rows, state in found.items():
            by_name[rows[0]].append((rows, state))
        for wanted, target in self.state.items():
            name, begin, stop = wanted
            for (_, source_begin, source_stop), state in by_name[name]:
                first, end = max(begin, source_begin), min(stop, source_stop)
                if first >= end:
                    continue
                self._are_there[wanted][first - begin : end - begin] = True
                for key, value in state.items():
                    if not (isinstance(value, torch.Tensor) and value.dim()):
                        target[key] = copy.deepcopy(value)
                        continue
                    if key not in target:
                        target[key] = value.new_empty((stop - begin, *value.shape[1:]))
                    target[key][first - begin : end - begin].copy_(value[first - source_begin : end - source_begin])


def _divided(layout: Layout, num: int) -> list[list[Rows]]:
    """The rows of `num` shares, or of fewer shares if there are too few rows."""
    while True:
        try:
            return [[(part.spec.name, part.first, part.end) for part in share.parts] for share in divide(layout, num)]
        except ParamServerError:  # too few rows
            num -= 1


def _cut(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A view of these rows."""
    return tensor[rows[1] : rows[2]] if tensor.dim() else tensor
