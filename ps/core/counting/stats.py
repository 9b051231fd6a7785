"""Counts for each rank, over all its incarnations."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from ....common.wire.records import ResidualInfo

# The live view's rates cover this many contributions.
_RECENT = 20
_MOST_BINS = 64  # of the staleness; the last one holds what is beyond
# Of this process alone.
_NOT_SAVED = {"rank", "recent", "recent_samples", "loss", "exchange_before"}


def bin_of(staleness: int) -> int:
    return min(_MOST_BINS, max(0, staleness))


def restored_bins(saved: Any) -> Counter[int]:
    """Returns the bins of a snapshot; malformed ones count from zero."""
    items = saved.items() if isinstance(saved, dict) else ()
    return Counter({bin_of(int(behind)): count for behind, count in items if behind.isdecimal() and type(count) is int})


@dataclass(slots=True)
class WorkerStats:
    """Sums of one rank; times in seconds."""

    rank: int
    contributions: int = 0  # that count
    training_steps: int = 0  # in those
    samples: int = 0  # of contributions with a reported number
    unsaid: int = 0  # contributions without a reported number of samples
    staleness_sum: int = 0
    staleness_max: int = 0
    lead_max: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    num_joins: int = 0  # of processes that are new to the run
    dropped: int = 0
    rejected: int = 0
    rejected_in_a_row: int = 0
    skipped: int = 0
    clipped: int = 0
    residual: float = 0.0
    residuals_lost: int = 0
    residual_lost: float = 0.0
    residuals_told: int = 0  # of these, the number reported by the rank's present process
    residual_told: float = 0.0
    loss: float = math.nan
    exchange_before: tuple[int, float] = (0, 0.0)  # incarnation, its seconds in exchanges up to its last contribution
    recent_samples: int = 0  # of `recent`
    # (time, samples, staleness, training steps)
    recent: deque[tuple[float, int, int, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def accepted(self, staleness: int, num_samples: int, lead: int, now: float, num_steps: int = 1) -> None:
        self.contributions += 1
        self.training_steps += num_steps
        self.samples += num_samples
        self.unsaid += not num_samples
        self.staleness_sum += staleness
        if staleness > self.staleness_max:
            self.staleness_max = staleness
        if lead > self.lead_max:
            self.lead_max = lead
        self.rejected_in_a_row = 0
        if len(self.recent) == _RECENT:
            self.recent_samples -= self.recent[0][1]
        self.recent.append((now, num_samples, staleness, num_steps))
        self.recent_samples += num_samples

    def newest_dropped(self) -> None:
        """The newest contribution that counted was dropped later: the run above did not take it."""
        _, num_samples, staleness, num_steps = self.recent.pop()
        self.recent_samples -= num_samples
        self.contributions -= 1
        self.training_steps -= num_steps
        self.samples -= num_samples
        self.unsaid -= not num_samples
        self.staleness_sum -= staleness
        self.dropped += 1

    def joined_anew(self) -> None:
        """Another process has the rank: the residual of the earlier process is lost."""
        self.num_joins += 1
        self.residuals_lost += self.residual > 0
        self.residual_lost += self.residual
        self.residual, self.residuals_told, self.residual_told = 0.0, 0, 0.0

    def note_residual(self, residual_info: ResidualInfo) -> None:
        """Take the residual's norm from the worker, and add the losses since its last report."""
        norm, lost = residual_info.norm, residual_info.lost_norm if 0 < residual_info.lost_norm < math.inf else 0.0
        self.residuals_lost += max(0, residual_info.num_lost - self.residuals_told)
        self.residual_lost += max(0.0, lost - self.residual_told)
        self.residual, self.residuals_told = norm if 0 < norm < math.inf else 0.0, residual_info.num_lost
        self.residual_told = lost

    def exchange_s(self, incarnation: int) -> float:
        """Returns the seconds of the exchange before this contribution; -1 for a process's first."""
        total_s = self.transfer_s + self.wait_s
        before, before_s = self.exchange_before
        self.exchange_before = incarnation, total_s
        return total_s - before_s if before == incarnation else -1.0

    def saved(self, unsaved: Iterable[tuple[int, int, int]]) -> dict[str, int | float]:
        """What a snapshot keeps. `unsaved` has samples, staleness and training steps of each contribution that counts
        and that no version has yet."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_SAVED}
        for samples, staleness, steps in unsaved:
            values["contributions"] -= 1
            values["samples"] -= samples
            values["unsaid"] -= not samples
            values["staleness_sum"] -= staleness
            values["training_steps"] -= steps
        return values

    @classmethod
    def restored(cls, rank: int, values: dict[str, Any]) -> WorkerStats:
        """Returns the stats of a snapshot; absent and malformed values count from zero."""
        known = {name: value for name, value in values.items() if type(value) in (int, float)}
        names = {field.name for field in fields(cls)} - _NOT_SAVED
        return cls(rank, **{name: known[name] for name in names & known.keys()})

    @property
    def known_samples(self) -> int | None:
        """Samples; None where a contribution came without a number."""
        return None if self.unsaid else self.samples

    @property
    def samples_per_s(self) -> float | None:
        """Recent samples per second; None where workers report none."""
        if self.unsaid:
            return None
        if len(self.recent) < 2:
            return 0.0
        elapsed_s = self.recent[-1][0] - self.recent[0][0]
        return (self.recent_samples - self.recent[0][1]) / elapsed_s if elapsed_s > 0 else 0.0
