"""Which sinks a server has, the one place that names them all; and the smallest of them."""

from __future__ import annotations

import sys

from ...common.config.schema import Config
from ...common.reporting.curve import Point
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_curve
from ...common.reporting.panel import TerminalConsole, live_panel
from ...common.reporting.report import status_line
from ...common.reporting.status import Status
from ..core.effects import Evaluated, Fact, StatusTaken
from ..engine.engine import Engine
from .bus import Bus, Sink
from .history import HistorySink
from .recording import RecordingSink
from .ticks import TickSink

log = get_logger()

_LINE_INTERVAL_S = 5.0  # between lines for people to read


class StatusSink(Sink):
    """Where the run stands, on standard error: the event `status` for programs, the launcher's live view first; a line
    for people."""

    name = "status"
    does_io = True
    kinds = (StatusTaken,)

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._said_at = -_LINE_INTERVAL_S

    def take(self, at: float, fact: Fact) -> None:
        assert isinstance(fact, StatusTaken)
        if self._is_json:
            log.info("status", **fact.status.fields())
        elif (fact.status.workers or fact.status.waiting) and at - self._said_at >= 0.9 * _LINE_INTERVAL_S:
            self._said_at = at
            print(status_line(fact.status), file=sys.stderr)


class CurveSink(Sink):
    """All evaluations in a file, those before a resume included."""

    name = "curve"
    does_io = True
    kinds = (Evaluated,)

    def __init__(self, path: str) -> None:
        self._path = path
        self._points: list[Point] = []

    def begin(self, engine: Engine) -> None:
        self._points = list(engine.run.curve.points)

    def take(self, at: float, fact: Fact) -> None:
        assert isinstance(fact, Evaluated)
        point = Point(step=fact.step, version=fact.version, elapsed_s=fact.elapsed_s, metrics=fact.metrics)
        self._points.append(point)

    def flush(self) -> None:
        write_curve(self._path, self._points)


class LiveSink(Sink):
    """Where the run stands, as a table at the bottom of the terminal; the log scrolls above it."""

    name = "status"
    does_io = True
    kinds = (StatusTaken,)

    def __init__(self, console: TerminalConsole) -> None:
        self._latest: Status | None = None
        self._live = live_panel(console, lambda: self._latest, redirects=True)

    def take(self, at: float, fact: Fact) -> None:
        assert isinstance(fact, StatusTaken)
        if fact.status.workers or fact.status.waiting:
            self._latest = fact.status
            self._live.start()

    def flush(self) -> None:
        if self._latest is not None:
            self._live.refresh()

    def close(self) -> None:
        self._live.stop()


def _tracker(name: str, config: Config) -> Sink:
    from .trackers.base import TrackerSink

    return TrackerSink(name, config)


def make_bus(config: Config) -> Bus:
    """The bus of one server process. UsageError or OutputError for what cannot be."""
    console = TerminalConsole()
    is_live = config.log.format == "text" and console.can_redraw
    sinks: list[Sink] = [LiveSink(console) if is_live else StatusSink(config.log.format == "json")]
    # Of several shards the coordinator alone writes the history: all see the same facts.
    if config.output.history is not None and config.server.shard == 0:
        sinks.append(HistorySink(config.output.history))
    if config.output.curve is not None and config.server.shard == 0:
        sinks.append(CurveSink(config.output.curve))
    if config.server.shard == 0:
        if config.output.store or config.server.web is not None:
            sinks.append(TickSink(draws_time=config.server.web is not None))
        sinks += [RecordingSink(config)] if config.output.store else []
        sinks += [_tracker(name, config) for name in config.output.trackers]
    if config.server.metrics is not None:
        from .metrics import MetricsSink  # most servers run without, and without prometheus-client

        sinks.append(MetricsSink(config.server.metrics))
    if config.output.traces is not None and config.server.shard == 0:
        from .tracing import TracingSink

        sinks.append(TracingSink(config.output.traces))
    if config.server.web is not None and config.server.shard == 0:
        from .dashboard import DashboardSink

        sinks.append(DashboardSink(config))
    return Bus(sinks)
