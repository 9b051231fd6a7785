"""The decisions of a policy."""

from __future__ import annotations

from collections.abc import Mapping
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

    `lr_scale` multiplies the learning rate. It is for gradients only: a mean of weights has no rate.
    """

    ranks: tuple[int, ...]
    reason: str
    lr_scale: float = 1.0
    momentum_among: int = 1  # workers that reduce the optimizer's momentum (`momentum_left`)
    numbers: Mapping[str, float] | None = None  # of the outer optimizer (`Outer`), for this step alone


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
