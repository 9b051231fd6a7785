"""What a policy is told of a contribution, and what it may decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Outcome(Enum):
    """What became of a contribution; names are those of Answer.Outcome in the proto."""

    START = "start"
    APPLIED = "applied"
    REPEATED = "repeated"
    DROPPED = "dropped"
    REJECTED = "rejected"

    @property
    def why_go(self) -> str:
        """The sentence that goes with such an answer."""
        return _WHY_GO[self]


_WHY_GO = {
    Outcome.START: "start from these weights",
    Outcome.APPLIED: "applied",
    Outcome.REPEATED: "repeated: nothing folded",
    Outcome.DROPPED: "came after its round had closed: nothing folded",
    Outcome.REJECTED: "rejected: nothing folded",
}


@dataclass(frozen=True)
class Contribution:
    """The facts of one staged contribution."""

    number: int  # of the rank's, from 1; `step` in the proto
    base_version: int
    num_samples: int = 1


@dataclass(frozen=True)
class Fold:
    """Add the staged contribution of `rank` to the mean being formed, with this weight."""

    rank: int
    weight: float


@dataclass(frozen=True)
class Discard:
    """Forget the staged contribution of `rank`."""

    rank: int


@dataclass(frozen=True)
class Commit:
    """Make the mean of what was folded, from `ranks`, the next version.

    `scales`: one per contribution in the order of `ranks`; () means 1 for all. The commit's learning rate is
    multiplied by their mean, weighted like the contributions. So a rule such as rate / staleness is exact
    where a commit has one contribution. Only for gradients: a mean of weights has no rate.
    """

    ranks: tuple[int, ...]
    reason: str
    scales: tuple[float, ...] = ()

    def lr_scale(self, weights: Mapping[int, float]) -> float:
        """What the learning rate is multiplied by. `weights` by rank; of nothing folded there is none."""
        total = sum(weights.get(rank, 0.0) for rank in self.ranks)
        if not self.scales or not total:
            return 1.0
        scaled = zip(self.ranks, self.scales, strict=True)
        return sum(weights.get(rank, 0.0) * scale for rank, scale in scaled) / total


@dataclass(frozen=True)
class Answer:
    """Let `rank` go on, with the newest weights."""

    rank: int
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Refuse:
    """End this worker's call: `kind` is NOT_JOINED or STEP_GAP."""

    rank: int
    kind: Literal["NOT_JOINED", "STEP_GAP"]
    reason: str


Decision = Fold | Discard | Commit | Answer | Refuse
