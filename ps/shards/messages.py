"""The messages of shards to each other beside events and digests: one dataclass for each, as JSON in the proto's."""

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
    """The first report on a connection: which shard this is, and the snapshots that it could go on from.

    `address` is where workers reach it; a host of 0.0.0.0 or :: stands for the one its connection comes from. With
    `run` it is the same process on a new connection, which has `heard` so many orders of this server incarnation.
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
    """The shard has its share of the snapshot, and listens."""


@dataclass(frozen=True)
class ShardFailed:
    """The shard cannot go on. With an exit code of its own (16: diverged) the run ends so for all."""

    message: str
    exit_code: int = 0
    fix: str = ""


@dataclass(frozen=True)
class BeginRun:
    """The first order: which run this is, and which snapshot it goes on from. `config` is JSON of the sections that
    hold for all shards. A run that goes back also has `num_joins`, by rank, and the ranks that were `evicted`."""

    run: Annotated[str, Field(pattern=RUN_NAME)]
    server_incarnation: int
    snapshot: SnapshotName | None
    config: str
    num_joins: dict[int, int] = field(default_factory=dict)
    evicted: tuple[int, ...] = ()


@dataclass(frozen=True)
class GoOn:
    """The first order on a new connection of a process that is known; the coordinator has `heard` so many reports."""

    num_received: int


@dataclass(frozen=True)
class End:
    """The run is over; with an error unless `error` is empty."""

    error: str = ""
    exit_code: int = 0


Report = Register | Ready | Digest | ShardState | ShardFailed | Event
Order = BeginRun | GoOn | End | Event

LINES = Lines((*KINDS, Register, Ready, Digest, ShardState, ShardFailed, BeginRun, GoOn, End))
