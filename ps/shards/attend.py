"""The coordinator's side of the call Attend: every other shard registers, sends reports, and receives orders.

If a call breaks off and the shard's process calls again within a lease, it receives the orders that it missed. If the
shard does not call again, or registers as a new process, its part of the run is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Annotated
from urllib.parse import unquote

import grpc.aio
from pydantic import Field

from ...common.config.addresses import split_address
from ...common.errors import DivergedError, ParamServerError, Reason, refusal, shown
from ...common.reporting.log import get_logger
from ...common.tensors.judgement import judge_whole
from ...common.version import PROGRAM_VERSION
from ...common.wire.checks import check_address
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..core.events import KINDS, Event, Lines
from ..core.run import Coordinator, Digest, Outbox
from ..engine.engine import Engine, until_one_ends
from ..engine.folding import ShardState
from ..snapshots.common import RUN_NAME, Entry, SnapshotName
from ..wire.security import check_shard
from ..wire.service import refuse
from ..wire.stream import FirstMessages

log = get_logger()

_ANY_HOST = ("0.0.0.0", "::")
_GOODBYE_S = 2.0
_MAX_UNNAMED = 16  # calls without a Register message, beyond one for each shard
_MOST_SHOWN = 2_000  # characters of a shard's error


@dataclass(eq=False)
class Line:
    """One registered shard. `first` and `last` are the first and last orders of its call."""

    register: Register
    outbox: Outbox[events.Event]
    first: Order | None = None
    last: End | None = None
    is_ready: bool = False
    is_dismissed: bool = False
    call: grpc.aio.ServicerContext | None = None  # the newest
    giving_up: asyncio.TimerHandle | None = None  # runs while the shard is away; its end means that the shard is lost
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def stay(self) -> None:
        """Stop the timer of a shard that was away."""
        if self.giving_up is not None:
            self.giving_up.cancel()
            self.giving_up = None


class Attendance:
    """The coordinator's connections to all other shards, which apply the events of the run in the same order.

    `on_complete` is called once all shards have registered, and `on_lost` with the number of a lost shard.
    """

    def __init__(self, engine: Engine, on_complete: Callable[[], object], on_lost: Callable[[int], object]) -> None:
        self._engine, self._config = engine, engine.config
        run, model, config = engine.run, engine.model, engine.config
        self._num_shards = config.server.shards
        self._coordinator = engine.sequencer = Coordinator(
            self._num_shards,
            happens=engine.happens,
            now=engine.now,
            judge=lambda parts: judge_whole(model.store.sanity.limits, parts),
            digest=run.digest,
        )
        self.lines: dict[int, Line] = {}
        self._first = FirstMessages("Register", config.server.join_timeout_s, self._num_shards + _MAX_UNNAMED)
        self._has_begun = False
        self._on_complete, self._on_lost = on_complete, on_lost
        engine.why_not_ready = self._missing

    # ---- shards come and go ---------------------------------------------------------------------

    async def attend(self, reports: AsyncIterator[pb.ShardReport], context: grpc.aio.ServicerContext) -> None:
        """Serve one call of a shard, until its last order or the end of the connection."""
        line: Line | None = None
        try:
            first = await self._first.first_of(reports)
            if first is None:
                return
            register = LINES.read(first.message)
            if not isinstance(register, Register):
                raise refusal(Reason.BAD_REQUEST, "the first report of a shard is not Register")
            check_shard(context, register.shard)
            check_address("Register.address", register.address)
            register = replace(register, address=_reachable(register.address, context.peer()))
            line = self._go_on(register) if register.run else self._register(register)
            line.call = context
            line.stay()
            if not self._absent() and not self._has_begun:
                self._on_complete()
            await until_one_ends(self._hear(line, reports), self._tell(line, register.num_received, context))
        except ParamServerError as error:
            await refuse(context, error, shard=line.register.shard if line is not None else -1)
        finally:
            if line is not None and line.call is context:
                self._ended(line)

    def _register(self, register: Register) -> Line:
        """Register a shard's process. Raises a refusal if it cannot belong to this run."""
        shard, num = register.shard, self._num_shards
        problem = fix = ""
        if register.shards != num or not 0 < shard < num:
            problem = f"it is shard {shard} of {register.shards}; this server has {num} shards, 0 to {num - 1}"
            fix = f"start it with --shards {num} --shard 1 to {num - 1}"
        elif register.program_version != PROGRAM_VERSION:
            version = register.program_version or "of no version"
            problem = f"it is paramserver {version}, the coordinator {PROGRAM_VERSION}"
            fix = "install the same version everywhere"
        elif self._config.checkpoint.dir is not None and not register.keeps_snapshots:
            problem = f"the coordinator keeps snapshots and shard {shard} does not"
            fix = "start it with --checkpoint-dir too"
        if problem:
            raise refusal(Reason.SHARD_MISMATCH, problem, fix=fix)
        known = self.lines.get(shard)
        if known is not None and known.giving_up is not None:  # a new process, without the part of the old one
            self._lose(shard)
        elif known is not None:
            raise refusal(Reason.NOT_READY, f"there is a shard {shard} already, at {known.register.address}")
        if self._has_begun:
            raise refusal(Reason.NOT_READY, f"shard {shard} was just lost; the others are going back to a snapshot")
        line = self.lines[shard] = Line(register, self._coordinator.outboxes[shard])
        line.outbox.on_put = line.changed.set
        log.info("shard_joined", shard=shard, shards=num, address=register.address, missing=self._absent())
        return line

    def _go_on(self, register: Register) -> Line:
        """Return the line of a process that calls again."""
        line, run = self.lines.get(register.shard), self._engine.run
        is_ours = (register.run, register.server_incarnation) == (run.name, run.incarnation) and self._has_begun
        if line is None or not is_ours or not line.outbox.can_go_on_after(register.num_received):
            problem = f"shard {register.shard} was away too long, or the coordinator is a new process"
            raise refusal(Reason.RUN_MISMATCH, problem)
        line.first = GoOn(line.outbox.num_received)
        line.changed.set()
        log.info("shard_back", shard=register.shard, missed=len(line.outbox.after(register.num_received)))
        return line

    def _ended(self, line: Line) -> None:
        """Handle the end of the line's call."""
        shard = line.register.shard
        if self.lines.get(shard) is not line:
            return
        if not self._has_begun or line.is_dismissed:
            del self.lines[shard]
            self._engine.notify()
            return
        lease_s = self._config.server.lease_s
        log.warning("shard_away", shard=shard, lost_in_s=lease_s)
        line.giving_up = asyncio.get_running_loop().call_later(lease_s, self._lose, shard)

    def _lose(self, shard: int) -> None:
        self.lines.pop(shard).stay()
        if self._has_begun:
            self._on_lost(shard)

    def _absent(self) -> list[int]:
        return [shard for shard in range(1, self._num_shards) if shard not in self.lines]

    def _missing(self) -> str:
        """Return the reason why workers cannot join yet, as a phrase, or "" if all shards are ready."""
        if absent := self._absent():
            names, num = ", ".join(map(str, absent)), self._num_shards
            return f"shard {names} of {num} to join (ps-server --shard {absent[0]} --shards {num})"
        late = [shard for shard, line in sorted(self.lines.items()) if not line.is_ready]
        return f"shard {', '.join(map(str, late))} to be ready" if late else ""

    def begin_run(self, order: BeginRun) -> None:
        """Order the other shards to begin, once all have registered and this one is ready."""
        self._has_begun = True
        addresses = (self.lines[shard].register.address for shard in range(1, self._num_shards))
        self._engine.shard_addresses = ("", *addresses)
        for line in self.lines.values():
            line.first = order
            line.changed.set()

    async def stop(self, end: End) -> None:
        """Tell the other shards that the run is over, and wait for their last reports."""
        self.dismiss(end)
        try:
            await self._engine.until(lambda: not self.lines, _GOODBYE_S)
        except TimeoutError:
            log.warning("shards_left_behind", shards=sorted(self.lines))

    def dismiss(self, end: End | None = None) -> None:
        """End all calls, after the last order, if any. A shard without a last order goes back to a snapshot."""
        self._has_begun = False  # from now on, the end of a shard's call is not a loss
        for line in self.lines.values():
            line.last, line.is_dismissed = end or line.last, True
            line.changed.set()

    # ---- a call -----------------------------------------------------------------------------------

    async def _hear(self, line: Line, reports: AsyncIterator[pb.ShardReport]) -> None:
        shard = line.register.shard
        async for message in reports:
            line.outbox.acknowledge(message.num_received)
            report: Report = LINES.read(message.message)
            if isinstance(report, Digest | events.Event):
                self._coordinator.hear(shard, message.number, report)
                continue
            if not line.outbox.hear(message.number):
                continue
            match report:
                case Ready():
                    line.is_ready = True
                    self._engine.notify()
                case ShardState():
                    self._engine.shard_states[shard] = report
                case ShardFailed():
                    reason, fix = shown(report.message, _MOST_SHOWN), shown(report.fix, _MOST_SHOWN)
                    log.error("shard_failed", shard=shard, reason=reason)
                    if report.exit_code == DivergedError.exit_code:  # after going back, the run would diverge again
                        self._engine.offer(events.Failed(reason, report.exit_code, fix))
                case _:
                    raise refusal(Reason.BAD_REQUEST, f"a shard reported {type(report).__name__}")

    async def _tell(self, line: Line, num_received: int, context: grpc.aio.ServicerContext) -> None:
        """Send the orders that the shard has not received, and new ones, until the shard is dismissed."""

        async def write(number: int, order: Order) -> None:
            num_here = line.outbox.num_received
            await context.write(pb.ShardOrder(number=number, num_received=num_here, message=LINES.write(order)))

        has_begun = False
        while True:
            line.changed.clear()
            if line.first is not None and not has_begun:
                has_begun = True
                await write(0, line.first)
            while has_begun and (missed := line.outbox.after(num_received)):
                for number, event in missed:
                    await write(number, event)
                    num_received = number
            if line.is_dismissed:
                break
            await line.changed.wait()
        if line.last is not None:
            await write(0, line.last)
        await asyncio.sleep(_GOODBYE_S)  # the shard may still send its last reports


def _reachable(address: str, peer: str) -> str:
    """Return the address at which workers reach a shard. For 0.0.0.0 or ::, it is the address that its call has."""
    host, port = split_address(address)
    if host not in _ANY_HOST:
        return address
    kind, _, rest = unquote(peer).partition(":")
    return f"{rest.rpartition(':')[0]}:{port}" if kind in ("ipv4", "ipv6") else f"127.0.0.1:{port}"


# ---- messages ------------------------------------------------------------------------------------
# Messages between shards other than events and digests. Each is a dataclass, sent as JSON in a proto message.


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
