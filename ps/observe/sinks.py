"""Which sinks a server has, the one place that names them all; and the smallest of them."""

from __future__ import annotations

import sys

from ...common.config.schema import Config
from ...common.reporting.log import get_logger
from ...common.reporting.report import status_line
from ..core.effects import Fact, StatusTaken
from .bus import Bus, Sink
from .history import HistorySink

log = get_logger()


class StatusSink(Sink):
    """Where the run stands, on standard error: the event `status` for programs, the launcher's live view first; a line
    for people."""

    name = "status"
    does_io = True
    kinds = (StatusTaken,)

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json

    def take(self, at: float, fact: Fact) -> None:
        assert isinstance(fact, StatusTaken)
        if self._is_json:
            log.info("status", **fact.status.fields())
        elif fact.status.workers or fact.status.waiting:
            print(status_line(fact.status), file=sys.stderr)


def make_bus(config: Config) -> Bus:
    """The bus of one server process. UsageError or OutputError for what cannot be."""
    sinks: list[Sink] = [StatusSink(config.log.format == "json")]
    # Of several shards the coordinator alone writes the history: all see the same facts.
    if config.output.history is not None and config.server.shard == 0:
        sinks.append(HistorySink(config.output.history))
    if config.server.metrics is not None:
        from .metrics import MetricsSink  # most servers run without, and without prometheus-client

        sinks.append(MetricsSink(config.server.metrics))
    return Bus(sinks)
