"""The page with the run (`paramserver/web`), fed from the facts: once a status, whatever the number of contributions.

Here everything happens on the event loop and only counts; what a status comes to goes to the page's thread as a value
(`common/reporting/watched.py`), so that viewers can slow nothing. The page's packages are an extra, and are loaded
with `server.web` only.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.reporting.curve import Point
from ...common.reporting.watched import About, Happened, Snapshot, Span, Tick, Wait, Watched
from ...common.runstore.happenings import happened
from ...common.version import PROGRAM_VERSION
from ..core import controls
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
from ..core.events import Controlled
from ..engine.engine import Engine
from . import reports
from .bus import Sink
from .history import line_of

if TYPE_CHECKING:
    from ...web.serve import Page

_CONTROL_S = 10.0  # within which every shard has done what was asked
_MOST_SPANS = 4  # of a rank in one tick; more are added up


class PageSink(Sink):
    """Of one server process. UsageError when the page's packages are not installed."""

    name = "page"
    kinds = (RunStarted, Seated, WorkerLeft, ContributionTaken, SnapshotTaken, Evaluated, ControlTaken,
             StatusTaken, RunEnded)  # fmt: skip

    def __init__(self, config: Config) -> None:
        try:
            from ...web.serve import Page
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the page needs the package {error.name}, which is not installed",
                fix="pip install 'paramserver[web]'; or leave --web out",
            ) from None
        self._config = config
        self._page: Page = Page(config)
        self._streams = Streams()
        self._events: list[Happened] = []
        self._evaluations: list[Point] = []
        self._snapshots: list[Snapshot] = []
        self._started: RunStarted | None = None
        self._began_at = 0.0  # Unix seconds
        self._told: About | None = None
        self._busy_s = 0.0
        self._asked: dict[int, asyncio.Future[str]] = {}  # by number
        self._num_asked = 0
        self._has_snapshot = False

    def begin(self, engine: Engine) -> None:
        """Also listens: BindError when the address cannot be had, AuthError when it may not be."""
        self._engine = engine
        self._began, self._loop = engine.now(), asyncio.get_running_loop()
        self._page.start()
        engine.page = self._page.address
        if self._config.log.format == "text":
            print(f"the page: {self._page.url}", file=sys.stderr)
        if self._started is not None:
            self._show(self._started)

    def take(self, at: float, fact: Fact) -> None:
        match fact:
            case ContributionTaken():
                self._streams.add(at - self._began, fact)
            case ControlTaken():
                self._happened(fact)
                if self._started is not None and (about := self._about(self._started)) != self._told:
                    self._told = about
                    self._page.retell(about)
                self._controlled(fact)
            case StatusTaken():
                self._page.push(self._tick(fact))
            case RunEnded():
                if self._started is not None:
                    self._happened(fact, reason=self._engine.run.ended_by)
                    self._page.push(self._tick(StatusTaken(reports.status(self._engine)), is_over=True))
            case RunStarted():
                self._began_at = time.time()
                self._has_snapshot |= fact.source is not None
                self._started = fact  # of one process before `begin`, of several shards after it
                self._happened(fact)
                if self._page.address:
                    self._show(fact)
            case WorkerLeft():
                self._happened(fact, reason=fact.reason)
            case Evaluated():
                fields = {"step": fact.step, "figures": fact.figures, "best": fact.is_best}
                self._events.append(happened(time.time(), "evaluated", None, fields))
                self._evaluations.append(reports.with_bytes(self._engine, self._engine.run.curve.points[-1]))
            case SnapshotTaken():
                self._happened(fact)
                self._has_snapshot = True
                self._snapshots.append(Snapshot(version=fact.version, at=time.time(), path=fact.path))
            case _:
                self._happened(fact)

    def close(self) -> None:
        self._page.close()

    def _show(self, fact: RunStarted) -> None:
        self._told = about = self._about(fact)
        evaluations = [reports.with_bytes(self._engine, point) for point in self._engine.run.curve.points]
        self._page.begin(Watched(about=about, evaluations=evaluations), self._control, fact.version)

    def _about(self, fact: RunStarted) -> About:
        """With the mode and the settings of now, and what may be asked of it."""
        config, run = self._config, self._engine.run
        settings = config.model_dump(mode="json", exclude={"security"})
        settings["run"]["mode"] = run.mode
        settings["policy"] |= {name: value for name, (_, value) in run.changed.items()}
        options = type(run.policy).told(run.policy.options)
        return About(
            label=f"{run.mode} ({options})" if options else run.mode, lr_scale=run.contributions.lr_scale,
            run=fact.run, mode=run.mode, task=config.task.name or "", started=self._began_at, settings=settings,
            server_incarnation=fact.server_incarnation, version=PROGRAM_VERSION, controls=controls.offered(run),
        )  # fmt: skip

    # ---- controls --------------------------------------------------------------------------

    async def _control(self, asked: dict[str, Any]) -> str:
        """In the page's thread: what came of it. ValueError with why nothing did."""
        event = read_control(asked)
        answer = asyncio.run_coroutine_threadsafe(self._ask(event), self._loop)
        return await asyncio.wrap_future(answer)

    async def _ask(self, event: Controlled) -> str:
        self._num_asked += 1
        event.number = number = self._num_asked
        self._asked[number] = told = asyncio.get_running_loop().create_future()
        self._engine.offer(event)
        try:
            return await asyncio.wait_for(told, _CONTROL_S)
        except TimeoutError:
            raise ValueError(f"not every shard has heard of it within {_CONTROL_S:g} s; see the events") from None
        finally:
            del self._asked[number]

    def _controlled(self, fact: ControlTaken) -> None:
        waiting = self._asked.get(fact.number)
        if waiting is not None and not waiting.done():
            if fact.is_done:
                waiting.set_result(fact.told)
            else:
                waiting.set_exception(ValueError(fact.told))

    # ---- what is told ----------------------------------------------------------------------

    def _happened(self, fact: Fact, **more: str) -> None:
        kind, fields = line_of(fact)
        self._events.append(happened(time.time(), kind, fields.get("rank"), fields | more))

    def _tick(self, taken: StatusTaken, is_over: bool = False) -> Tick:
        engine, status = self._engine, taken.status
        events, self._events = self._events, []
        evaluations, self._evaluations = self._evaluations, []
        snapshots, self._snapshots = self._snapshots, []
        clock_s = engine.now() - self._began
        return Tick(
            at=time.time(),
            clock_s=clock_s,
            status=status,
            totals=reports.totals(engine, status),
            staleness=dict(engine.run.contributions.staleness),
            durable_version=engine.durable_version if self._has_snapshot else None,
            waits=self._waits(status.workers),
            spans=[*self._streams.taken(), *self._applied(clock_s)],
            events=events,
            evaluations=evaluations,
            snapshots=snapshots,
            is_over=is_over,
        )

    def _waits(self, workers: list[reports.WorkerStatus]) -> list[Wait]:
        waiting = [worker for worker in workers if worker.waiting_for]
        holders = self._engine.run.policy.holders() if waiting else ()
        return [
            Wait(rank=one.rank, ranks=[rank for rank in holders if rank != one.rank], why=one.waiting_for)
            for one in waiting
        ]

    def _applied(self, clock_s: float) -> list[Span]:
        busy_s, self._busy_s = self._engine.tensors.busy_s - self._busy_s, self._engine.tensors.busy_s
        return [Span(rank=-1, begin_s=round(clock_s - busy_s, 4), apply_s=round(busy_s, 4))] if busy_s > 0 else []


def read_control(asked: dict[str, Any]) -> Controlled:
    """ValueError for what cannot be meant."""
    known = ("do", "rank", "name", "value")
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"'{unknown[0][:40]}' means nothing here; known: {', '.join(known)}")
    do, rank, name, value = asked.get("do"), asked.get("rank"), asked.get("name", ""), asked.get("value")
    if not isinstance(do, str) or not isinstance(name, str):
        raise ValueError("do and name are text")
    if rank is not None and type(rank) is not int:
        raise ValueError(f"rank is a whole number, got {rank!r:.40}")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError("value is a number, text, true, false or null")
    return Controlled(do, rank, name, value)


class Streams:
    """What the time of each rank went to, between one contribution and the next; pure. Called for every contribution:
    plain lists, of which models are made when somebody asks."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # by rank
        self._spans: dict[int, list[list[float]]] = {}  # begin, wait, transfer, compute

    def add(self, now_s: float, fact: ContributionTaken) -> None:
        """Its exchange before and its computing have ended now. Where both went on side by side (pipelined), each has
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
        """Since it was asked last."""
        ranks, self._spans = self._spans, {}
        return [
            Span.model_construct(
                rank=rank, begin_s=round(begin_s, 4), wait_s=round(wait_s, 4), transfer_s=round(transfer_s, 4),
                compute_s=round(compute_s, 4), apply_s=0.0,
            )
            for rank, spans in ranks.items()
            for begin_s, wait_s, transfer_s, compute_s in spans
        ]  # fmt: skip
