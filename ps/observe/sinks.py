"""The list of a server's sinks, and the smallest of them."""

from __future__ import annotations

import sys

from ...common.config.schema import Config
from ...common.reporting.curve import Point
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_curve
from ...common.reporting.report import TerminalConsole, live_panel, status_line
from ...common.reporting.summary import Status
from ..core.effects import Fact, MetricsTaken, StatusTaken
from ..engine.engine import Engine
from .bus import Bus, Sink
from .history import HistorySink
from .ticks import RecordingSink, TickSink

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
        from .ticks import DashboardSink

        sinks.append(DashboardSink(config))
    return Bus(sinks)
