"""The list of a server's sinks, and the smallest of them."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.reporting.curve import Point
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_curve
from ...common.reporting.report import TerminalConsole, live_panel, status_line
from ...common.reporting.summary import About, EvaluatedPoint, Event, Snapshot, Span, Status, Tick, View, Wait, event
from ...common.runstore.record import Ran, Record
from ...common.version import PROGRAM_VERSION
from ..core import controls, effects
from ..core.effects import ControlTaken, Fact, MetricsTaken, RunStarted, StatusTaken
from ..core.events import Controlled
from ..engine.engine import Engine
from . import reports
from .bus import Bus, Sink
from .history import HistorySink, line_of

if TYPE_CHECKING:
    from ...web.app import Dashboard


# ---- ticks ----------------------------------------------------------------------------------------
# Collects the facts between two statuses into a `Tick` (`common/reporting/summary.py`), and records the ticks of a run.
#
# The dashboard (`DashboardSink`) and the run store (`common/runstore`) get the ticks.
#
# This runs on the event loop and only counts. Each status makes one tick, for any number of contributions. A tick is an
# immutable value that other threads use, so neither viewers nor a disk can slow the run.


_MOST_SPANS = 4  # spans of a rank in one tick; further spans are added to the last


@dataclass(slots=True)
class TickTaken(effects.Fact):
    """The fact that a status was taken. The tick has the status, and the facts since the previous tick."""

    tick: Tick
    ran: Ran


class TickSink(Sink):
    """Publishes a tick for each status, and one at the end of the run."""

    name = "ticks"
    kinds = (
        effects.RunStarted, effects.Seated, effects.WorkerLeft, effects.SnapshotTaken, effects.MetricsTaken,
        effects.ControlTaken, effects.StatusTaken, effects.RunEnded,
    )  # fmt: skip

    def __init__(self, draws_time: bool) -> None:
        """`draws_time`: collect every contribution, for the dashboard's time line of workers."""
        if draws_time:
            self.kinds = (*TickSink.kinds, effects.ContributionTaken)  # type: ignore[misc, assignment]  # of this sink
        self._timeline = Timeline()
        self._events: list[Event] = []
        self._evaluations: list[EvaluatedPoint] = []
        self._snapshots: list[Snapshot] = []
        self._busy_s = 0.0
        self._has_snapshot = False

    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        self._tensors = engine.tensors
        self._began, self._unix_s = engine.now(), time.time() - engine.now()  # offset of Unix time to a fact's time

    def take(self, at: float, fact: effects.Fact) -> None:
        match fact:
            case effects.ContributionTaken():
                self._timeline.add(at - self._began, fact)
            case effects.StatusTaken(status):
                self._publish(at, status)
            case effects.RunEnded():
                self._add_event(at, fact, reason=self._run.ended_by)
                self._publish(at, reports.status(self._engine), is_over=True)
            case effects.WorkerLeft():
                self._add_event(at, fact, reason=fact.reason)
            case effects.MetricsTaken(found, is_best):
                point = found.model_dump()
                self._evaluations.append(EvaluatedPoint(**point, is_best=is_best))
                self._events.append(event(at + self._unix_s, "evaluated", None, {**point, "best": is_best}))
            case effects.SnapshotTaken(version, _, path, sha256):
                self._has_snapshot = True
                self._snapshots.append(Snapshot(version=version, at=at + self._unix_s, path=path, sha256=sha256))
                self._add_event(at, fact)
            case _:
                if isinstance(fact, effects.RunStarted):
                    self._has_snapshot |= fact.source is not None
                self._add_event(at, fact)

    def _add_event(self, at: float, fact: effects.Fact, **more: str) -> None:
        kind, fields = line_of(fact)
        self._events.append(event(at + self._unix_s, kind, fields.pop("rank", None), fields | more))

    def _publish(self, at: float, status: Status, is_over: bool = False) -> None:
        engine = self._engine
        clock_s, total_s = engine.now() - self._began, self._tensors.busy_s
        spans, busy_s, self._busy_s = self._timeline.taken(), total_s - self._busy_s, total_s
        if busy_s > 0:  # the server's tensor work since the last tick, as one span
            spans.append(Span(rank=-1, begin_s=round(clock_s - busy_s, 4), apply_s=round(busy_s, 4)))
        waiting = [worker for worker in status.workers if worker.waiting_for]
        holders = self._run.policy.holders() if waiting else ()
        tick = Tick(
            at=at + self._unix_s,
            clock_s=clock_s,
            status=status,
            cost=reports.cost(engine, status),
            final=dict(self._run.final),
            staleness=dict(self._run.contributions.staleness),
            durable_version=self._run.rhythm.durable_version if self._has_snapshot else None,
            waits=[
                Wait(rank=worker.rank, ranks=[rank for rank in holders if rank != worker.rank], why=worker.waiting_for)
                for worker in waiting
            ],
            spans=spans,
            events=self._events,
            evaluations=self._evaluations,
            snapshots=self._snapshots,
            is_over=is_over,
        )
        self._events, self._evaluations, self._snapshots = [], [], []
        engine.publish(at, TickTaken(tick, reports.ran(engine)))


class RecordingSink(Sink):
    """Records the run once its first worker joins. A run without workers is not recorded."""

    name = "store"
    does_io = True
    kinds = (effects.RunStarted, TickTaken)
    close_s = 10.0
    capacity = 1_000  # ticks of 64 workers

    def __init__(self, config: Config) -> None:
        self._config = config
        self._record: Record | None = None
        self._events: list[Event] = []  # events before the first worker
        self._last: Tick | None = None  # the last tick, once the run is over

    def take(self, at: float, fact: effects.Fact) -> None:
        if isinstance(fact, effects.RunStarted):
            self._started = fact
            return
        assert isinstance(fact, TickTaken)
        tick = fact.tick
        if self._record is None:
            self._events += tick.events
            if not tick.status.num_ranks:
                return
            started = self._started
            self._record = Record(self._config, run=started.run, mode=started.mode, at_version=started.version)
            tick = tick.model_copy(update={"events": self._events})
        self._record.ran = fact.ran
        model = self._model  # may be read on this thread, because it is set only once
        self._record.model = model.whole.fingerprint if model.has_model else ""
        if tick.is_over:
            self._last = tick
        else:
            self._record.add(tick)

    def flush(self) -> None:
        if self._record is not None:
            self._record.flush()

    def close(self) -> None:
        """Record the results. The event loop waits for this thread, so the run no longer changes."""
        if self._record is not None:
            last = self._last or Tick(at=time.time(), status=reports.status(self._engine))
            summary, is_stopped = reports.summary(self._engine), not self._engine.finished.done()
            self._record.end(last, summary, summary.ended_by or ("its server was told to stop" if is_stopped else ""))


class Timeline:
    """Divides the time of each rank between two contributions into waiting, transfer and computing. Pure.

    It is called for every contribution, so it keeps plain lists, and makes Span objects only for a status.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # the end of each rank's last span
        self._spans: dict[int, list[list[float]]] = {}  # by rank: begin, wait, transfer, compute

    def add(self, now_s: float, fact: effects.ContributionTaken) -> None:
        """Add the previous exchange and the computing of a contribution that arrived at `now_s`.

        If they overlap (delayed update), they are scaled to the time since the last contribution.
        """
        rank, timing = fact.contribution.id.rank, fact.contribution.timing
        parts = [0.0, 0.0, max(0.0, timing.compute_s)]
        begin_s = self._until.get(rank, -1.0)
        if fact.exchange_s < 0 or begin_s < 0:  # the first of a process
            begin_s = now_s - parts[2]
        else:
            parts[:2] = max(0.0, fact.exchange_s - timing.transfer_s), max(0.0, timing.transfer_s)
        self._until[rank] = now_s
        total_s = sum(parts)
        scale = min(1.0, (now_s - begin_s) / total_s) if total_s > 0 else 0.0
        spans = self._spans.setdefault(rank, [])
        if len(spans) < _MOST_SPANS:
            spans.append([begin_s, 0.0, 0.0, 0.0])
        for index, seconds in enumerate(parts, start=1):
            spans[-1][index] += seconds * scale

    def taken(self) -> list[Span]:
        """Return the spans since the last call."""
        ranks, self._spans = self._spans, {}
        return [
            Span.model_construct(rank=rank, begin_s=begin_s, wait_s=wait_s, transfer_s=transfer_s, compute_s=compute_s)
            for rank, spans in ranks.items()
            for begin_s, wait_s, transfer_s, compute_s in ([round(seconds, 4) for seconds in span] for span in spans)
        ]


# ---- dashboard -----------------------------------------------------------------------------------
# The sink for the dashboard of a run (`paramserver/web`), and the controls that the dashboard sends to the run.
#
# The dashboard runs on its own thread. Its packages are an extra, and are loaded only with `server.web`.


_CONTROL_S = 10.0  # time limit for every shard to carry out a control


class DashboardSink(Sink):
    """Shows the run on the dashboard. Raises UsageError if the dashboard's packages are not installed."""

    name = "dashboard"
    kinds = (RunStarted, ControlTaken, TickTaken)

    def __init__(self, config: Config) -> None:
        try:
            from ...web.app import Dashboard
        except ModuleNotFoundError as error:
            problem = f"the dashboard needs the package {error.name}, which is not installed"
            raise UsageError(problem, fix="pip install 'paramserver[web]'; or leave --web out") from None
        self._is_shown = config.log.format == "text"
        self._dashboard: Dashboard = Dashboard(config)
        self._about: About | None = None
        self._requests: dict[int, asyncio.Future[str]] = {}  # controls without an outcome, by number
        self._numbers = count(1)  # of controls

    def begin(self, engine: Engine) -> None:
        """Start the dashboard. Raises BindError for an unavailable address, and AuthError for an unsafe one."""
        super().begin(engine)
        self._loop = asyncio.get_running_loop()
        self._dashboard.start()
        engine.dashboard = self._dashboard.address
        if self._is_shown:
            print(f"the dashboard: {self._dashboard.url}", file=sys.stderr)

    def take(self, at: float, fact: Fact) -> None:
        match fact:
            case TickTaken(tick):
                self._look_again()  # the first contribution says what runs
                self._dashboard.push(tick)
            case RunStarted():
                self._about = self._about_run(time.time())
                evaluations = [EvaluatedPoint(**point.model_dump()) for point in self._run.curve.points]
                self._dashboard.begin(View(about=self._about, evaluations=evaluations), self._control, fact.version)
            case ControlTaken():
                self._look_again()
                outcome = self._requests.get(fact.event.number)
                if outcome is not None and not outcome.done():
                    if fact.is_done:
                        outcome.set_result(fact.result)
                    else:
                        outcome.set_exception(ValueError(fact.result))

    def _look_again(self) -> None:
        if (before := self._about) is not None:
            self._about = self._about_run(before.started)
            if self._about != before:
                self._dashboard.retell(self._about)

    def close(self) -> None:
        self._dashboard.close()

    def _about_run(self, started: float) -> About:
        """Return a description of the run: mode, settings and controls. `started` is in Unix seconds."""
        run, ran = self._run, reports.ran(self._engine)
        options = type(run.policy).summary(run.policy.options)
        return About(
            label=f"{run.mode} ({options})" if options else run.mode, lr_scale=run.contributions.lr_scale,
            run=run.name, mode=run.mode, task=ran.work, started=started, settings=ran.settings,
            server_incarnation=run.incarnation, version=PROGRAM_VERSION, controls=controls.offered(run),
        )  # fmt: skip

    # ---- controls --------------------------------------------------------------------------

    async def _control(self, fields: dict[str, Any]) -> str:
        """On the dashboard's thread: carry out a control, and return the outcome as a sentence.

        Raises ValueError if the control was not carried out.
        """
        known = ("do", "rank", "name", "value")
        if unknown := [name for name in fields if name not in known]:
            raise ValueError(f"unknown field '{unknown[0][:40]}'; known: {', '.join(known)}")
        do, rank, name, value = fields.get("do"), fields.get("rank"), fields.get("name", ""), fields.get("value")
        if not isinstance(do, str) or not isinstance(name, str):
            raise ValueError("do and name are text")
        if rank is not None and type(rank) is not int:
            raise ValueError(f"rank is a whole number, got {rank!r:.40}")
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError("value is a number, text, true, false or null")
        request = asyncio.run_coroutine_threadsafe(self._request(Controlled(do, rank, name, value)), self._loop)
        return await asyncio.wrap_future(request)

    async def _request(self, event: Controlled) -> str:
        event.number = number = next(self._numbers)
        self._requests[number] = outcome = asyncio.get_running_loop().create_future()
        self._engine.offer(event)
        try:
            return await asyncio.wait_for(outcome, _CONTROL_S)
        except TimeoutError:
            raise ValueError(f"not every shard has received it within {_CONTROL_S:g} s; see the events") from None
        finally:
            del self._requests[number]


log = get_logger()

_LINE_INTERVAL_S = 5.0  # seconds between status lines as text


class StatusSink(Sink):
    """Writes the status to standard error, as a JSON event for programs such as the launcher, or as a text line."""

    name = "status"
    does_io = True
    kinds = (StatusTaken,)

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._written_at = -_LINE_INTERVAL_S

    def take(self, at: float, fact: Fact) -> None:
        assert isinstance(fact, StatusTaken)
        if self._is_json:
            log.info("status", **fact.status.fields())
        elif (fact.status.workers or fact.status.waiting) and at - self._written_at >= 0.9 * _LINE_INTERVAL_S:
            self._written_at = at
            print(status_line(fact.status), file=sys.stderr)


class CurveSink(Sink):
    """Writes all evaluations to a file, also those from before a resume."""

    name = "curve"
    does_io = True
    kinds = (MetricsTaken,)

    def __init__(self, path: str) -> None:
        self._path = path
        self._points: list[Point] = []

    def begin(self, engine: Engine) -> None:
        self._points = list(engine.run.curve.points)

    def take(self, at: float, fact: Fact) -> None:
        assert isinstance(fact, MetricsTaken)
        self._points.append(fact.point)

    def flush(self) -> None:
        write_curve(self._path, self._points)


class LiveSink(Sink):
    """Shows the status as a table at the bottom of the terminal; the log scrolls above it."""

    name = "status"
    does_io = True
    kinds = (StatusTaken,)

    def __init__(self, console: TerminalConsole) -> None:
        self._latest: Status | None = None
        self._live = live_panel(console, lambda: self._latest, redirects=True)

    def take(self, at: float, fact: Fact) -> None:
        if isinstance(fact, StatusTaken) and (fact.status.workers or fact.status.waiting):
            self._latest = fact.status
            self._live.start()

    def flush(self) -> None:
        if self._latest is not None:
            self._live.refresh()

    def close(self) -> None:
        self._live.stop()


def make_bus(config: Config) -> Bus:
    """Return the bus of one server process. Raises UsageError or OutputError if a sink cannot start."""
    console, output, server = TerminalConsole(), config.output, config.server
    is_live = config.log.format == "text" and console.is_terminal and not console.is_dumb_terminal
    sinks: list[Sink] = [LiveSink(console) if is_live else StatusSink(config.log.format == "json")]
    # Packages that few servers need are imported only here.
    if server.metrics is not None:
        from .metrics import MetricsSink

        sinks.append(MetricsSink(server.metrics))
    if server.shard != 0:  # shard 0 records the facts, which are equal on all shards
        return Bus(sinks)
    if output.history is not None:
        sinks.append(HistorySink(output.history))
    if output.curve is not None:
        sinks.append(CurveSink(output.curve))
    if output.store or server.web is not None:
        sinks.append(TickSink(draws_time=server.web is not None))
    if output.store:
        sinks.append(RecordingSink(config))
    if output.trackers:
        from .trackers.base import TrackerSink

        sinks += [TrackerSink(name, config) for name in output.trackers]
    if output.traces is not None:
        from .tracing import TracingSink

        sinks.append(TracingSink(output.traces))
    if server.web is not None:
        sinks.append(DashboardSink(config))
    return Bus(sinks)
