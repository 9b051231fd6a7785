"""Metrics for Prometheus. Counters count facts, and gauges read the run at each scrape.

A counter starts at zero in each process, also if the run resumes from a snapshot. If a restored counter were lower than
before, Prometheus would count its whole value again.

prometheus-client replies over plain HTTP at any path to every caller, even if workers need TLS and a token. The metrics
are not secret, and a scrape changes nothing. The cost is bounded: at most a few connections at once, each silent for a
few seconds, and a few reads of the run per second.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from socketserver import ThreadingTCPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, MetricsHandler, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from ...common.config.addresses import is_loopback, join_address, split_address
from ...common.errors import BindError
from ...common.reporting.log import get_logger
from ...common.reporting.metrics import Display, Fold, Tense, Value, shown_of_run, shown_of_workers, values_of
from ...common.version import PROGRAM_VERSION
from ..core.effects import Commit, ContributionTaken, Fact, Seated, SnapshotTaken, WorkerLeft
from ..engine.engine import Engine
from .bus import Sink
from .reports import sources, state_of

log = get_logger()

OUTCOMES = ("accepted", "dropped", "rejected", "repeated", "skipped", "refused")
DEPARTURES = ("goodbye", "closed", "lease", "replaced")
JOINS = ("first", "again", "resumed")
STATES = ("joining", "waiting", "uploading", "computing", "away", "finished")

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
_CONTRIBUTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

_MAX_CONNECTIONS = 16
_SILENT_S = 5.0  # limit for a silent connection, and for a reply of the event loop
_FRESH_S = 0.2  # a scrape gets the previous values if they are not older
_AT_A_TIME = 250  # ranks that are read in one turn of the event loop, in less than a millisecond

# A rank, its values by name of the metric, and its state.
RankRead = tuple[int, dict[str, Value], str]

# Avoids a second series for each counter. process_start_time_seconds has the same value.
prometheus_client.disable_created_metrics()


class MetricsSink(Sink, Collector):
    """Counts facts, and serves scrapes at `address` (HOST:PORT)."""

    name = "metrics"

    def __init__(self, address: str) -> None:
        self._address = address
        self.server: _HttpServer | None = None  # while it listens
        self._snapshot_at: float | None = None  # Unix time of the newest snapshot, or of the start
        self._lock = Lock()  # of the next two, which threads of HTTP use
        self._newest: tuple[list[PrometheusMetric], list[RankRead]] = [], []
        self._read_at = -_FRESH_S
        self.registry = registry = CollectorRegistry()  # read on the event loop only
        self._joins = _counter(registry, "joins", "Workers let in: at first, again, or resumed", kind=JOINS)
        self._departures = _counter(registry, "departures", "Workers gone, and how", how=DEPARTURES)
        self._contributions = _counter(registry, "contributions", "What became of each", outcome=OUTCOMES)
        self._updates = _counter(registry, "updates", "Versions of the weights made; rounds, where there are")
        histogram = partial(Histogram, namespace="paramserver", registry=registry)
        self._in_update = histogram("update_contributions", "Contributions in one update", buckets=_CONTRIBUTIONS)
        about = "Versions an accepted contribution was behind"
        self._staleness = histogram("staleness_versions", about, buckets=_VERSIONS)
        about = "From a contribution's departure to its reply, as measured by the worker"
        self._exchanges = histogram("exchange_seconds", about, buckets=_SECONDS)

    def begin(self, engine: Engine) -> None:
        """Start to listen. Raises BindError."""
        super().begin(engine)
        self._config = engine.config
        self._loop = asyncio.get_running_loop()
        self._at_start = {rank: _values(engine, rank) for rank in self._run.roster.stats}  # not changed later
        if self._config.checkpoint.dir is not None:
            self._snapshot_at = time.time()
            with suppress(OSError):
                self._snapshot_at = os.stat(self._model.source).st_mtime
        shown = CollectorRegistry()
        shown.register(self)
        ProcessCollector(registry=shown)
        self.server = _HttpServer(self._address, shown)

    def take(self, at: float, fact: Fact) -> None:
        match fact:
            case ContributionTaken():
                self._contributions.labels(fact.outcome).inc()
                if fact.outcome == "accepted":
                    self._staleness.observe(max(0, fact.version - fact.contribution.base.version))
                if fact.exchange_s >= 0:
                    self._exchanges.observe(fact.exchange_s)
            case Commit():
                self._updates.inc()
                self._in_update.observe(len(fact.contributions))
            case Seated():
                kind = "resumed" if fact.is_resumed else "first" if fact.incarnation == 1 else "again"
                self._joins.labels(kind).inc()
            case WorkerLeft():
                self._departures.labels(fact.how).inc()
            case SnapshotTaken():
                self._snapshot_at = time.time()

    def close(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    # ---- the run at the moment of the scrape --------------------------------------------------------

    def collect(self) -> Iterator[PrometheusMetric]:
        """On a thread of HTTP: yield the metrics, which the event loop reads.

        Raises TimeoutError if the event loop does not reply, and RuntimeError if it has ended. The metrics of ranks are
        made one by one. All at once would be so many objects that Python's garbage collector stops the run.
        """
        with self._lock:
            if time.monotonic() - self._read_at >= _FRESH_S:
                self._newest = asyncio.run_coroutine_threadsafe(self.read(), self._loop).result(_SILENT_S)
                self._read_at = time.monotonic()
            families, ranks = self._newest
        yield from families
        yield from self.of_ranks(ranks)

    async def read(self) -> tuple[list[PrometheusMetric], list[RankRead]]:
        """Read a few ranks in each turn of the event loop, and then the other metrics between two events of the run."""
        found: list[RankRead] = []
        ranks = iter(list(self._run.roster.stats))
        while some := list(islice(ranks, _AT_A_TIME)):
            if found:  # up to _AT_A_TIME ranks are read without a pause
                await asyncio.sleep(0)
            found += [(rank, _values(self._engine, rank), state_of(self._engine, rank)) for rank in some]
        return [*self.registry.collect(), *self._of_run()], found

    def _of_run(self) -> Iterator[PrometheusMetric]:
        run, server = self._run, self._config.server
        about = {
            "run": run.name, "mode": run.mode, "program_version": PROGRAM_VERSION,
            "shard": str(server.shard), "shards": str(server.shards),
        }  # fmt: skip
        yield InfoMetricFamily("paramserver", "What runs; the value is always 1", about)
        for metric in shown_of_run(Display.PROMETHEUS):
            if metric.of_run and metric.read is not None:
                yield GaugeMetricFamily(metric.prometheus_name, metric.help, value=metric.read(self._engine))
        if (at := self._snapshot_at) is not None:
            text = "Unix time of the newest snapshot; before the first, of the start"
            yield GaugeMetricFamily("paramserver_snapshot_timestamp_seconds", text, value=at)
        if self._model.has_weights and (distances := self._model.references.distances):
            text = "Relative distance of the weights to the reference of encoded replies; every 64th is measured"
            relative = GaugeMetricFamily("paramserver_reference_distance", text, labels=["codec"])
            for codec, distance in distances.items():
                relative.add_metric([codec], distance)
            yield relative

    def of_ranks(self, read: list[RankRead]) -> Iterator[PrometheusMetric]:
        """Yield the metrics of ranks that were read. It runs on any thread, and takes a second for 10,000 ranks."""
        states = Tally(state for *_, state in read if state != "gone")
        workers = GaugeMetricFamily("paramserver_workers", "Workers connected, by what they do", labels=["state"])
        for state in {**dict.fromkeys(STATES), **states}:
            workers.add_metric([state], states[state])
        yield workers
        read = sorted(read, key=lambda item: item[0])
        for metric in shown_of_workers(Display.PROMETHEUS):
            # A counter has the increase since this process started.
            is_counter = metric.over_time is Fold.SUM
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(metric.prometheus_name, metric.help, labels=["rank"])
            for rank, values, _ in read:
                value, before = values.get(metric.name), self._at_start.get(rank, {}).get(metric.name) or 0
                if value is not None:
                    family.add_metric([str(rank)], value - before if is_counter else value)
            yield family


def _counter(registry: CollectorRegistry, name: str, text: str, **values: tuple[str, ...]) -> Counter:
    counter = Counter(f"paramserver_{name}", text, list(values), registry=registry)
    for value in sum(values.values(), ()):
        counter.labels(value)  # starts the series at 0, because one that begins at 1 would show no increase
    return counter


def _values(engine: Engine, rank: int) -> dict[str, Value]:
    """Return a rank's metrics, with the bytes that it exchanged with this shard only."""
    source = sources(engine, [rank], is_here=True)[0]
    metrics = shown_of_workers(Display.PROMETHEUS)
    # Prometheus takes every gauge for a value of now.
    return values_of([metric for metric in metrics if metric.tense is Tense.DONE or source.is_live], source)


# ---- over HTTP -----------------------------------------------------------------------------------


class _HttpServer(ThreadingTCPServer):
    """An HTTP server with a limit on connections, which prometheus-client's lacks.

    It is not an HTTPServer, because that class asks DNS for the machine's name.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Listen at HOST:PORT. Raises BindError."""
        host, port = split_address(address)
        self._connections = BoundedSemaphore(_MAX_CONNECTIONS)
        handler = type("Handler", (MetricsHandler.factory(registry),), {"timeout": _SILENT_S})
        try:
            found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = found[0]
            super().__init__(found[4], handler)
        except OSError:
            problem = f"cannot listen on {address} for metrics: port in use, or not an address of this machine"
            fix = "choose --metrics HOST:PORT with another port (0 takes a free one)"
            raise BindError(problem, fix=fix) from None
        Thread(target=self.serve_forever, args=(0.1,), name="metrics", daemon=True).start()
        url = f"http://{join_address(host, self.server_address[1])}/metrics"
        readers = "this machine" if is_loopback(host) else "anyone who reaches this port"
        log.info("metrics", url=url, readable_by=readers)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("scrape_failed", peer=str(client_address[0]), reason=repr(sys.exception()))
