"""What a policy may decide."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ....common.wire.records import Outcome


@dataclass(frozen=True)
class Outer:
    """The optimizer that the server steps along what workers contribute, where their own stays with them."""

    name: str  # in torch.optim
    arguments: Mapping[str, float | bool]
    reason: str  # why these, as a phrase


class Merge(NamedTuple):
    """How local steps that go on during an exchange of deltas are put together with what comes of it."""

    rule: str = "shift"
    alpha: float = 0.0  # of the rule blend: the part that stays the worker's own
    after_steps: int = 0  # local steps after those that were measured; 0: all up to the next contribution


@dataclass(slots=True)
class Fold:
    """Add the contribution of `rank` that counts and is not folded yet to the mean being formed, with this weight."""

    rank: int
    weight: float


@dataclass(slots=True)
class Discard:
    """Forget the staged contribution of `rank`: it does not count."""

    rank: int


@dataclass(slots=True)
class Wait:
    """Whether the staged contribution of `rank` counts is decided later: by Accept or Discard."""

    rank: int


@dataclass(slots=True)
class Accept:
    """The contribution of `rank` that waited counts."""

    rank: int


@dataclass(slots=True)
class Commit:
    """Make the mean of what was folded, from `ranks`, the next version. A rank is named once for each contribution.

    `scales`: one per contribution in the order of `ranks`; () means 1 for all. The commit's learning rate is
    multiplied by their mean, weighted like the contributions. So a rule such as rate / staleness is exact
    where a commit has one contribution. Only for gradients: a mean of weights has no rate.
    """

    ranks: tuple[int, ...]
    reason: str
    scales: tuple[float, ...] = ()
    momentum_among: int = 1  # of the optimizer's momentum is left what `momentum_left` says of so many workers
    numbers: Mapping[str, float] | None = None  # of the server's own optimizer (`Outer`), for this step alone

    def lr_scale(self, folded: Iterable[tuple[int, float]]) -> float:
        """What the learning rate is multiplied by. `folded`: (rank, weight) of each contribution, a rank's in their
        order; 0 for one of which nothing was folded."""
        if not self.scales:
            return 1.0
        weights: dict[int, deque[float]] = defaultdict(deque)
        for rank, weight in folded:
            weights[rank].append(weight)
        weighted = [(weights[rank].popleft(), scale) for rank, scale in zip(self.ranks, self.scales, strict=True)]
        total = sum(weight for weight, _ in weighted)
        return sum(weight * scale for weight, scale in weighted) / total if total else 1.0


@dataclass(slots=True)
class Reply:
    """Let `rank` go on, with the newest weights."""

    rank: int
    outcome: Outcome


@dataclass(slots=True)
class Refuse:
    """End this worker's call: `kind` is a Reason of the proto."""

    rank: int
    kind: Literal["NOT_JOINED", "SEQ_GAP", "BAD_REQUEST"]
    reason: str


Decision = Fold | Discard | Wait | Accept | Commit | Reply | Refuse
