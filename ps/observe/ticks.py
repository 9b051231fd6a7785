"""Gathers what happens between two statuses into a `Tick` (`common/reporting/view.py`), for the page and the run store.

The work happens on the event loop and only counts: once a status, whatever the number of contributions. The tick is a
value, so that neither viewers nor a disk can slow the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...common.reporting.happenings import event
from ...common.reporting.status import Status, WorkerStatus
from ...common.reporting.view import EvaluatedPoint, Event, Snapshot, Span, Tick, Wait
from ..core.effects import (
    ContributionTaken,
    ControlTaken,
    Evaluated,
    Fact,
    RunEnded,
    RunStarted,
    Seated,
    SnapshotTaken,
    StatusTaken,
    WorkerLeft,
)
from ..engine.engine import Engine
from . import reports
from .bus import Sink
from .history import line_of

_MOST_SPANS = 4  # of a rank in one tick; more are added up


@dataclass(slots=True)
class TickTaken(Fact):
    """A status was taken; the tick has it, and what happened since the one before."""

    tick: Tick


class TickSink(Sink):
    """Of one server process. Publishes a tick for each status, and one at the end of the run."""

    name = "ticks"
    kinds = (RunStarted, Seated, WorkerLeft, SnapshotTaken, Evaluated, ControlTaken, StatusTaken, RunEnded)

    def __init__(self, draws_time: bool) -> None:
        """`draws_time`: somebody looks at the time line of workers, which needs every contribution."""
        if draws_time:
            self.kinds = (*TickSink.kinds, ContributionTaken)  # type: ignore[misc, assignment]  # of this sink
        self._engine: Engine | None = None
        self._before_begin: list[tuple[float, Fact]] = []
        self._timeline = Timeline()
        self._events: list[Event] = []
        self._evaluations: list[EvaluatedPoint] = []
        self._snapshots: list[Snapshot] = []
        self._busy_s = 0.0
        self._has_snapshot = False

    def begin(self, engine: Engine) -> None:
        self._engine = engine
        self._began, self._unix_s = engine.now(), time.time() - engine.now()  # added to a fact's time
        for at, fact in self._before_begin:
            self._take(engine, at, fact)

    def take(self, at: float, fact: Fact) -> None:
        if self._engine is None:
            self._before_begin.append((at, fact))
        else:
            self._take(self._engine, at, fact)

    def _take(self, engine: Engine, at: float, fact: Fact) -> None:
        match fact:
            case ContributionTaken():
                self._timeline.add(at - self._began, fact)
            case StatusTaken(status):
                self._publish(engine, at, status)
            case RunEnded():
                self._add_event(at, fact, reason=engine.run.ended_by)
                self._publish(engine, at, reports.status(engine), is_over=True)
            case WorkerLeft():
                self._add_event(at, fact, reason=fact.reason)
            case Evaluated():
                point = reports.with_bytes(engine, engine.run.curve.points[-1])
                self._evaluations.append(EvaluatedPoint(**point.model_dump(), is_best=fact.is_best))
                fields = {**point.model_dump(), "best": fact.is_best}
                self._events.append(event(at + self._unix_s, "evaluated", None, fields))
            case SnapshotTaken():
                self._has_snapshot = True
                self._snapshots.append(
                    Snapshot(version=fact.version, at=at + self._unix_s, path=fact.path, sha256=fact.sha256)
                )
                self._add_event(at, fact)
            case RunStarted():
                self._has_snapshot |= fact.source is not None
                self._add_event(at, fact)
            case _:
                self._add_event(at, fact)

    def _add_event(self, at: float, fact: Fact, **more: str) -> None:
        kind, fields = line_of(fact)
        self._events.append(event(at + self._unix_s, kind, fields.pop("rank", None), fields | more))

    def _publish(self, engine: Engine, at: float, status: Status, is_over: bool = False) -> None:
        clock_s = engine.now() - self._began
        tick = Tick(
            at=at + self._unix_s,
            clock_s=clock_s,
            status=status,
            cost=reports.cost(engine, status.elapsed_s, status.wait_share, status.samples),
            final=dict(engine.run.final),
            staleness=dict(engine.run.contributions.staleness),
            durable_version=engine.durable_version if self._has_snapshot else None,
            waits=_waits(engine, status.workers),
            spans=[*self._timeline.taken(), *self._applied(engine, clock_s)],
            events=self._events,
            evaluations=self._evaluations,
            snapshots=self._snapshots,
            is_over=is_over,
        )
        self._events, self._evaluations, self._snapshots = [], [], []
        engine.publish(at, TickTaken(tick))

    def _applied(self, engine: Engine, clock_s: float) -> list[Span]:
        busy_s, self._busy_s = engine.tensors.busy_s - self._busy_s, engine.tensors.busy_s
        return [Span(rank=-1, begin_s=round(clock_s - busy_s, 4), apply_s=round(busy_s, 4))] if busy_s > 0 else []


def _waits(engine: Engine, workers: list[WorkerStatus]) -> list[Wait]:
    waiting = [worker for worker in workers if worker.waiting_for]
    holders = engine.run.policy.holders() if waiting else ()
    return [
        Wait(rank=worker.rank, ranks=[rank for rank in holders if rank != worker.rank], why=worker.waiting_for)
        for worker in waiting
    ]


class Timeline:
    """Where the time of each rank went, between one contribution and the next; pure.

    It is called for every contribution: it keeps plain lists, and makes models of them when a status is taken.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # by rank
        self._spans: dict[int, list[list[float]]] = {}  # begin, wait, transfer, compute

    def add(self, now_s: float, fact: ContributionTaken) -> None:
        """Its exchange before and its computing have ended now. Where both went on side by side (delayed_update), each
        has
        its share of the time between."""
        rank, timing = fact.contribution.id.rank, fact.contribution.timing
        compute_s = max(0.0, timing.compute_s)
        until = self._until.get(rank)
        if fact.exchange_s < 0 or until is None:  # the first of a process
            wait_s = transfer_s = 0.0
            begin_s = now_s - compute_s
        else:
            transfer_s = max(0.0, timing.transfer_s)
            wait_s = max(0.0, fact.exchange_s - timing.transfer_s)
            begin_s = until
        self._until[rank] = now_s
        total = wait_s + transfer_s + compute_s
        scale = min(1.0, (now_s - begin_s) / total) if total > 0 else 0.0
        spans = self._spans.setdefault(rank, [])
        if len(spans) < _MOST_SPANS:
            spans.append([begin_s, wait_s * scale, transfer_s * scale, compute_s * scale])
            return
        last = spans[-1]
        last[1] += wait_s * scale
        last[2] += transfer_s * scale
        last[3] += compute_s * scale

    def taken(self) -> list[Span]:
        """The spans since the last call."""
        ranks, self._spans = self._spans, {}
        return [
            Span.model_construct(
                rank=rank, begin_s=round(begin_s, 4), wait_s=round(wait_s, 4), transfer_s=round(transfer_s, 4),
                compute_s=round(compute_s, 4), apply_s=0.0,
            )
            for rank, spans in ranks.items()
            for begin_s, wait_s, transfer_s, compute_s in spans
        ]  # fmt: skip
