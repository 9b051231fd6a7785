"""Effects: the actions that follow from an event. The engine carries them out in order.

Effects name workers by rank and incarnation, and contributions by `ContributionId`. The engine knows their streams and
memory. An effect that is a `Fact` also goes to observers. `events.py` says why effects are not frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...common.errors import ParamServerError
from ...common.reporting.curve import Point
from ...common.reporting.summary import Status
from ...common.wire.records import Contribution, ContributionId, Outcome, Reply, Row
from .events import Controlled


@dataclass(slots=True)
class Effect:
    """One action for the engine to carry out."""


@dataclass(slots=True)
class Fact(Effect):
    """An effect that goes out on the bus (`ps/observe/bus.py`) once carried out. History, Prometheus, the log,
    the live view and the summary are sinks of the bus."""


@dataclass(slots=True)
class OfAWorker(Effect):
    """Concerns the process that holds `rank` as this `incarnation`."""

    rank: int
    incarnation: int


# ---- workers come and go ----------------------------------------------------------------------------


@dataclass(slots=True)
class Seated(Fact):
    """Tells the stream that asked to join its rank and incarnation."""

    stream: int
    rank: int
    incarnation: int
    is_resumed: bool
    number: int  # contributions of the rank that count


@dataclass(slots=True)
class NotSeated(Effect):
    """Refuses the stream that asked to join."""

    stream: int
    error: ParamServerError


@dataclass(slots=True)
class Adopt(OfAWorker):
    """The run takes this worker's model and optimizer; a resumed run takes its optimizer."""


@dataclass(slots=True)
class ForgetModel(Effect):
    """The worker that offered the model left before it uploaded weights: another model may come."""


@dataclass(slots=True)
class AskForWeights(OfAWorker):
    """Asks this worker for the initial weights, or for the final ones that only workers have."""


@dataclass(slots=True)
class Begin(OfAWorker):
    """The weights that this worker uploaded are version 0, or the newest version."""


@dataclass(slots=True)
class Refuse(OfAWorker):
    """End this worker's call."""

    error: ParamServerError


@dataclass(slots=True)
class Fence(OfAWorker):
    """Drops what this incarnation of a rank, or an older one, has sent and no event has taken yet."""

    ends_streams: bool = True


@dataclass(slots=True)
class WorkerMoved(Fact, OfAWorker):
    how: str  # enter: it has offered its model, and is a member; away: its connection is lost; back: it goes on
    number: int  # contributions of the rank that count


@dataclass(slots=True)
class WorkerLeft(Fact, OfAWorker):
    how: str  # goodbye, failed, closed, lease, replaced; finished: still connected, but no longer waited for
    reason: str
    has_finished: bool = False  # it has sent Finish, and so has had every reply


# ---- contributions ----------------------------------------------------------------------------------


@dataclass(slots=True)
class ContributionTaken(Fact):
    """A contribution arrived whole on all shards. Unless it `is_kept`, its payload is dropped."""

    contribution: Contribution
    version: int  # the newest at its arrival
    outcome: str  # accepted, dropped, repeated, rejected, skipped, refused
    exchange_s: float  # seconds of the worker's exchange before this one; negative: unknown
    traffic: tuple[int, int] = (0, 0)  # bytes that its worker has sent and received so far; zeros: not counted

    @property
    def is_kept(self) -> bool:
        """Whether its payload stays until it is folded, also when its worker leaves."""
        return self.outcome == "accepted" and self.contribution.kind.has_payload


@dataclass(slots=True)
class Fold(Effect):
    """Add a contribution to the mean being formed, multiplied by `scale`."""

    id: ContributionId
    weight: float
    scale: float = 1.0


@dataclass(slots=True)
class Commit(Fact):
    """Makes the mean of the folded contributions the next version."""

    version: int
    contributions: tuple[ContributionId, ...]  # the folded ones
    members: tuple[int, ...]  # live ranks, ascending
    hyperparameters: tuple[dict[str, Any], ...] | None = None  # of each group; None: as they are
    lr_scale: float = 1.0
    reason: str = ""
    momentum_among: int = 1  # workers whose lateness stands for some of the optimizer's momentum
    clip_norm: float = 0.0  # 2-norm that is stepped along at most, as its workers say; 0: any
    num_samples: int = 0  # of the folded contributions
    num_active: int = 0  # of the members, those that have steps to take
    iteration: int = 0  # steps of the process whose hyperparameters these are; 0: unknown


@dataclass(slots=True)
class Clip(Effect):
    """Lets a clipped step go on: the mean for this version has this 2-norm over all shards."""

    version: int
    norm: float


@dataclass(slots=True)
class SendReply(Fact, OfAWorker):
    """Lets a worker continue."""

    reply: Reply  # without what the wire adds: how the weights travel, the script's position, the group's secret
    has_weights: bool
    is_exact: bool = False  # the weights are measured: they must be of this version, as they are
    reference_version: int | None = None  # of the weights, where a reply codec sends those of an older version

    @property
    def is_start(self) -> bool:
        return self.reply.result.outcome is Outcome.START


@dataclass(slots=True)
class KeepWeights(Effect):
    """Keeps this shard's part of the newest version, which is about to be measured, or fetched by a reader."""

    version: int
    reader: str = ""


@dataclass(slots=True)
class MetricsTaken(Fact):
    """Metrics of the weights of a version are here."""

    point: Point
    is_best: bool  # so far


@dataclass(slots=True)
class ControlTaken(Fact):
    """A control of the run (`controls.py`) was taken or refused; `result` is its outcome, or the reason."""

    event: Controlled
    result: str
    is_done: bool


# ---- snapshots, and the end -------------------------------------------------------------------------


@dataclass(slots=True)
class TakeSnapshot(Effect):
    """Starts a snapshot of the current state. The event `Stored` with this `attempt` ends it."""

    attempt: int
    version: int
    saved: dict[str, Any] = field(repr=False)  # `Run.saved`


@dataclass(slots=True)
class Prune(Effect):
    """Deletes snapshots older than this version, which is on all shards."""

    version: int


@dataclass(slots=True)
class TellDone(Effect):
    """Sends the final weights to these workers; `asked` is to send metrics of them."""

    workers: tuple[tuple[int, int], ...]  # rank, incarnation
    asked: int | None
    version: int


@dataclass(slots=True)
class GoBack(Effect):
    """Ends the run here. A new server in this process goes on from the newest snapshot."""


@dataclass(slots=True)
class End(Effect):
    """Ends the run, with an error unless it is None."""

    error: ParamServerError | None = None


@dataclass(slots=True)
class Log(Effect):
    """A line of the log."""

    level: str  # debug, routine, info, warning, error
    event: str
    fields: dict[str, Any]


# ---- made by the engine and the server -----------------------------------------------------------------


@dataclass(slots=True)
class RunStarted(Fact):
    """This server process begins the run, or continues it from `source`."""

    run: str
    server_incarnation: int
    mode: str
    version: int
    rows: dict[int, Row]  # of that version, by rank
    num_workers: int | None
    staleness_bound: int | None
    source: str | None
    skipped: tuple[str, ...]  # snapshots that were newer and damaged
    options: dict[str, Any]  # of the mode, as JSON: its rules may depend on them
    common: dict[str, Any] = field(default_factory=dict)  # the settings of every mode (`policies.Common`)
    found: tuple[int, ...] = ()  # versions of the snapshots that it found, the newest first


@dataclass(slots=True)
class SnapshotTaken(Fact):
    version: int
    rows: dict[int, Row]  # of it, by rank
    path: str
    sha256: str  # of the weights


@dataclass(slots=True)
class StatusTaken(Fact):
    """A status for people, every few seconds."""

    status: Status


@dataclass(slots=True)
class RunEnded(Fact):
    version: int
    rows: dict[int, Row]  # of it, by rank
    has_begun: bool = True  # False: this server has ended before there was a RunStarted
    is_over: bool = False  # all workers have had the final weights; False: the server was stopped, or failed


FACTS: tuple[type[Fact], ...] = tuple(
    kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Fact) and kind is not Fact
)
