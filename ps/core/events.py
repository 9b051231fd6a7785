"""Everything that changes a run: typed events, each with its time. The same events give the same run.

An event that is `gathered` needs something from every shard: a worker's model, its initial weights, a contribution, a
snapshot. It happens once it has arrived on all shards. The coordinator alone decides on the other events.

Nobody changes an event after it has happened. Events are not frozen, because a frozen one takes three times as long to
make, and every contribution makes one.

Times are seconds of the monotonic clock of the process that orders the events (of several shards the coordinator).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from pydantic import TypeAdapter

from ...common.errors import Reason, refusal
from ...common.tensors.judgement import SOUND, Judgement
from ...common.wire.json_text import read_json
from ...common.wire.records import Contribution, ResidualInfo


@dataclass(slots=True)
class Event:
    """One event. The sequencer sets `at` when the event happens."""

    is_gathered: ClassVar[bool] = False
    at: float = field(default=0.0, kw_only=True)


# ---- workers come and go ----------------------------------------------------------------------------


@dataclass(slots=True)
class Joined(Event):
    """A process asks for a rank on a new stream (Join in the proto). A zero or an empty text is an absent field."""

    stream: int  # the stream that waits for the reply, on the coordinator
    rank: int | None = None
    run: str = ""
    incarnation: int = 0
    server_incarnation: int = 0
    process: str = ""
    num_workers: int = 0  # for which it stands, if it is the server of others


@dataclass(slots=True)
class OfAWorker(Event):
    """An event of the process that holds `rank` as this `incarnation`."""

    rank: int
    incarnation: int


@dataclass(slots=True)
class Disconnected(OfAWorker):
    """The worker's stream has ended without a goodbye."""


@dataclass(slots=True)
class Left(OfAWorker):
    """The worker is gone: it said goodbye, it failed after the last training step, or its call was refused. `metrics`
    has the results of the final evaluation."""

    how: str = "closed"
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 1  # of what failed


@dataclass(slots=True)
class Expelled(OfAWorker):
    """The worker broke the protocol: the server refuses its call and releases it."""

    reason: str
    message: str


@dataclass(slots=True)
class Finished(OfAWorker):
    """The worker takes no more training steps."""

    transfer_s: float = 0.0
    stays: bool = False  # for the final weights, of which it may be asked for metrics
    residual: ResidualInfo = field(default_factory=ResidualInfo)


@dataclass(slots=True)
class StopAsked(OfAWorker):
    """The worker asks for the end of the run."""

    reason: str


@dataclass(slots=True)
class MetricsReceived(Event):
    """An evaluation of the weights of one version gave these metrics, or failed."""

    rank: int | None  # None: of a process that does not train
    version: int
    step: int = 0  # training steps behind the evaluator
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    exit_code: int = 1  # of the evaluator, for the failure


@dataclass(slots=True)
class CopyAsked(Event):
    """A process that does not train is about to evaluate or to read the newest version."""

    reader: str = ""  # the process that reads; empty: it evaluates


@dataclass(slots=True)
class HeartbeatBegan(Event):
    """A heartbeat stream of this process is open."""

    process: str
    is_outside: bool = False  # it joins nothing, and evaluates


@dataclass(slots=True)
class HeartbeatStopped(Event):
    """A heartbeat stream of this process has ended."""

    process: str


@dataclass(slots=True)
class Heartbeat(Event):
    """A heartbeat of a worker has arrived."""

    rank: int
    process: str


# ---- what comes from them, to every shard ------------------------------------------------------------


@dataclass(slots=True)
class Offered(OfAWorker):
    """The worker has sent its model and optimizer. `model` and `optimizer` are names; equal ones have equal names."""

    is_gathered: ClassVar[bool] = True
    model: str = ""
    optimizer: str = ""
    rendezvous: str = ""  # where workers that average with it may meet


@dataclass(slots=True)
class Brought(OfAWorker):
    """The requested initial weights of this worker are here, and finite."""

    is_gathered: ClassVar[bool] = True


@dataclass(slots=True)
class Contributed(Event):
    """A contribution is here, whole and checked."""

    is_gathered: ClassVar[bool] = True
    contribution: Contribution
    judgement: Judgement = SOUND
    looked_s: float = 0.0  # seconds that this shard took to examine it
    # Bytes that its worker has sent and received here so far, with this contribution and without Waiting messages.
    traffic: tuple[int, int] = (0, 0)

    @property
    def rank(self) -> int:
        return self.contribution.id.rank

    @property
    def incarnation(self) -> int:
        return self.contribution.id.incarnation


@dataclass(slots=True)
class AskedAgain(OfAWorker):
    """The worker asks again for the reply to a contribution that counts."""

    is_gathered: ClassVar[bool] = True
    seq: int


@dataclass(slots=True)
class Measured(Event):
    """The 2-norm of the mean for this version, or of a shard's part of it, where several shards clip the step."""

    is_gathered: ClassVar[bool] = True
    version: int
    norm: float


@dataclass(slots=True)
class Stored(Event):
    """An attempt at a snapshot is over, and the newest on the disk is of version `durable`."""

    is_gathered: ClassVar[bool] = True
    attempt: int
    durable: int


@dataclass(slots=True)
class CommitterReplied(Event):
    """The run that takes this one's commits (`Committer`) has replied."""

    num_before: int = 0  # workers of other servers that come before this server's in the division of the data
    num_others: int = 0  # workers of all other servers
    over: str = ""  # the reason, if that run takes no more commits
    is_final: bool = False  # the final weights are here
    may_ask: bool = False  # and a worker of this server is to send metrics of them
    lost: tuple[int, ...] = ()  # ranks whose gradients are in no version of that run


@dataclass(slots=True)
class Controlled(Event):
    """A user controls the run (`controls.py`). The result carries `number`."""

    do: str
    rank: int | None = None
    name: str = ""
    value: bool | int | float | str | None = None
    number: int = 0


# ---- time, and the end --------------------------------------------------------------------------------


@dataclass(slots=True)
class Ticked(Event):
    """Time has passed."""


@dataclass(slots=True)
class Stopped(Event):
    """The server stops: it refuses all workers, and decides nothing more."""


@dataclass(slots=True)
class Failed(Event):
    """An error outside of the run ends it."""

    message: str
    exit_code: int
    fix: str = ""


_BASES = (Event, OfAWorker)
KINDS: tuple[type[Event], ...] = tuple(
    kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Event) and kind not in _BASES
)


# ---- of several shards --------------------------------------------------------------------------------

# Fields that may differ between shards: findings in a shard's part, and times of the worker's clock.
_OWN = {
    "at", "judgement", "durable", "looked_s", "traffic", "timing", "payload", "position", "loss",
    "wants_weights", "has_all", "reference", "peer_bytes",
}  # fmt: skip

AboutAWorker = OfAWorker | Contributed


def key_of(event: Event) -> tuple[Any, ...]:
    """Returns a key that is equal for the reports of several shards about one thing: its kind, the rank, ..."""
    if isinstance(event, Contributed):
        return "Contributed", *event.contribution.id
    names = ("rank", "incarnation", "seq", "attempt", "version")
    return type(event).__name__, *(getattr(event, name, None) for name in names)


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Returns the fields in which two shards' events differ, as phrases; empty where they agree."""
    found: list[str] = []
    for name in mine.keys() - _OWN:
        own_value, other_value = mine[name], theirs[name]
        if isinstance(own_value, dict) and isinstance(other_value, dict):
            found += differences(own_value, other_value)
        elif own_value != other_value:
            found.append(f"{name} {own_value} and {other_value}")
    return sorted(found)


# ---- as text ------------------------------------------------------------------------------------------


class Lines:
    """Dataclasses of some kinds as lines of JSON, and back."""

    def __init__(self, kinds: Iterable[type[Any]]) -> None:
        self._adapters = {kind.__name__: TypeAdapter(kind) for kind in kinds}

    def write(self, item: Any) -> str:
        return json.dumps({"kind": type(item).__name__, **asdict(item)}, separators=(",", ":"))

    def read(self, text: str) -> Any:
        """Returns the dataclass of a line. Raises a BAD_REQUEST refusal for any other text."""
        try:
            fields = read_json(text, nan=True, big=True)  # a loss is NaN where the worker reports none
            return self._adapters[fields.pop("kind")].validate_python(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise refusal(Reason.BAD_REQUEST, f"not a known message: {type(error).__name__} in {text[:80]!r}") from None


LINES = Lines(KINDS)
