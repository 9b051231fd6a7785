"""What a server tells Prometheus: counted as it happens, and read from the run when it is scraped.

`Counters` is the server's history with counting: whatever the history would write down is counted, whether
it is kept in a file or not. `RunCollector` reads the rest from the run. Both live on the event loop, and so
does the scrape (`metrics_http.py`): prometheus-client's own server would read the run from another thread.

A counter begins at zero with the process, also when the run goes on from a snapshot: Prometheus takes a
counter that falls for one that began anew, and would add all of it once more.
"""

from __future__ import annotations

import os
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...common.reporting.history import History
from ...common.version import PROGRAM_VERSION
from ..core.run import Run
from ..core.stats import WorkerStats

OUTCOMES = ("accepted", "dropped", "rejected", "repeated", "skipped", "refused")
DEPARTURES = ("goodbye", "closed", "lease", "replaced")
JOINS = ("first", "again", "resumed")
STATES = ("joining", "waiting", "uploading", "computing", "away", "finished")

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
_CONTRIBUTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# An exchange is over with one of these, and the worker has said how long it took with the next.
_ENDS_EXCHANGE = ("accepted", "dropped", "rejected", "skipped")

disable_created_metrics()  # a second series beside every counter, for what process_start_time_seconds says


class Counters(History):
    """A server's history that counts its lines; `attach` comes before the first worker."""

    def __init__(self, path: str | None) -> None:
        super().__init__(path, "server")
        self.registry = CollectorRegistry()
        self.snapshot_at: float | None = None  # Unix time of the newest snapshot, or of the start
        self._run: Run | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> incarnation, seconds in exchanges so far
        self._of: dict[str, Callable[[dict[str, Any]], None]] = {
            "join": self._join, "leave": self._leave, "accept": self._accept,
            "commit": self._commit, "snapshot": self._snapshot,
        }  # fmt: skip
        to = self.registry
        self._joins = Counter("paramserver_joins", "Workers let in: at first, again, or resumed", ["kind"], registry=to)
        self._departures = Counter("paramserver_departures", "Workers gone, and how", ["how"], registry=to)
        self._contributions = Counter("paramserver_contributions", "What became of each", ["outcome"], registry=to)
        self._updates = Counter(
            "paramserver_updates", "Versions of the weights made; rounds, where there are", registry=to
        )
        self._in_update = Histogram(
            "paramserver_update_contributions", "Contributions in one update", buckets=_CONTRIBUTIONS, registry=to
        )
        self._staleness = Histogram(
            "paramserver_staleness_versions",
            "Versions an accepted contribution was behind",
            buckets=_VERSIONS,
            registry=to,
        )
        self._exchanges = Histogram(
            "paramserver_exchange_seconds",
            "From a contribution's leaving until the answer was there, as the worker saw it",
            buckets=_SECONDS,
            registry=to,
        )
        for counter, values in (
            (self._joins, JOINS),
            (self._departures, DEPARTURES),
            (self._contributions, OUTCOMES),
        ):
            for value in values:
                counter.labels(value)  # 0 from the start: a series that begins at 1 has no increase

    @property
    def is_kept(self) -> bool:
        return True

    def attach(self, run: Run) -> None:
        """The run that is told of, gone on from its snapshot if there is one."""
        self._run = run
        if run.config.checkpoint.dir is not None:
            self.snapshot_at = time.time()
            with suppress(OSError):
                self.snapshot_at = os.stat(run.model.source).st_mtime
        self.registry.register(RunCollector(run, self))
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def write(self, op: str, **fields: Any) -> None:
        super().write(op, **fields)
        if (count := self._of.get(op)) is not None:
            count(fields)

    # ---- one for each line of the history -------------------------------------------------

    def _join(self, line: dict[str, Any]) -> None:
        kind = "resumed" if line["resumed"] else "first" if line["incarnation"] == 1 else "again"
        self._joins.labels(kind).inc()

    def _leave(self, line: dict[str, Any]) -> None:
        self._departures.labels(line["how"]).inc()

    def _accept(self, line: dict[str, Any]) -> None:
        self._contributions.labels(line["outcome"]).inc()
        if line["outcome"] == "accepted":
            self._staleness.observe(max(0, line["version"] - line["base_version"]))
        if line["outcome"] in _ENDS_EXCHANGE:
            self._note_exchange(line["rank"], line["incarnation"])

    def _note_exchange(self, rank: int, incarnation: int) -> None:
        """With a contribution the worker says how long the exchange before it took."""
        stats = self._run.roster.stats.get(rank) if self._run is not None else None
        if stats is None:
            return
        total_s = stats.transfer_s + stats.wait_s
        before, before_s = self._seen.get(rank, (0, 0.0))
        if before == incarnation:
            self._exchanges.observe(total_s - before_s)
        self._seen[rank] = incarnation, total_s

    def _commit(self, line: dict[str, Any]) -> None:
        self._updates.inc()
        self._in_update.observe(len(line["contributions"]))

    def _snapshot(self, _: dict[str, Any]) -> None:
        self.snapshot_at = time.time()


class RunCollector(Collector):
    """The run as it is at the moment of the scrape."""

    def __init__(self, run: Run, counters: Counters) -> None:
        self._run = run
        self._counters = counters
        self._at_start = {rank: _sums(stats) for rank, stats in run.roster.stats.items()}

    def collect(self) -> Iterator[Metric]:
        yield from self._progress()
        yield from self._members()
        yield from self._memory()
        yield from self._of_each_rank()

    def _progress(self) -> Iterator[Metric]:
        run = self._run
        server = run.config.server
        facts = {
            "run": run.name, "mode": run.config.run.mode, "program_version": PROGRAM_VERSION,
            "shard": str(server.shard), "shards": str(server.shards),
        }  # fmt: skip
        info = GaugeMetricFamily("paramserver_info", "What runs; the value is always 1", labels=list(facts))
        info.add_metric(list(facts.values()), 1)
        yield info
        yield _gauge("version", "Version of the weights: updates since the run began", run.policy.version)
        yield _gauge("durable_version", "Version of the newest snapshot; 0 without one", run.durable_version)
        if self._counters.snapshot_at is not None:
            at = self._counters.snapshot_at
            yield _gauge(
                "snapshot_timestamp_seconds", "Unix time of the newest snapshot; before the first, of the start", at
            )
        yield _gauge("incarnation", "Starts of the server in this run; 1 at first", run.incarnation)
        yield _gauge("step", "Training steps behind the slowest worker", run.min_step)
        yield _gauge("steps", "Training steps each worker is to take", run.config.run.steps)
        yield _gauge("elapsed_seconds", "Of training, over all starts of the server", run.elapsed_s)

    def _members(self) -> Iterator[Metric]:
        run = self._run
        states = Tally(worker.state for worker in run.workers.values())
        workers = GaugeMetricFamily("paramserver_workers", "Workers connected, by what they do", labels=["state"])
        for state in {**dict.fromkeys(STATES), **states}:
            workers.add_metric([state], states[state])
        yield workers
        yield _gauge("live_workers", "Workers that train: let in and not gone", len(run.policy.members))
        yield _gauge("min_workers", "Fewer than this and training holds", run.config.policy.min_workers)
        now = time.monotonic()
        waits = [now - worker.waiting_since for worker in run.workers.values() if worker.waiting_since is not None]
        yield _gauge("longest_wait_seconds", "Since when the worker waits that waits longest", max(waits, default=0.0))

    def _memory(self) -> Iterator[Metric]:
        model = self._run.model
        staging = model.staging if model.has_weights else None
        limit = self._run.config.server.max_staged
        yield _gauge("staged_uploads", "Uploads in memory", staging.num_lent if staging else 0)
        yield _gauge("staged_uploads_limit", "Uploads that may be in memory at once", limit)
        yield _gauge("waiting_uploads", "Uploads that wait for memory", staging.num_waiting if staging else 0)
        yield _gauge("model_bytes", "Size of the model", model.layout.total_bytes if model.layout else 0)

    def _of_each_rank(self) -> Iterator[Metric]:
        steps = _per_rank("worker_steps", "Contributions that count")
        samples = _per_rank("worker_samples", "Samples they were computed from")
        received = _per_rank("received_bytes", "From this worker over the network")
        sent = _per_rank("sent_bytes", "To this worker over the network")
        seconds = _per_rank("worker_seconds", "What the worker's time went to", "activity")
        loss = GaugeMetricFamily("paramserver_worker_loss", "Mean training loss it said last", labels=["rank"])
        for rank, stats in sorted(self._run.roster.stats.items()):
            now, then, name = _sums(stats), self._at_start.get(rank, Tally()), str(rank)
            steps.add_metric([name], now["steps"] - then["steps"])
            samples.add_metric([name], now["samples"] - then["samples"])
            received.add_metric([name], now["bytes_sent"] - then["bytes_sent"])
            sent.add_metric([name], now["bytes_received"] - then["bytes_received"])
            for activity in ("compute", "transfer", "wait"):
                key = f"{activity}_s"
                seconds.add_metric([name, activity], now[key] - then[key])
            loss.add_metric([name], stats.loss)
        yield from (steps, samples, received, sent, seconds, loss)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"paramserver_{name}", what, value=value)


def _per_rank(name: str, what: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"paramserver_{name}", what, labels=["rank", *labels])


def _sums(stats: WorkerStats) -> dict[str, Any]:
    """The numbers of one rank; what is not there is 0."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return Tally({name: value for name, value in values.items() if type(value) in (int, float)})
