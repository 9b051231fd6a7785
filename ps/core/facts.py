"""What has happened in a run, as its observers are told: one typed fact each, made once, in order.

Facts go out on the bus (`ps/observe/bus.py`); the history, Prometheus, the log, the live view and the summary are
sinks of it. They are about the past and change nothing: the run never asks what became of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...common.reporting.status import Status


class Identity(NamedTuple):
    """Of one contribution: an effect of it happens at most once in a run."""

    rank: int
    incarnation: int
    number: int  # of the rank's contributions, from 1


@dataclass(frozen=True, slots=True)
class RunStarted:
    """This server process begins, or goes on from `source`."""

    run: str
    server_incarnation: int
    mode: str
    version: int
    contributions: dict[int, int]  # counted, by rank
    num_workers: int | None
    staleness_bound: int | None
    source: str | None
    skipped: tuple[str, ...]  # snapshots that were newer and damaged
    options: dict[str, Any]  # of the mode, as JSON: its rules may depend on them


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    rank: int
    incarnation: int
    number: int  # contributions of the rank that count
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    rank: int
    incarnation: int
    how: str  # goodbye, closed, lease, replaced
    reason: str


@dataclass(frozen=True, slots=True)
class ContributionTaken:
    """A contribution came whole to all shards; `outcome` is what became of it."""

    identity: Identity
    base_version: int
    version: int  # when it came
    outcome: str  # accepted, dropped, repeated, rejected, skipped, refused
    num_samples: int
    exchange_s: float  # that the worker's exchange before this one took; negative: unknown


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    version: int
    contributions: tuple[Identity, ...]
    members: tuple[int, ...]  # live ranks


@dataclass(frozen=True, slots=True)
class AnswerGiven:
    rank: int
    incarnation: int
    number: int  # contributions of the rank that count
    version: int
    outcome: str  # START, APPLIED, REPEATED, DROPPED, REJECTED


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    version: int
    contributions: dict[int, int]  # in it, by rank
    path: str
    sha256: str  # of the weights


@dataclass(frozen=True, slots=True)
class StatusTaken:
    """Somebody may want to look: said every few seconds."""

    status: Status


@dataclass(frozen=True, slots=True)
class RunEnded:
    version: int
    contributions: dict[int, int]


Fact = (
    RunStarted
    | WorkerJoined
    | WorkerLeft
    | ContributionTaken
    | VersionCommitted
    | AnswerGiven
    | SnapshotTaken
    | StatusTaken
    | RunEnded
)
