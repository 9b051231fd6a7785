"""Messages between shards other than events and digests. Each is a dataclass, sent as JSON in a proto message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from ..core.events import KINDS, Event, Lines
from ..core.replication import Digest
from ..engine.peers import ShardState
from ..snapshots.common import RUN_NAME, Entry, SnapshotName


@dataclass(frozen=True)
class Register:
    """The first report on a connection: the shard's number, and the snapshots from which it could resume.

    Workers reach the shard at `address`. A host of 0.0.0.0 or :: stands for the host of the connection. With `run`, the
    same process is back on a new connection, and has received `num_received` orders of this server incarnation.
    """

    shard: int
    shards: int
    address: str
    snapshots: tuple[Entry, ...] = ()
    keeps_snapshots: bool = False
    program_version: str = ""
    run: str = ""
    server_incarnation: int = 0
    num_received: int = 0


@dataclass(frozen=True)
class Ready:
    """The shard has loaded its share of the snapshot, and listens."""


@dataclass(frozen=True)
class ShardFailed:
    """The shard cannot continue. With an exit code (16: diverged), the run ends with it on all shards."""

    message: str
    exit_code: int = 0
    fix: str = ""


@dataclass(frozen=True)
class BeginRun:
    """The first order: the run's name, and the snapshot from which it resumes.

    `config` has the sections that are the same on all shards, as JSON. For a run that goes back to a snapshot,
    `num_joins` has the newest incarnation of each rank, and `evicted` the evicted ranks.
    """

    run: Annotated[str, Field(pattern=RUN_NAME)]
    server_incarnation: int
    snapshot: SnapshotName | None
    config: str
    num_joins: dict[int, int] = field(default_factory=dict)
    evicted: tuple[int, ...] = ()


@dataclass(frozen=True)
class GoOn:
    """The first order on a new connection of a known process. The coordinator has received `num_received` reports."""

    num_received: int


@dataclass(frozen=True)
class End:
    """The run is over. `error` is empty unless it failed."""

    error: str = ""
    exit_code: int = 0


Report = Register | Ready | Digest | ShardState | ShardFailed | Event
Order = BeginRun | GoOn | End | Event

LINES = Lines((*KINDS, Register, Ready, Digest, ShardState, ShardFailed, BeginRun, GoOn, End))
