"""What shards tell each other; see ShardReport and ShardOrder in the proto. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.judgement import SOUND, Judgement
from ..snapshots.common import Entry, SnapshotName

# ---- a shard to the coordinator -------------------------------------------------------------------


@dataclass(frozen=True)
class Register:
    shard: int
    shards: int
    address: str
    snapshots: tuple[Entry, ...] = ()
    keeps_snapshots: bool = False
    program_version: str = ""


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class Offered:
    """A seated worker has said what it trains."""

    rank: int
    incarnation: int


@dataclass(frozen=True)
class Brought:
    """Its initial weights are here."""

    rank: int
    incarnation: int


@dataclass(frozen=True)
class Staged:
    """Its part of a contribution is here; what this shard alone would do with it."""

    rank: int
    incarnation: int
    step: int
    judgement: Judgement = SOUND


@dataclass(frozen=True)
class Asked:
    """It asks again for the answer to a contribution that counts."""

    rank: int
    incarnation: int
    step: int


@dataclass(frozen=True)
class Durable:
    """An attempt at a snapshot is over; the newest on the disk is of this version."""

    version: int


@dataclass(frozen=True)
class ShardState:
    """`bytes` held, by what they are; `traffic` by rank: bytes the worker has sent here and received from here."""

    version: int
    bytes: dict[str, int] = field(default_factory=dict)
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardFailed:
    message: str


Gathered = Offered | Brought | Staged | Asked
Report = Register | Ready | Gathered | Durable | ShardState | ShardFailed

# ---- the coordinator to all -----------------------------------------------------------------------


@dataclass(frozen=True)
class BeginRun:
    """The first order. `config` is JSON, of the sections that hold for all shards."""

    run: str
    server_incarnation: int
    snapshot: SnapshotName | None
    config: str


@dataclass(frozen=True)
class Bring:
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Begin:
    """The initial weights are here, on all shards."""


@dataclass(frozen=True)
class Entered:
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Resumed:
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Away:
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Left:
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Taken:
    """A contribution is staged everywhere; `judgement` is what all of them do with it."""

    rank: int
    incarnation: int
    step: int
    judgement: Judgement = SOUND


@dataclass(frozen=True)
class Repeated:
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Tick:
    pass


@dataclass(frozen=True)
class TakeSnapshot:
    pass


@dataclass(frozen=True)
class Done:
    evaluators: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """The run is over; with an error unless `error` is empty."""

    error: str = ""
    exit_code: int = 0


Event = Bring | Begin | Entered | Resumed | Away | Left | Taken | Repeated | Tick | TakeSnapshot | Done | End
Order = BeginRun | Event
