"""ZeRO's stage 1 among all-reduce peers (`worker.zero: 1`): each keeps what the optimizer remembers of a part of the
model.

    backward | average over the group | report -> reply | step the own share | shares to all | next batch

Rajbhandari et al. 2020 (arXiv:1910.02054). The model is cut into as many shares as there are members, as among the
shards of a server (`common/tensors/sharding.py`): equal bytes, cut between rows, so it is for optimizers that treat
each element by itself. All average the whole gradient; member i steps share i, and gives what came of it to all.

The group changes without a restart, so a share is also held and stepped by the next member (`worker.zero_copies` 2): it
has the same mean, so that costs no bytes on the way, and any one may die in any moment without a loss. With 1 copy each
holds 1 / N, and a death costs the run what is since its newest snapshot. When a group meets, everybody says what it
has, and those who hold something give it to all, one after another; each keeps its rows of the new division. So what is
cut anew is in memory once more meanwhile. While weights are brought to the server the lowest has all of it: snapshots
have the whole, in the form of every other mode.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ....common.errors import ParamServerError, UnreachableError, UsageError
from ....common.kinds import ContributionKind
from ....common.reporting.log import get_logger
from ....common.tensors.layout import Kind, Layout
from ....common.tensors.optimizers import is_elementwise, plain_step
from ....common.tensors.sharding import Part, Share, divide
from ....common.wire.records import COUNTED, Outcome, Reply
from ...conversation.exchange import Exchange
from ...conversation.messages import Final, Outgoing
from ..all_reduce import AllReduceStrategy, nobody_has, remembers
from ..group import Group
from .rendezvous import Broken

log = get_logger()

Rows = tuple[str, int, int]  # [first, end) of a tensor, by its name
State = dict[Rows, dict[str, Any]]  # what the optimizer remembers of each

_UPLOADS, _UPLOADS_OPTIMIZER = 1, 2  # what the lowest says of a round, among its metadata


class Zero(AllReduceStrategy):
    """What the optimizer remembers lies in `_state`, not in the script's own optimizer, whose numbers it steps with."""

    def __init__(self, exchange: Exchange, may_leave_early: bool) -> None:
        super().__init__(exchange, may_leave_early)
        self._copies = exchange.zero_copies
        self._manner = exchange.zero, exchange.zero_copies
        self._state: State = {}
        self._shares: list[list[Rows]] = []  # of the newest division, by member: of what the optimizer steps
        self._is_whole = True  # all shares are of the newest version; else only what is stepped here

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        kind = type(optimizer)
        if not is_elementwise(kind):  # type: ignore[arg-type]  # mypy takes no class for hashable
            raise UsageError(
                f"worker.zero is 1, and {kind.__name__} does not treat each element by itself: what it remembers of a "
                "tensor cannot be divided",
                fix="--set worker.zero=0, or an elementwise optimizer such as AdamW",
            )
        self._step_share: Callable[[torch.optim.Optimizer], Any] = plain_step(kind)
        self._optimizer = copy.copy(optimizer)  # of the same groups, over views of rows
        self._groups = {
            self._model.names[id(param)]: at for at, of in enumerate(optimizer.param_groups) for param in of["params"]
        }
        self._indices = {entry.spec.name: index for index, entry in enumerate(self._model.layout.entries)}
        begun = {self._model.names[id(item)]: dict(state) for item, state in optimizer.state.items()}
        self._begun: State = {self._whole_of(name): begun.get(name, {}) for name in self._groups}
        optimizer.state.clear()
        self._state = copy.deepcopy(self._begun)
        super().ready(optimizer, step)

    def _whole_of(self, name: str) -> Rows:
        shape = self._model.layout.entries[self._indices[name]].spec.shape
        return name, 0, shape[0] if shape else 1

    def _view(self, rows: Rows) -> torch.Tensor:
        return _cut(self._model.tensors[self._indices[rows[0]]].detach(), rows)

    def _remember(self) -> None:
        own, version = self.own[0], self._said.version
        self._has_state, self._is_whole = True, True
        found = self._exchange.pull_optimizer() if version else {}
        self._state = {
            rows: {key: value.to(self._place(rows, value)) for key, value in found[rows[0]].items()}
            if rows[0] in found
            else copy.deepcopy(begun)
            for rows, begun in self._begun.items()
        }
        if version and not found and remembers(own) and not self._said.is_done:
            log.warning("optimizer_state_anew", meaning="the server has none of this version: moments begin anew")

    def _own_state(self) -> Any:
        return {str(rows): state for rows, state in self._begun.items() if state}

    def _place(self, rows: Rows, value: torch.Tensor) -> torch.device:
        """Counters stay on the host."""
        return self._model.tensors[self._indices[rows[0]]].device if value.dim() else value.device

    # ---- a group meets ------------------------------------------------------------------------

    def _level(self, group: Group) -> None:
        """All have the weights of the newest version, and each what the optimizer remembers of its share."""
        newest = self._said.version
        held = self._here(lambda: group.told(self._held_version))
        if max(held) != newest:
            raise nobody_has(newest)
        is_new = self._held_version == newest
        shares = [[_rows(part) for part in share.parts if part.spec.name in self._groups] for share in self._cut(held)]
        wanted = _Wanted(self._held_by(shares, group.index))
        if is_new:
            wanted.fill(self._state)
        told = self._here(lambda: group.told(2 * (wanted.is_filled and is_new) + (is_new and self._is_whole)))
        if any(text < 2 + 1 for text in told):
            self._exchange_parts(group, [text == newest for text in held], [bool(text % 2) for text in told], wanted)
        if not all(self._here(lambda: group.told(int(wanted.is_filled)))):
            raise UnreachableError(
                "a part of what the optimizer remembers is gone with those that held it (worker.zero is 1, "
                f"worker.zero_copies {self._copies})",
                fix="keep snapshots (--checkpoint-dir), which a run goes on from; with worker.zero_copies 2 any one "
                "worker may go",
            )
        self._state, self._shares = wanted.state, shares
        self._held_version, self._has_state, self._is_whole = newest, True, True

    def _cut(self, members: Sequence[int]) -> list[Share]:
        """As many shares as members, or as rows allow."""
        return _divided(self._model.layout, len(members))

    def _held_by(self, shares: list[list[Rows]], index: int) -> list[Rows]:
        if index >= len(shares):
            return []
        numbers = {(index - back) % len(shares) for back in range(self._copies)}
        return [rows for number in sorted(numbers) for rows in shares[number]]

    def _exchange_parts(self, group: Group, have: list[bool], are_whole: list[bool], wanted: _Wanted) -> None:
        """Those of the newest version give what they have, one after another. `have`, `are_whole`: by member."""
        givers = [index for index, has in enumerate(have) if has]
        first = are_whole.index(True) if any(are_whole) else givers[0]
        mine = {} if not have[group.index] else self._packed(group.index == first, not any(are_whole))
        takes_all = not (have[group.index] and are_whole[group.index])
        fresh = _Wanted(self._whole_of(name) for name in self._groups)
        for giver in givers:
            found = self._here(lambda giver=giver: group.give(mine if giver == group.index else None, giver))  # type: ignore[misc]
            if takes_all and "tensors" in found:
                for place, theirs in zip(self._model.sources(ContributionKind.WEIGHTS), found["tensors"], strict=True):
                    assert place is not None
                    place.data.copy_(theirs)
            for *rows, theirs in found.get("fresh", ()):
                name, start, end = rows
                self._view((name, start, end)).copy_(theirs)
                fresh.fill({(name, start, end): {}})
            wanted.fill({(name, start, end): state for name, start, end, state in found["state"]})
            if not have[group.index]:
                log.info("taught", rank=self._said.rank, by=group.generation.members[giver], bytes=group.given_bytes)
        if not (any(are_whole) or fresh.is_filled):
            raise nobody_has(self._said.version)
        for rows, state in wanted.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to(self._place(rows, value))

    def _packed(self, is_first: bool, has_fresh: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"state": [[*rows, state] for rows, state in self._state.items()]}
        if is_first:
            found["tensors"] = [
                tensor.detach().cpu() for tensor in self._model.sources(ContributionKind.WEIGHTS) if tensor is not None
            ]
        if has_fresh:
            found["fresh"] = [[*rows, self._view(rows).cpu().clone()] for rows in self._state]
        return found

    # ---- a step -------------------------------------------------------------------------------

    def _until_taken(
        self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool = True
    ) -> Reply:
        reply = super()._until_taken(gradients, outgoing, is_right)
        while not (self._is_whole or self._said.is_done or reply.result.outcome == Outcome.START):
            reply = self._report_broken()  # a death has broken off what was on its way: the next group has it
            if reply.result.outcome != Outcome.START:
                self._may_meet()
        return reply

    def _metadata(self, outgoing: Outgoing) -> tuple[int, ...]:
        group = self._exchange.group
        uploads = group.uploads_weights or outgoing.contribution.training.evaluates
        return *super()._metadata(outgoing), uploads * (_UPLOADS + _UPLOADS_OPTIMIZER * group.uploads_optimizer)

    def _is_brought(self, group: Group, outgoing: Outgoing) -> bool:
        """By the lowest; all take part in it."""
        return bool(group.metadata[-1][0])

    def _apply(self, mean: Sequence[torch.Tensor | None], has_buffers: bool = True) -> None:
        for index, tensor in enumerate(mean):
            if has_buffers and tensor is not None and self._model.layout.entries[index].spec.kind is Kind.BUFFER:
                self._model.tensors[index].data.copy_(tensor)
        groups = self._optimizer.param_groups = [{**group, "params": []} for group in self.own[0].param_groups]
        stepped: list[tuple[torch.Tensor, Rows]] = []
        self._optimizer.state = defaultdict(dict)
        for rows, state in self._state.items():
            gradient = mean[self._indices[rows[0]]]
            if gradient is None:
                continue
            view = self._view(rows)
            view.grad = _cut(gradient, rows).to(view.device)
            groups[self._groups[rows[0]]]["params"].append(view)
            stepped.append((view, rows))
            if state:
                self._optimizer.state[view] = state
        self._step_share(self._optimizer)
        for view, rows in stepped:
            self._state[rows] = self._optimizer.state[view]
        self._optimizer.state = defaultdict(dict)

    def _step(self, mean: Sequence[torch.Tensor | None]) -> None:
        super()._step(mean)
        self._is_whole = False
        with suppress(Broken):
            self._spread()

    def _spread(self) -> None:
        """What has been stepped here, to all. Broken."""
        group = self._group
        assert group is not None
        self._here(lambda: group.spread([[self._view(rows) for rows in share] for share in self._shares]))
        self._is_whole = True

    def _bring(self, outgoing: Outgoing, mean: Sequence[torch.Tensor | None]) -> Reply:
        group = self._group
        assert group is not None
        undo = self._copy()
        try:
            super()._step(mean)
            self._spread()
            if group.metadata[-1][0] & _UPLOADS_OPTIMIZER:
                outgoing = outgoing._replace(optimizer=self._gathered(group))
        except Broken as broken:
            undo()
            log.warning("group_broken", rank=self._said.rank, reason=str(broken))
            return self._report_broken(outgoing)
        reply = self._say(ContributionKind.COMPLETION.received(has_payload=group.index == 0), outgoing)
        if reply.result.outcome == Outcome.REJECTED:
            raise self._diverged(None)
        if reply.result.outcome not in COUNTED and reply.result.outcome != Outcome.START:
            undo()
        return reply

    def _gathered(self, group: Group) -> dict[str, dict[str, torch.Tensor]] | None:
        """What the optimizer remembers of the whole model, on the lowest. Broken."""
        whole = _Wanted(self._whole_of(name) for name in self._groups) if group.index == 0 else None
        mine = {"state": [[*rows, state] for rows, state in self._state.items()]}
        for giver in range(len(group.generation.members)):
            found = self._here(lambda giver=giver: group.give(mine if giver == group.index else None, giver))  # type: ignore[misc]
            if whole is not None:
                whole.fill({(name, start, end): state for name, start, end, state in found["state"]})
        if whole is None:
            return None
        return {
            name: {key: torch.as_tensor(value) for key, value in state.items() if value is not None}
            for (name, _, end), state in whole.state.items()
            if end
        }

    def _copy(self) -> Callable[[], None]:
        tensors = [
            (tensor, tensor.detach().clone())
            for tensor in self._model.sources(ContributionKind.WEIGHTS)
            if tensor is not None
        ]
        state, version = copy.deepcopy(self._state), self._held_version

        def undo() -> None:
            for item, before in tensors:
                item.data.copy_(before)
            self._state, self._held_version, self._is_whole = state, version, True

        return undo

    def _finish(self, can_evaluate: bool) -> Final | None:
        told: dict[str, Any] = {"bytes": _num_bytes(self._state), "shares": len(self._shares)}
        if self._copies >= len(self._shares):
            told["meaning"] = f"nothing is divided: zero_copies {self._copies} of {len(self._shares)} shares are all"
        log.info("optimizer_state", rank=self._said.rank, **told)
        return super()._finish(can_evaluate)


class _Wanted:
    """Rows of tensors, and how much of what the optimizer remembers of them is there."""

    def __init__(self, rows: Iterable[Rows]) -> None:
        self.state: State = {row: {} for row in rows}
        self._are_there = {tensor: torch.zeros(tensor[2] - tensor[1], dtype=torch.bool) for tensor in self.state}

    @property
    def is_filled(self) -> bool:
        return all(bool(there.all()) for there in self._are_there.values())

    def fill(self, found: Mapping[Rows, Mapping[str, Any]]) -> None:
        """Copies."""
        by_name: dict[str, list[tuple[Rows, Mapping[str, Any]]]] = {}
        for rows, state in found.items():
            by_name.setdefault(rows[0], []).append((rows, state))
        for mine, place in self.state.items():
            for theirs, state in by_name.get(mine[0], ()):
                first, end = max(mine[1], theirs[1]), min(mine[2], theirs[2])
                if first < end:
                    self._are_there[mine][first - mine[1] : end - mine[1]] = True
                    _copy_rows(place, state, mine, (theirs[1], first, end))


def _copy_rows(place: dict[str, Any], state: Mapping[str, Any], rows: Rows, theirs: tuple[int, int, int]) -> None:
    """Rows [first, end) of what begins at `theirs[0]`, to where they lie in what begins at `mine[1]`."""
    begins, first, end = theirs
    for key, value in state.items():
        if not (isinstance(value, torch.Tensor) and value.dim()):
            place[key] = copy.deepcopy(value)
            continue
        if key not in place:
            place[key] = value.new_empty((rows[2] - rows[1], *value.shape[1:]))
        place[key][first - rows[1] : end - rows[1]].copy_(value[first - begins : end - begins])


def _divided(layout: Layout, num: int) -> list[Share]:
    while True:
        try:
            return divide(layout, num)
        except ParamServerError:  # it has not as many rows
            num -= 1


def _rows(part: Part) -> Rows:
    return part.spec.name, part.first, part.end


def _cut(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Shares its memory."""
    return tensor[rows[1] : rows[2]] if tensor.dim() else tensor


def _num_bytes(state: State) -> int:
    def of(values: Mapping[str, Any]) -> Iterator[int]:
        return (value.numel() * value.itemsize for value in values.values() if isinstance(value, torch.Tensor))

    return sum(sum(of(values)) for values in state.values())
