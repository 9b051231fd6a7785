"""What a run wants done: the outside carries it out, in order, and tells the run nothing but events.

Effects name workers by rank and incarnation and contributions by `facts.Identity`; whose stream or memory that is, the
outside knows. Nobody changes one (see `events.py` on why they are not frozen).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...common.errors import ParamServerError
from .facts import Fact, Identity


@dataclass(slots=True)
class Seated:
    """To the stream that asked to join: who the process is now."""

    stream: int
    rank: int
    incarnation: int
    is_resumed: bool
    number: int  # contributions of the rank that count


@dataclass(slots=True)
class NotSeated:
    """To the stream that asked to join: why not."""

    stream: int
    error: ParamServerError


@dataclass(slots=True)
class Adopt:
    """What this worker offered is the run's model and optimizer."""

    rank: int
    incarnation: int


@dataclass(slots=True)
class ForgetModel:
    """Who offered the model is gone before it brought weights: another one may come."""


@dataclass(slots=True)
class AskForWeights:
    """This worker is to bring the initial weights."""

    rank: int
    incarnation: int


@dataclass(slots=True)
class Begin:
    """The weights that this worker brought are version 0."""

    rank: int
    incarnation: int


@dataclass(slots=True)
class Keep:
    """This contribution counts: its body stays until it is folded, whatever becomes of its worker."""

    identity: Identity


@dataclass(slots=True)
class Fold:
    """Add a contribution to the mean being formed, multiplied by `scale`."""

    identity: Identity
    weight: float
    scale: float = 1.0


@dataclass(slots=True)
class Discard:
    """Nothing of this contribution is folded. `is_counted`: it counts all the same, as an empty one."""

    identity: Identity
    is_counted: bool = False


@dataclass(slots=True)
class Withdraw:
    """What came from this incarnation of a rank, or an older one, and has not happened yet, never will."""

    rank: int
    incarnation: int
    ends_streams: bool = True


@dataclass(slots=True)
class Commit:
    """Make the mean of what was folded the next version."""

    version: int
    contributions: tuple[Identity, ...]  # that were folded
    hyperparameters: tuple[dict[str, Any], ...] | None  # of each group; None: as they are
    lr_scale: float
    num_live: int
    lowest_live: int
    reason: str


@dataclass(slots=True)
class Answer:
    """Let a worker go on, with the weights of `version`."""

    rank: int
    incarnation: int
    outcome: str  # START, APPLIED, REPEATED, DROPPED, REJECTED
    reason: str
    number: int  # contributions of the rank that count
    version: int
    has_weights: bool
    next_local_steps: int
    training_steps: int  # of the rank that count
    staleness: int = 0
    held_s: float = 0.0
    num_workers: int = 1  # how the data is divided
    worker_index: int = 0


@dataclass(slots=True)
class Refuse:
    """End this worker's call."""

    rank: int
    incarnation: int
    error: ParamServerError


@dataclass(slots=True)
class TellDone:
    """The run is over for these workers: they are told, with the final weights; `evaluator` is to measure them."""

    workers: tuple[tuple[int, int], ...]  # rank, incarnation
    evaluator: int | None
    version: int


@dataclass(slots=True)
class TakeSnapshot:
    """Of what has been decided up to here; its end is the event `Stored` with this `attempt`."""

    attempt: int
    version: int
    saved: dict[str, Any] = field(repr=False)  # `Run.saved`


@dataclass(slots=True)
class Prune:
    """Snapshots older than this version may go: it is on all shards."""

    version: int


@dataclass(slots=True)
class End:
    """The run is over; with an error unless it is None."""

    error: ParamServerError | None = None


@dataclass(slots=True)
class Tell:
    """Observers are told; see `facts.py`."""

    fact: Fact


@dataclass(slots=True)
class Log:
    """A line of the log."""

    level: str  # debug, info, warning, error
    event: str
    fields: dict[str, Any]


Effect = (
    Seated
    | NotSeated
    | Adopt
    | ForgetModel
    | AskForWeights
    | Begin
    | Keep
    | Fold
    | Discard
    | Withdraw
    | Commit
    | Answer
    | Refuse
    | TellDone
    | TakeSnapshot
    | Prune
    | End
    | Tell
    | Log
)
