"""What workers announce about their data, the length of the run, their hyperparameters and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ....common.errors import ParamServerError, Reason, refusal, same_batches
from ....common.wire.records import RateInfo
from ...policies.base import Policy
from ..effects import Effect, Log

Groups = tuple[dict[str, Any], ...]
_ROUNDINGS = 1e-9  # relative


class Data:
    """What workers say of their data with their first contributions."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int], int] = {}  # rank, by the version it began with and digest
        self._began: dict[int, tuple[int, int]] = {}  # version and digest of each rank's newest first contribution
        self.twins: dict[int, int] = {}  # by rank, until it is notified: another with the same first result
        self.num_samples: int | None = None  # of the data set, also before a snapshot; None: no worker has said it
        self._is_said = False

    def record(self, rank: int, version: int, digest: int) -> Iterator[Effect]:
        """Record a digest of the result of a worker's first contribution; 0: unknown. Warns once of equal ones."""
        before, newest = self._began.get(rank), (version, digest)
        if before is not None and self._firsts.get(before) == rank:
            del self._firsts[before]
        self._began[rank] = newest
        # Another rank whose first result, from the same weights, is the same.
        if digest and (other := self._firsts.setdefault(newest, rank)) != rank:
            self.twins |= {rank: other, other: rank}
            if not self._is_said:
                self._is_said = True
                yield Log("warning", "same_batches", same_batches(other, rank))

    def differs(self, rank: int, num_samples: int) -> ParamServerError | None:
        """Returns the refusal of a rank whose data set has another length than the run's. 0 samples: unknown."""
        if not num_samples or self.num_samples in (None, num_samples):
            self.num_samples = num_samples or self.num_samples
            return None
        problem = f"the data set that rank {rank} gives to session.shard() has {num_samples:,} samples, and the run's "
        problem += f"has {self.num_samples:,}: the ranks' positions in it would not fit"
        fix = "give every worker the whole data set, the same as before a resume; or a DataLoader of its own instead "
        fix += "of session.shard(); worker.accept_other_data=true (PS_WORKER__ACCEPT_OTHER_DATA=1) goes on with it"
        return refusal(Reason.RUN_MISMATCH, problem, fix=fix)


class Length:
    """The training steps of a run whose configuration has none: the first worker to announce a number decides. They are
    kept in `policy.training_steps`. `by` is the rank that set it; None: no worker did."""

    def __init__(self, policy: Policy, epochs: int | None) -> None:
        self.policy, self._epochs = policy, epochs
        self._configured = [policy.training_steps, epochs]  # of the configuration
        self.by: int | None = None
        self.is_reconfigured = False  # the snapshot's run had another configured length
        self._others: set[int] = set()  # ranks that announced another length

    def announced(self, rank: int, steps: int) -> Iterator[Effect]:
        """A worker announces the length that follows from its data set or its task."""
        has, fields = self.policy.training_steps, {"rank": rank, "steps": steps}
        if has is None:
            self.policy.training_steps, self.by = steps, rank
            yield Log("info", "length", fields)
        elif self.by is not None and has != steps and rank not in self._others:
            self._others.add(rank)
            meaning = f"the run has {has} training steps (rank {self.by}), rank {rank} would take {steps}"
            fix = "give every worker the same data set and batch size, or set --steps"
            yield Log("warning", "lengths_differ", {**fields, "meaning": meaning, "fix": fix})

    def saved(self) -> dict[str, Any]:
        announced = None if self.by is None else [self.policy.training_steps, self._epochs]
        return {"configured": self._configured, "length": announced}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `saved` returned, after the policy. Workers announce an absent length again."""
        self.is_reconfigured = saved.get("configured", self._configured) != self._configured
        match saved.get("length"):
            case [int(steps), epochs] if self.policy.training_steps is None and epochs == self._epochs:
                self.policy.training_steps, self.by = steps, min(self.policy.rows, default=0)


def difference_of(rank: int, groups: Groups, other: int, known: Groups) -> ParamServerError | None:
    """Returns the refusal of a rank whose hyperparameters differ from those of another one at the same training step,
    where one step is made of the contributions of both; None where they agree."""
    if (difference := first_difference(known, groups)) is None:
        return None
    number, name = difference
    theirs, mine = (item[number].get(name) if number < len(item) else None for item in (known, groups))
    where = f" of parameter group {number}" if len(groups) > 1 else ""
    problem = f"rank {rank} has {name} {mine}{where} and rank {other} has {theirs}, at the same training step: "
    problem += "one step is made of the contributions of both"
    fix = "give all ranks the same hyperparameters and schedules (a schedule that follows a loss: the mean of all "
    fix += "ranks); or use a mode whose workers step by themselves, such as localsgd"
    return refusal(Reason.OPTIMIZER_MISMATCH, problem, fix=fix)


def first_difference(known: Groups, groups: Groups) -> tuple[int, str] | None:
    """Returns the number of the first group that differs, and the name of a value that does; None: none does.

    Up to roundings, which differ between machines: schedules compute with `math.cos`."""
    if known is groups or known == groups:
        return None
    for number in range(max(len(known), len(groups))):
        mine, theirs = (item[number] if number < len(item) else {} for item in (known, groups))
        for name in {**mine, **theirs}:
            if not _is_equal(mine.get(name), theirs.get(name)):
                return number, name
    return None


def _is_equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=_ROUNDINGS)
    return bool(mine == theirs)


class Rates:
    """The first and newest learning rates of all ranks' contributions.

    A new process of a rank receives both. It compares them with its own schedule, to find out whether the schedule
    continues or begins anew."""

    def __init__(self) -> None:
        self.of_rank: dict[int, RateInfo] = {}
        self.newest: dict[int, Groups] = {}  # by rank: the hyperparameters that its newest rates were taken from

    def counted(self, rank: int, hyperparameters: Groups, first: Sequence[float]) -> None:
        """Note the rates of a contribution that counts. `first` has the rates of its process's first step."""
        self.newest[rank] = hyperparameters
        last = tuple(rate_of(group) for group in hyperparameters)
        known = self.of_rank.get(rank) or RateInfo(tuple(first) or last, last, 0)
        self.of_rank[rank] = RateInfo(known.first, last, known.num_changes + (last != known.last))

    def saved(self) -> dict[str, list[Any]]:
        known = self.of_rank.items()
        return {str(rank): [list(item.first), list(item.last), item.num_changes] for rank, item in known}

    def restore(self, saved: Any) -> None:
        """Restore the rates of a snapshot; absent and malformed values are unknown."""
        for rank, groups in saved.items() if isinstance(saved, dict) else ():
            match groups:
                case [list(first), list(last), int(num_changes)] if rank.isdecimal() and _are_rates(first + last):
                    self.of_rank[int(rank)] = RateInfo(tuple(first), tuple(last), num_changes)


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a group of hyperparameters; 0 where it has none."""
    rate = group.get("lr", 0.0)
    return float(rate) if isinstance(rate, int | float) else 0.0


def _are_rates(found: list[Any]) -> bool:
    return all(type(item) in (int, float) and math.isfinite(item) for item in found)
