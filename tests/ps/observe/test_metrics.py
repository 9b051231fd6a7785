"""What Prometheus gets: from a real server with real workers, and under bad callers."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from paramserver.common.config.schema import Config
from paramserver.common.errors import BindError
from paramserver.common.wire.records import Counts, Row
from paramserver.ps.core.counting import WorkerStats
from paramserver.ps.core.effects import ContributionTaken
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.observe import metrics
from paramserver.ps.observe.bus import Bus
from paramserver.ps.observe.metrics import DEPARTURES, JOINS, OUTCOMES, STATES, MetricsSink
from paramserver.tests.cluster import DEADLINE_S, Cluster, Process

from ...records import contribution_of

ROOT = Path(__file__).parents[3]
Samples = dict[str, float]


def samples_of(text: str) -> Samples:
    """`name{label="value",...}` -> value, labels in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scrape(server: Process) -> Samples:
    with urllib.request.urlopen(server.event("metrics")["url"], timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return samples_of(reply.read().decode())


def scrape_until(server: Process, condition: Callable[[Samples], bool], description: str) -> Samples:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(found := scrape(server)):
        assert time.monotonic() < deadline, f"no {description}\n{found}\n{server.output}"
        time.sleep(0.02)
    return found


def started(cluster: Cluster, *flags: str) -> Process:
    return cluster.server("--mode", "ssp", "--steps", "1000000", "--task", "linear", "--metrics", "127.0.0.1:0", *flags)


# ---- a real run --------------------------------------------------------------------------------


def test_what_a_server_says_holds_together_and_is_all_that_alerts_and_docs_name(cluster: Cluster) -> None:
    server = started(cluster, "--checkpoint-dir", str(cluster.folder / "snapshots"))
    worker = cluster.worker(0, "--set", "worker.reply_codec=q4")
    now = scrape_until(server, lambda now: now["paramserver_version"] > 20, "twenty updates")
    accepted = now['paramserver_contributions_total{outcome="accepted"}']
    assert accepted == now["paramserver_version"] == now["paramserver_updates_total"]
    assert accepted == now["paramserver_step"] == now['paramserver_worker_contributions_total{rank="0"}']
    assert now["paramserver_live_workers"] == 1

    exist = {key.split("{")[0].removesuffix("_bucket") for key in now}
    text = "".join((ROOT / name).read_text() for name in ("docker/prometheus/alerts.yml", "docs/containers.md"))
    named = set(re.findall(r"\bparamserver_[a-z_]+", text))
    assert len(named) > 25
    assert named - exist == set()
    # And their labels: a selector on a value nobody sends never fires.
    for label, values in (("how", DEPARTURES), ("outcome", OUTCOMES), ("kind", JOINS), ("state", STATES)):
        for selected in re.findall(rf'\b{label}=~?"([^"]+)"', text):
            assert set(selected.split("|")) <= set(values)

    worker.signal(signal.SIGKILL)
    gone = scrape_until(server, lambda now: now["paramserver_live_workers"] == 0, "worker gone")
    assert gone['paramserver_departures_total{how="closed"}'] == gone['paramserver_joins_total{kind="first"}'] == 1
    server.signal(signal.SIGTERM)
    assert server.wait() == 143
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.event("metrics")["url"], timeout=5)
    assert "metrics.py" not in server.output  # in a traceback


def test_a_port_in_use_is_said(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cluster.command("ps", "--listen", "127.0.0.1:0", "--metrics", address)
    assert done.returncode == 10
    assert f"cannot listen on {address} for metrics" in done.stderr
    assert "Traceback" not in done.stderr


# ---- the sink by itself ------------------------------------------------------------------------


@asynccontextmanager
async def metrics_of(
    *ranks: WorkerStats, address: str = "127.0.0.1:0", rows: dict[int, Row] | None = None
) -> AsyncIterator[tuple[Bus, MetricsSink]]:
    sink = MetricsSink(address)
    bus = Bus([sink])
    engine = Engine(Config(), policy_of("async", {}), name="run", publish=bus.publish)
    engine.run.roster.stats.update({stats.rank: stats for stats in ranks})
    engine.run.policy.rows = engine.run.policy.progress = {} if rows is None else rows
    try:
        bus.begin(engine)
        yield bus, sink
    finally:
        bus.close()
        engine.close()


async def read(sink: MetricsSink) -> Samples:
    families, ranks = await sink.read()
    registry: Any = SimpleNamespace(collect=lambda: [*families, *sink.of_ranks(ranks)])
    return samples_of(generate_latest(registry).decode())


def taken(outcome: str, stale: int = 0, exchange_s: float = -1.0) -> ContributionTaken:
    return ContributionTaken(contribution_of(1, 5 - stale, 32), 5, outcome, exchange_s)


async def test_outcomes_staleness_and_times_are_counted() -> None:
    async with metrics_of() as (bus, sink):
        for outcome in OUTCOMES:
            bus.publish(0.0, taken(outcome, stale=3))
        bus.publish(0.0, taken("accepted", stale=-1, exchange_s=0.75))  # ahead, after a rollback
        now = await read(sink)
        for outcome in OUTCOMES:
            assert now[f'paramserver_contributions_total{{outcome="{outcome}"}}'] == 1 + (outcome == "accepted")
        assert now["paramserver_staleness_versions_count"] == 2
        assert now["paramserver_staleness_versions_sum"] == 3
        assert now["paramserver_exchange_seconds_count"] == 1
        assert now["paramserver_exchange_seconds_sum"] == 0.75


def test_an_exchange_is_timed_within_one_incarnation_only() -> None:
    stats = WorkerStats(0)
    assert stats.exchange_s(1) < 0  # nothing before it
    stats.wait_s, stats.transfer_s = 0.25, 0.5
    assert stats.exchange_s(1) == 0.75
    stats.wait_s = 100.0  # another process, whose first contribution this is
    assert stats.exchange_s(2) < 0
    stats.transfer_s += 2.0
    assert stats.exchange_s(2) == 2.0


async def test_what_a_snapshot_brought_is_not_counted_again() -> None:
    stats, rows = WorkerStats(3, wait_s=7.0), {3: Row(500, 500, 16_000, 500)}
    async with metrics_of(stats, rows=rows) as (_, sink):
        rows[3] = rows[3].plus(Counts(32))
        stats.wait_s += 0.5
        now = await read(sink)
        assert now['paramserver_worker_contributions_total{rank="3"}'] == 1
        assert now['paramserver_worker_samples_total{rank="3"}'] == 32
        assert now['paramserver_worker_bytes_sent_total{rank="3"}'] == 0
        assert now['paramserver_worker_wait_seconds_total{rank="3"}'] == 0.5


async def test_a_worker_whose_samples_nobody_said_has_no_series_of_them() -> None:
    rows = {0: Row(), 1: Row()}
    async with metrics_of(WorkerStats(0), WorkerStats(1), rows=rows) as (_, sink):
        rows |= {0: rows[0].plus(Counts(0)), 1: rows[1].plus(Counts(32))}
        now = await read(sink)
        assert now['paramserver_worker_contributions_total{rank="0"}'] == 1
        assert 'paramserver_worker_samples_total{rank="0"}' not in now
        assert now['paramserver_worker_samples_total{rank="1"}'] == 32


def test_a_scrape_of_ten_times_the_workers_is_ten_times_the_work() -> None:
    """Counted are calls and returns: a busy machine makes no more of them."""

    async def calls_of(num_workers: int) -> int:
        calls = []
        async with metrics_of(*(WorkerStats(rank) for rank in range(num_workers))) as (_, sink):
            sys.setprofile(lambda _, event, __: calls.append(event))
            try:
                families, ranks = await sink.read()
                families += sink.of_ranks(ranks)
            finally:
                sys.setprofile(None)
            assert sum(len(family.samples) for family in families) > 8 * num_workers
        return len(calls)

    assert asyncio.run(calls_of(1000)) < 10.5 * asyncio.run(calls_of(100)) < 10.5 * 100 * 2000


def test_the_event_loop_does_no_more_in_one_turn_however_many_workers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted are calls and returns between two turns of another coroutine, during a scrape over HTTP."""
    monkeypatch.setattr(metrics, "_SILENT_S", 60.0)  # the profile makes the loop slow

    async def most_of(num_workers: int) -> int:
        turns, count = [0], 0
        async with metrics_of(*(WorkerStats(rank) for rank in range(num_workers))) as (_, sink):

            def counted(_: object, __: str, ___: object) -> None:
                turns[-1] += 1

            asked = asyncio.ensure_future(
                asyncio.to_thread(urllib.request.urlopen, f"http://{':'.join(map(str, where(sink)))}")
            )
            sys.setprofile(counted)
            try:
                while not asked.done():
                    await asyncio.sleep(0)
                    turns.append(0)
            finally:
                sys.setprofile(None)
            count = len(asked.result().read().splitlines())
            assert count > 8 * num_workers
        return max(turns)

    assert asyncio.run(most_of(4000)) < 1.5 * asyncio.run(most_of(1000)) + 100


# ---- bad callers ---------------------------------------------------------------------------------


def where(sink: MetricsSink) -> tuple[str, int]:
    assert sink.server is not None
    return sink.server.server_address[:2]  # type: ignore[return-value]


async def ask(sink: MetricsSink, request: bytes = b"GET /metrics HTTP/1.1\r\n\r\n") -> bytes:
    reader, writer = await asyncio.open_connection(*where(sink))
    writer.write(request)
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return reply


async def test_a_caller_that_hangs_up_or_says_nothing_costs_little(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "_SILENT_S", 0.5)
    async with metrics_of() as (_, sink):
        for part in (b"", b"GET", b"GET /metrics HTTP/1.1\r\n", b"\x16\x03\x01\x02", b"x" * 100_000):
            _, writer = await asyncio.open_connection(*where(sink))
            writer.write(part)
            writer.close()
        silent = [await asyncio.open_connection(*where(sink)) for _ in range(40)]
        for reader, writer in silent:  # those that are too many at once, the others after a moment
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        while not (reply := await ask(sink)):  # the last of them may not have ended yet
            pass
        assert b" 200 OK" in reply
        assert b"paramserver_version 0.0" in reply
    assert "Traceback" not in capsys.readouterr().err


async def test_scrapes_in_a_row_read_the_run_once() -> None:
    class Reads(Collector):
        num = 0

        def collect(self) -> Iterator[Metric]:
            self.num += 1
            yield from ()

    async with metrics_of() as (_, sink):
        reads = Reads()
        sink.registry.register(reads)
        reads.num = 0
        began = time.monotonic()
        replies = await asyncio.gather(*(ask(sink) for _ in range(10)))
        assert sum(b" 200 OK" in reply for reply in replies) == 10
        assert reads.num <= 1 + (time.monotonic() - began) / 0.2


async def test_an_address_that_is_none_is_refused() -> None:
    for address in ("host.invalid:1", "192.0.2.1:1"):
        with pytest.raises(BindError):
            async with metrics_of(address=address):
                pass


async def test_an_ipv6_address() -> None:
    try:
        async with metrics_of(address="[::1]:0") as (_, sink):
            assert b" 200 OK" in await ask(sink)
    except BindError:
        pytest.skip("no IPv6 on this machine")
