"""Who waits, against what waiting means: looked for among all workers after every event, as a policy must not."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Reply

from ..records import contribution_of


@dataclass
class Naive:
    """Of the modes that make somebody wait, without options that close rounds early."""

    mode: str
    bound: int
    num_workers: int
    numbers: dict[int, int] = field(default_factory=dict)  # training steps by rank, kept when it leaves
    live: dict[int, bool] = field(default_factory=dict)  # by rank: a reply is due
    in_round: set[int] = field(default_factory=set)  # ranks, of those that have left too
    vacant: set[int] = field(default_factory=set)  # that have left the round without a contribution
    late: set[int] = field(default_factory=set)  # live ones that are in the next round only
    has_started: bool = False

    def join(self, rank: int) -> None:
        newest = max(self.numbers.values(), default=0)
        self.numbers.setdefault(rank, min((self.numbers[other] for other in self.live), default=newest))
        if self.mode in ("sync", "localsgd") and rank not in self.in_round | self.vacant:
            order = sorted((self.live.keys() - self.late) | self.vacant | self.in_round)
            folded = list(takewhile(self.in_round.__contains__, order))
            self.late |= {rank} if folded and folded[-1] > rank else set()
        self.vacant.discard(rank)
        self.live[rank] = True

    def leave(self, rank: int) -> None:
        del self.live[rank]
        self.vacant |= {rank} - self.in_round - self.late
        self.late.discard(rank)

    def contribute(self, rank: int) -> None:
        self.numbers[rank] += 1
        self.in_round.add(rank)
        self.live[rank] = True

    def replied(self) -> set[int]:
        """Who gets its reply after the event: everybody is looked at."""
        self.has_started = self.has_started or len(self.live) >= self.num_workers
        if not self.has_started or not self.live:
            return set()
        if self.in_round and self.live.keys() <= self.in_round | self.late:
            self.in_round, self.vacant, self.late = set(), set(), set()
        found = {rank for rank, is_due in self.live.items() if is_due and not self._must_wait(rank)}
        self.live |= dict.fromkeys(found, False)
        return found

    def _must_wait(self, rank: int) -> bool:
        if self.mode == "ssp":
            return self.numbers[rank] - min(self.numbers[other] for other in self.live) > self.bound
        return self.mode != "async" and rank in self.in_round | self.late


@pytest.mark.parametrize("mode", ["async", "localsgd", "ssp", "sync"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_those_wait_who_must(mode: str, data: st.DataObject) -> None:
    num_workers, bound = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    policy = policy_of(mode, {"num_workers": num_workers, "staleness": bound})
    naive, based_on = Naive(mode, bound, num_workers), dict[int, int]()
    for _ in range(data.draw(st.integers(5, 60))):
        computing = [rank for rank, is_due in naive.live.items() if not is_due]
        actions = [("contribute", rank) for rank in sorted(computing)] * 4
        actions += [("leave", rank) for rank in sorted(naive.live)]
        actions += [("join", rank) for rank in range(6) if rank not in naive.live]
        action, rank = data.draw(st.sampled_from(actions))
        if action == "join":
            decisions = policy.joined(rank, 0.0)
            naive.join(rank)
        elif action == "leave":
            decisions = policy.left(rank, 0.0)
            naive.leave(rank)
        else:
            contribution = contribution_of(policy.seq(rank) + 1, based_on[rank])
            decisions = policy.contributed(rank, contribution, 0.0)
            naive.contribute(rank)
        found = [decision.rank for decision in decisions if isinstance(decision, Reply)]
        assert found == sorted(naive.replied())
        based_on |= dict.fromkeys(found, policy.version)
        waiting = {rank for rank, is_due in naive.live.items() if is_due}
        assert policy.waiting(0.0).keys() == waiting
        assert policy.waiting(0.0, range(3)).keys() == waiting & {0, 1, 2}
