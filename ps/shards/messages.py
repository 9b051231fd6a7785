"""Reports and orders as the proto's messages, and back. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.errors import Reason, refusal
from ...proto import parameter_server_pb2 as pb
from ..core.judgement import Judgement
from ..snapshots.common import Entry, SnapshotName
from . import orders

_ACTIONS = ("take", "reject", "skip", "halt")
_MAX_SNAPSHOTS = 1000


def report_to_proto(report: orders.Report) -> pb.ShardReport:
    match report:
        case orders.Register():
            return pb.ShardReport(
                register=pb.Register(
                    shard=report.shard,
                    shards=report.shards,
                    address=report.address,
                    snapshots=[_snapshot_to_proto(*entry) for entry in report.snapshots],
                    keeps_snapshots=report.keeps_snapshots,
                    program_version=report.program_version,
                )
            )
        case orders.Ready():
            return pb.ShardReport(ready=pb.Ready())
        case orders.Offered(rank, incarnation):
            return pb.ShardReport(offered=pb.Offered(rank=rank, incarnation=incarnation))
        case orders.Brought(rank, incarnation):
            return pb.ShardReport(brought=pb.Brought(rank=rank, incarnation=incarnation))
        case orders.Staged(rank, incarnation, step, judgement):
            verdict = _verdict_to_proto(judgement)
            return pb.ShardReport(staged=pb.Staged(rank=rank, incarnation=incarnation, step=step, verdict=verdict))
        case orders.Asked(rank, incarnation, step):
            return pb.ShardReport(asked=pb.Asked(rank=rank, incarnation=incarnation, step=step))
        case orders.Durable(version):
            return pb.ShardReport(durable=pb.Durable(version=version))
        case orders.ShardState(version, num_bytes, traffic):
            rows = [pb.Traffic(rank=rank, sent=sent, received=got) for rank, (sent, got) in traffic.items()]
            return pb.ShardReport(state=pb.ShardState(version=version, bytes=num_bytes, traffic=rows))
        case orders.ShardFailed(message):
            return pb.ShardReport(failed=pb.ShardFailed(message=message))


def report_from_proto(message: pb.ShardReport) -> orders.Report:
    """Raises a BAD_REQUEST refusal for what no shard says."""
    kind = message.WhichOneof("kind")
    said = getattr(message, kind) if kind else None
    read = _REPORTS.get(kind or "")
    if read is None:
        raise refusal(Reason.BAD_REQUEST, f"a shard's report of kind {kind}, which this coordinator does not know")
    report: orders.Report = read(said)
    return report


def _register(message: pb.Register) -> orders.Register:
    if len(message.snapshots) > _MAX_SNAPSHOTS:
        raise refusal(Reason.BAD_REQUEST, f"{len(message.snapshots)} snapshots; at most {_MAX_SNAPSHOTS} are possible")
    snapshots = tuple(Entry(_snapshot_from_proto(name), name.problem, name.has_begun) for name in message.snapshots)
    return orders.Register(
        message.shard, message.shards, message.address, snapshots, message.keeps_snapshots, message.program_version
    )


def _staged(message: pb.Staged) -> orders.Staged:
    return orders.Staged(message.rank, message.incarnation, message.step, _verdict_from_proto(message.verdict))


_REPORTS: dict[str, Callable[[Any], orders.Report]] = {
    "register": _register,
    "ready": lambda _: orders.Ready(),
    "offered": lambda said: orders.Offered(said.rank, said.incarnation),
    "brought": lambda said: orders.Brought(said.rank, said.incarnation),
    "staged": _staged,
    "asked": lambda said: orders.Asked(said.rank, said.incarnation, said.step),
    "durable": lambda said: orders.Durable(said.version),
    "state": lambda said: orders.ShardState(
        said.version, dict(said.bytes), {row.rank: (row.sent, row.received) for row in said.traffic}
    ),
    "failed": lambda said: orders.ShardFailed(said.message),
}


# ---- orders ---------------------------------------------------------------------------------------

# Events about a worker's seat, by their field.
_SEATS: dict[str, type[Any]] = {
    "bring": orders.Bring,
    "entered": orders.Entered,
    "resumed": orders.Resumed,
    "away": orders.Away,
    "left": orders.Left,
    "repeated": orders.Repeated,
}
_FIELD_OF_SEAT = {kind: field for field, kind in _SEATS.items()}


def order_to_proto(order: orders.Order, now: float) -> pb.ShardOrder:
    field = _FIELD_OF_SEAT.get(type(order))
    if field is not None:
        seat: Any = order
        fields: dict[str, Any] = {field: pb.Seat(rank=seat.rank, incarnation=seat.incarnation)}
        return pb.ShardOrder(**fields, now=now)
    match order:
        case orders.BeginRun(run, incarnation, snapshot, config):
            name = _snapshot_to_proto(snapshot) if snapshot is not None else None
            begin = pb.BeginRun(run=run, server_incarnation=incarnation, snapshot=name, config=config)
            return pb.ShardOrder(begin_run=begin, now=now)
        case orders.Begin():
            return pb.ShardOrder(begin=pb.BeginTraining(), now=now)
        case orders.Taken(rank, incarnation, step, judgement):
            verdict = _verdict_to_proto(judgement)
            taken = pb.TakeStaged(rank=rank, incarnation=incarnation, step=step, verdict=verdict)
            return pb.ShardOrder(taken=taken, now=now)
        case orders.Tick():
            return pb.ShardOrder(tick=pb.Tick(), now=now)
        case orders.TakeSnapshot():
            return pb.ShardOrder(snapshot=pb.TakeSnapshot(), now=now)
        case orders.Done(evaluators):
            return pb.ShardOrder(done=pb.RunDone(evaluators=evaluators), now=now)
        case orders.End(error, exit_code):
            return pb.ShardOrder(end=pb.RunEnd(error=error, exit_code=exit_code), now=now)
    raise AssertionError(order)


def order_from_proto(message: pb.ShardOrder) -> orders.Order:
    kind = message.WhichOneof("kind")
    said: Any = getattr(message, kind) if kind else None
    if kind in _SEATS:
        seat: orders.Order = _SEATS[kind](said.rank, said.incarnation)
        return seat
    match kind:
        case "begin_run":
            name = _snapshot_from_proto(said.snapshot) if said.HasField("snapshot") else None
            return orders.BeginRun(said.run, said.server_incarnation, name, said.config)
        case "begin":
            return orders.Begin()
        case "taken":
            return orders.Taken(said.rank, said.incarnation, said.step, _verdict_from_proto(said.verdict))
        case "tick":
            return orders.Tick()
        case "snapshot":
            return orders.TakeSnapshot()
        case "done":
            return orders.Done(tuple(said.evaluators))
        case "end":
            return orders.End(said.error, said.exit_code)
    raise refusal(Reason.BAD_REQUEST, f"the coordinator sent an order of kind {kind}, which this shard does not know")


def _snapshot_to_proto(name: SnapshotName, problem: str = "", has_begun: bool = False) -> pb.SnapshotName:
    return pb.SnapshotName(
        run=name.run,
        server_incarnation=name.server_incarnation,
        version=name.version,
        problem=problem,
        has_begun=has_begun,
    )


def _snapshot_from_proto(message: pb.SnapshotName) -> SnapshotName:
    return SnapshotName(message.server_incarnation, message.version, message.run)


def _verdict_to_proto(judgement: Judgement) -> pb.Verdict:
    return pb.Verdict(
        action=judgement.action,
        what=judgement.what,
        limit=judgement.limit,
        is_clipped=judgement.is_clipped,
        norm=judgement.norm,
        scale=judgement.scale,
    )


def _verdict_from_proto(message: pb.Verdict) -> Judgement:
    if message.action not in _ACTIONS:
        raise refusal(Reason.BAD_REQUEST, f"a verdict '{message.action[:40]}'; known are {', '.join(_ACTIONS)}")
    action: Any = message.action
    return Judgement(action, message.what, message.limit, message.is_clipped, message.norm, message.scale)
