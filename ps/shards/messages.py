"""What shards say to each other beside events and digests: one dataclass a kind, as JSON in the proto's messages."""

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
    """The first report on a connection: who this is, and what it could go on from.

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
    heard: int = 0


@dataclass(frozen=True)
class Ready:
    """It has what it is to begin with, and listens."""


@dataclass(frozen=True)
class ShardFailed:
    """The shard cannot go on. With an exit code of its own (16: diverged) the run ends so for all."""

    message: str
    exit_code: int = 0
    fix: str = ""


@dataclass(frozen=True)
class BeginRun:
    """The first order: what run this is, and which snapshot it goes on from. `config` is JSON, of the sections that
    hold for all shards; `num_joins` by rank, which a run that goes back to no snapshot knows of before; `evicted` ranks
    of a run that goes back."""

    run: Annotated[str, Field(pattern=RUN_NAME)]
    server_incarnation: int
    snapshot: SnapshotName | None
    config: str
    num_joins: dict[int, int] = field(default_factory=dict)
    evicted: tuple[int, ...] = ()


@dataclass(frozen=True)
class GoOn:
    """The first order on a new connection of a process that is known; the coordinator has `heard` so many reports."""

    heard: int


@dataclass(frozen=True)
class End:
    """The run is over; with an error unless `error` is empty."""

    error: str = ""
    exit_code: int = 0


Report = Register | Ready | Digest | ShardState | ShardFailed | Event
Order = BeginRun | GoOn | End | Event

LINES = Lines((*KINDS, Register, Ready, Digest, ShardState, ShardFailed, BeginRun, GoOn, End))
