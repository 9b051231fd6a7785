"""A server of one process: what has come to it happens.

The same calls, with other shards to wait for, are in `coordinator.py` and `follower.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..core.judgement import Judgement
from ..policies.base import Contribution
from ..wire.connected import Measured, Worker
from .orders import Event, ShardState

if TYPE_CHECKING:
    from ...common.wire.segments import Segment
    from ..core.run import Run


class StagedPart(NamedTuple):
    """A contribution, as far as it is this shard's: whole, looked through, not taken yet."""

    contribution: Contribution
    body: torch.Tensor  # uint8 [exchange_bytes]
    judgement: Judgement
    told: Measured


class Alone:
    """The only shard."""

    addresses: tuple[str, ...] = ()  # of all shards by number, the coordinator's own empty

    def __init__(self, run: Run) -> None:
        self._run = run

    # ---- something has come, here; what is to be done when it has come everywhere -----------------

    def offered(self, worker: Worker) -> None:
        self._run.admit(worker)

    def brought(self, worker: Worker, weights: Segment) -> None:
        self._run.begin(weights)

    def staged(self, worker: Worker, part: StagedPart) -> None:
        self._run.contributions.take(worker, part, self._run.now())

    def asked(self, worker: Worker, step: int) -> None:
        self._run.contributions.repeat(worker, self._run.now())

    # ---- what is decided here, and what is waited for ----------------------------------------------

    def happens(self, event: Event) -> float:
        """Called before an event takes effect; the time at which it does, for the policy."""
        return self._run.now()

    def waiting_for(self, worker: Worker | None = None) -> str:
        """Which shards have not got what this worker is to give them, or anything at all; a phrase, or empty."""
        return ""

    def durable_version(self, here: int) -> int:
        """The least of the newest snapshots on other shards, where there are any; `here` otherwise."""
        return here

    @property
    def is_writing(self) -> bool:
        """Another shard has not finished its snapshot."""
        return False

    async def settled(self) -> None:
        """Returns when none is."""

    def missing(self) -> str:
        """What keeps workers from joining, as a phrase; empty when all shards are there."""
        return ""

    @property
    def states(self) -> dict[int, ShardState]:
        """What the other shards said last about themselves."""
        return {}
