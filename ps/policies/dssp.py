"""dssp: ssp with an adaptive bound. The fastest worker passes it where it would otherwise wait longer for the slowest.

Dynamic stale synchronous parallel (Zhao et al. 2019, arXiv:1908.11848). Up to a lead of `staleness` every worker
continues, as in ssp. Beyond that the fastest worker p may make r more contributions, 0 to `staleness_most - staleness`.
With the best r it waits least for the next contribution of the slowest worker s, if both keep their pace:

    r = argmin over r of min over k >= 0 of |(t_s + (k + 1) I_s) - (t_p + r I_p)|       of several the smallest

Here t is the time of a worker's newest contribution, and I the time between its newest two. No worker continues with a
lead over `staleness_most`, so staleness is bounded as in ssp with that bound. A worker's times are dropped when it
leaves, and are not saved.
"""

from __future__ import annotations

from math import floor

from pydantic import Field, model_validator

from .base import Closed, Common, Contribution, Decision, Member
from .ssp import SspOptions, SspPolicy


class DsspOptions(SspOptions):
    staleness_most: int = Field(15, ge=0, description="dssp: largest lead of the fastest worker, where it saves time")

    @model_validator(mode="after")
    def _ordered(self) -> DsspOptions:
        if self.staleness_most < self.staleness:
            raise ValueError(f"policy.staleness_most is {self.staleness_most}, less than staleness, {self.staleness}")
        return self


class DsspPolicy(SspPolicy):
    Options = DsspOptions
    options: DsspOptions
    changeable = ()

    def __init__(self, common: Common, options: DsspOptions) -> None:
        super().__init__(common, options)
        self._times: dict[int, tuple[float, float | None]] = {}  # by rank: of its newest contribution; the one before
        self._extra: dict[int, int] = {}  # contributions that a rank may begin beyond `staleness`
        self._begins: set[int] = set()  # ranks that do

    @classmethod
    def summary(cls, options: DsspOptions) -> str:  # type: ignore[override]
        bound = f"staleness {options.staleness} to {options.staleness_most}"
        return ", ".join(filter(None, (bound, options.late_rule)))

    @property
    def staleness_bound(self) -> int:
        return self.options.staleness_most

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        rank, number = member.rank, self.seq(member.rank)
        decisions = super()._take(member, contribution, now)
        if self.seq(rank) > number:
            before = self._times.get(rank)
            self._times[rank] = now, before[0] if before is not None else None
            # May the worker go on beyond a lead of `staleness`?
            self._begins.discard(rank)
            if self._ahead(rank) <= self.options.staleness:
                self._extra.pop(rank, None)
                return decisions
            if not self._extra.get(rank) and self._standing.most == self.steps_done(rank):
                self._extra[rank] = self._most_useful(rank)
            if self._extra.get(rank):
                self._extra[rank] -= 1
                self._begins.add(rank)
        return decisions

    def _left(self, rank: int) -> list[Decision]:
        self._times.pop(rank, None)
        self._extra.pop(rank, None)
        self._begins.discard(rank)
        return super()._left(rank)

    def _most_useful(self, rank: int) -> int:
        """Returns the extra contributions after which this worker would wait least; 0 while times are unknown."""
        slowest = next(iter(self._standing.slowest_ranks))
        (mine, mine_before), (other, other_before) = self._times[rank], self._times.get(slowest, (0.0, None))
        if mine_before is None or other_before is None:
            return 0
        most = self.options.staleness_most - self.options.staleness
        return most_useful(mine, mine - mine_before, other, other - other_before, most)

    def _gate(self, member: Member, now: float) -> Closed | None:
        if member.rank in self._begins and self._ahead(member.rank) <= self.options.staleness_most:
            return None
        return super()._gate(member, now)


def most_useful(mine: float, my_interval: float, other: float, interval: float, most: int) -> int:
    """Returns r, 0 to `most`, for which mine + r my_interval is nearest to some other + (k + 1) interval, k >= 0."""

    def wait_s(extra: int) -> float:
        at = mine + extra * my_interval - other
        before = max(1, floor(at / interval)) if interval > 0 else 1
        return min(abs(before * interval - at), abs((before + 1) * interval - at))

    return min(range(most + 1), key=wait_s)


ENTRY = DsspPolicy
