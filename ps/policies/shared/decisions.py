"""The decisions of a policy."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ....common.wire.records import Outcome


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: the server runs it along the workers' deltas, and workers keep their own."""

    name: str  # in torch.optim
    arguments: Mapping[str, float | bool]
    reason: str  # for these numbers, as a phrase


@dataclass(slots=True)
class Fold:
    """Add the contribution of `rank` to the open mean, with this weight. If it waited, it counts now."""

    rank: int
    weight: float


@dataclass(slots=True)
class Discard:
    """Drop the staged contribution of `rank`: it does not count."""

    rank: int


@dataclass(slots=True)
class Wait:
    """Decide later, by Fold or Discard, whether the staged contribution of `rank` counts."""

    rank: int


@dataclass(slots=True)
class Commit:
    """Make the mean of the folded contributions the next version. `ranks` names a rank once for each contribution.

    `scales` has one number per contribution, in the order of `ranks`; () means 1 for all. The commit's learning rate
    is multiplied by their mean, weighted like the contributions. So a rule such as rate / staleness is exact where a
    commit has one contribution. Scales are for gradients only: a mean of weights has no rate.
    """

    ranks: tuple[int, ...]
    reason: str
    scales: tuple[float, ...] = ()
    momentum_among: int = 1  # workers that reduce the optimizer's momentum (`momentum_left`)
    numbers: Mapping[str, float] | None = None  # of the outer optimizer (`Outer`), for this step alone

    def lr_scale(self, folded: Iterable[tuple[int, float]]) -> float:
        """Returns the factor of the learning rate. `folded` has (rank, weight) of each contribution, a rank's in their
        order; weight 0 for one of which nothing was folded."""
        if not self.scales:
            return 1.0
        if len(self.scales) == 1:  # as nearly always
            return self.scales[0] if any(weight for _, weight in folded) else 1.0
        weights: dict[int, deque[float]] = defaultdict(deque)
        for rank, weight in folded:
            weights[rank].append(weight)
        weighted = [(weights[rank].popleft(), scale) for rank, scale in zip(self.ranks, self.scales, strict=True)]
        total = sum(weight for weight, _ in weighted)
        return sum(weight * scale for weight, scale in weighted) / total if total else 1.0


@dataclass(slots=True)
class Reply:
    """Let `rank` continue with the newest weights."""

    rank: int
    outcome: Outcome


@dataclass(slots=True)
class Refuse:
    """End this worker's call: `kind` is a Reason of the proto."""

    rank: int
    kind: Literal["NOT_JOINED", "SEQ_GAP", "BAD_REQUEST", "OPTIMIZER_UNSUPPORTED"]
    reason: str


Decision = Fold | Discard | Wait | Commit | Reply | Refuse
