"""Which sinks a server has: the one place that names them all."""

from __future__ import annotations

from ...common.config.schema import Config
from ...common.security import split_address
from .bus import Bus, Sink
from .history import HistorySink
from .status_log import StatusSink


def make_bus(config: Config) -> Bus:
    """The bus of one server process. UsageError or OutputError for what cannot be."""
    sinks: list[Sink] = [StatusSink(config.log.format == "json")]
    # Of several shards the coordinator alone writes the history: all see the same facts.
    if config.output.history is not None and config.server.shard == 0:
        sinks.append(HistorySink(config.output.history))
    if config.server.metrics is not None:
        split_address(config.server.metrics)
        from .metrics import MetricsSink  # most servers run without, and without prometheus-client

        sinks.append(MetricsSink(config.server.metrics))
    return Bus(sinks)
