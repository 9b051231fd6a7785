"""Shard 0: what has come to all shards happens, and the others are told in which order.

Used on the event loop, like the run it belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...common.errors import Reason, refusal
from ...common.reporting.log import get_logger
from ...common.version import PROGRAM_VERSION
from ..core.judgement import judge_whole
from ..snapshots.common import Entry
from ..wire.connected import Worker
from . import orders
from .alone import Alone, StagedPart
from .gather import Gather

if TYPE_CHECKING:
    from ...common.wire.segments import Segment
    from ..core.run import Run

log = get_logger()

# Kinds of reports that wait for those of all shards, as people are told about them.
_KINDS = {
    orders.Staged: "its part of the contribution",
    orders.Brought: "its part of the initial weights",
    orders.Offered: "this worker's connection",
    orders.Asked: "this worker's question",
}


_GOODBYE_S = 2.0
_LOOK_S = 0.01


@dataclass(eq=False)
class Attendant:
    """Another shard, as long as it is connected. `outbox` holds what it is to be told; None ends it."""

    register: orders.Register
    outbox: asyncio.Queue[tuple[orders.Order, float] | None] = field(default_factory=asyncio.Queue)
    is_ready: bool = False
    is_writing: bool = False
    durable_version: int = 0


class Coordinator(Alone):
    """`on_complete` is called when all shards have registered, `on_lost` with the number of one that is gone."""

    def __init__(self, run: Run, num_shards: int, keeps_snapshots: bool) -> None:
        super().__init__(run)
        self._num_shards = num_shards
        self._keeps_snapshots = keeps_snapshots
        self._attendants: dict[int, Attendant] = {}
        self._gather = Gather(num_shards)
        self._staged: dict[int, tuple[Worker, StagedPart]] = {}
        self._asking: dict[int, Worker] = {}
        self._brought: tuple[Worker, Segment] | None = None
        self._offering: dict[int, Worker] = {}
        self._settled = asyncio.Event()
        self._states: dict[int, orders.ShardState] = {}
        self._has_begun = False
        self.on_complete: Callable[[], object] = lambda: None
        self.on_lost: Callable[[int], object] = lambda shard: None

    # ---- shards come and go ---------------------------------------------------------------------

    def register(self, register: orders.Register) -> Attendant:
        """Take in a shard; refuses one that cannot be of this run."""
        shard, num = register.shard, self._num_shards
        if register.shards != num or not 0 < shard < num:
            raise refusal(
                Reason.SHARD_MISMATCH,
                f"it is shard {shard} of {register.shards}; this server has {num} shards, 0 to {num - 1}",
                fix=f"start it with --shards {num} --shard 1 to {num - 1}",
            )
        if register.program_version != PROGRAM_VERSION:
            raise refusal(
                Reason.SHARD_MISMATCH,
                f"it is paramserver {register.program_version or 'of no version'}, the coordinator {PROGRAM_VERSION}",
                fix="install the same version everywhere",
            )
        if shard in self._attendants:
            raise refusal(
                Reason.NOT_READY, f"there is a shard {shard} already, at {self._attendants[shard].register.address}"
            )
        if self._has_begun:
            raise refusal(Reason.NOT_READY, f"shard {shard} has just been lost; the others are about to go back")
        if self._keeps_snapshots and not register.keeps_snapshots:
            raise refusal(
                Reason.SHARD_MISMATCH,
                f"the coordinator keeps snapshots and shard {shard} does not",
                fix="start it with --checkpoint-dir too",
            )
        attendant = self._attendants[shard] = Attendant(register)
        log.info("shard_joined", shard=shard, shards=num, address=register.address, missing=self._missing())
        if len(self._attendants) == num - 1:
            self.on_complete()
        return attendant

    def _missing(self) -> list[int]:
        return [shard for shard in range(1, self._num_shards) if shard not in self._attendants]

    def lost(self, shard: int, attendant: Attendant) -> None:
        """Its stream has ended."""
        if self._attendants.get(shard) is not attendant:
            return
        del self._attendants[shard]
        self._settled.set()
        if self._has_begun:
            self.on_lost(shard)

    @property
    def snapshots(self) -> dict[int, tuple[Entry, ...]]:
        """What the other shards say they can begin with."""
        return {shard: attendant.register.snapshots for shard, attendant in self._attendants.items()}

    def begin_run(self, order: orders.BeginRun) -> None:
        """All are here and this shard has what it begins with: the others are told what that is."""
        self._has_begun = True
        self.addresses = ("", *(self._attendants[shard].register.address for shard in range(1, self._num_shards)))
        self._tell(order, self._run.now())

    async def stop(self, end: orders.End) -> None:
        """The run is over: tell the others, and wait a moment for them to say what they have to say, and go."""
        self._has_begun = False  # whom it loses now is no loss
        self._tell(end, self._run.now())
        deadline = self._run.now() + _GOODBYE_S
        while self._attendants and self._run.now() < deadline:
            await asyncio.sleep(_LOOK_S)
        self.dismiss()

    def dismiss(self) -> None:
        """End all connections: everyone goes back to the newest common snapshot."""
        self._has_begun = False
        for attendant in self._attendants.values():
            attendant.outbox.put_nowait(None)

    def missing(self) -> str:
        if missing := self._missing():
            names, num = ", ".join(map(str, missing)), self._num_shards
            return f"shard {names} of {num} to join (ps-server --shard {missing[0]} --shards {num})"
        late = [shard for shard, attendant in sorted(self._attendants.items()) if not attendant.is_ready]
        return f"shard {', '.join(map(str, late))} to be ready" if late else ""

    # ---- what they report -------------------------------------------------------------------------

    def hear(self, shard: int, attendant: Attendant, report: orders.Report) -> None:
        match report:
            case orders.Ready():
                attendant.is_ready = True
            case orders.Offered() | orders.Brought() | orders.Staged() | orders.Asked():
                self._hear(shard, report)
            case orders.Durable(version):
                attendant.durable_version, attendant.is_writing = version, False
                self._settled.set()
            case orders.ShardState():
                self._states[shard] = report
            case orders.ShardFailed(message):
                log.error("shard_failed", shard=shard, reason=message)

    def _hear(self, shard: int, report: orders.Gathered) -> None:
        reports = self._gather.add(shard, report)
        if not reports or self._run.contributions.is_closed:
            return
        rank = report.rank
        match report:
            case orders.Offered():
                self._run.admit(self._offering.pop(rank))
            case orders.Brought():
                assert self._brought is not None
                (_, weights), self._brought = self._brought, None
                self._run.begin(weights)
            case orders.Staged(step=step):
                worker, part = self._staged.pop(rank)
                limits = self._run.model.store.sanity.limits
                judgement = judge_whole(limits, [one.judgement for one in reports if isinstance(one, orders.Staged)])
                now = self.happens(orders.Taken(rank, report.incarnation, step, judgement))
                self._run.contributions.take(worker, part._replace(judgement=judgement), now)
            case orders.Asked():
                worker = self._asking.pop(rank)
                self._run.contributions.repeat(worker, self.happens(orders.Repeated(rank, report.incarnation)))

    # ---- what has come here -------------------------------------------------------------------------

    def offered(self, worker: Worker) -> None:
        self._offering[worker.rank] = worker
        self._hear(0, orders.Offered(*_seat(worker)))

    def brought(self, worker: Worker, weights: Segment) -> None:
        self._brought = (worker, weights)
        self._hear(0, orders.Brought(*_seat(worker)))

    def staged(self, worker: Worker, part: StagedPart) -> None:
        if not self._run.roster.is_current(worker) or self._run.contributions.is_closed:
            self._run.contributions.take(worker, part, self._run.now())  # which refuses it
            return
        worker.state = "waiting"
        self._staged[worker.rank] = (worker, part)
        self._hear(0, orders.Staged(*_seat(worker), part.contribution.number, part.judgement))

    def asked(self, worker: Worker, step: int) -> None:
        worker.state = "waiting"
        self._asking[worker.rank] = worker
        self._hear(0, orders.Asked(*_seat(worker), step))

    # ---- what happens ---------------------------------------------------------------------------------

    def happens(self, event: orders.Event) -> float:
        now = self._run.now()
        match event:
            case orders.Away(rank, incarnation) | orders.Left(rank, incarnation):
                self._forget(rank, incarnation)
            case orders.Entered():
                self._run.model.staging.make_room(len(self._run.workers))
            case orders.TakeSnapshot():
                for attendant in self._attendants.values():
                    attendant.is_writing = True
        self._tell(event, now)
        return now

    def _tell(self, order: orders.Order, now: float) -> None:
        for attendant in self._attendants.values():
            attendant.outbox.put_nowait((order, now))

    def _forget(self, rank: int, incarnation: int) -> None:
        self._gather.forget(rank, incarnation)
        self._offering.pop(rank, None)
        self._asking.pop(rank, None)
        if self._brought is not None and self._brought[0].rank == rank:
            self._brought = None
        if rank in self._staged:
            _, part = self._staged.pop(rank)
            self._run.model.staging.give_back(part.body)

    def waiting_for(self, worker: Worker | None = None) -> str:
        if worker is None:
            return ""
        for kind, what in _KINDS.items():
            if missing := self._gather.missing(kind, worker.rank):
                return f"shard {', '.join(map(str, missing))} to have {what}"
        return ""

    # ---- snapshots --------------------------------------------------------------------------------------

    def durable_version(self, here: int) -> int:
        return min((attendant.durable_version for attendant in self._attendants.values()), default=here)

    @property
    def is_writing(self) -> bool:
        return any(attendant.is_writing for attendant in self._attendants.values())

    async def settled(self) -> None:
        while self.is_writing:
            self._settled.clear()
            await self._settled.wait()

    # ---- for the summary ----------------------------------------------------------------------------------

    @property
    def states(self) -> dict[int, orders.ShardState]:
        """What the others said last about themselves."""
        return dict(sorted(self._states.items()))


def _seat(worker: Worker) -> tuple[int, int]:
    return worker.rank, worker.seat.incarnation
