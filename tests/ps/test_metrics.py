"""What Prometheus gets: from a real server with real workers, and from the endpoint under bad callers."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paramserver.common.config.schema import Config
from paramserver.common.errors import BindError, UsageError
from paramserver.common.reporting.history import History
from paramserver.ps.core.run import Run
from paramserver.ps.core.stats import WorkerStats
from paramserver.ps.observe.metrics import DEPARTURES, JOINS, OUTCOMES, STATES, Counters
from paramserver.ps.observe.metrics_http import MetricsEndpoint, server_history
from paramserver.ps.policies.async_ import AsyncPolicy
from paramserver.ps.policies.base import Options
from paramserver.tests.loopback.conftest import DEADLINE_S, Cluster, Process

ROOT = Path(__file__).parents[2]
Samples = dict[str, float]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


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


def scrape_until(server: Process, condition: Callable[[Samples], bool], what: str) -> Samples:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(found := scrape(server)):
        assert time.monotonic() < deadline, f"no {what}\n{found}\n{server.output}"
        time.sleep(0.02)
    return found


def total(samples: Samples, name: str) -> float:
    """Over all its labels."""
    return sum(value for key, value in samples.items() if key.split("{")[0] == name)


def started(cluster: Cluster, *flags: str) -> Process:
    return cluster.server("--mode", "ssp", "--steps", "1000000", "--task", "linear", "--metrics", "127.0.0.1:0", *flags)


# ---- a real run --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_deaths_and_a_restart_as_prometheus_sees_it(cluster: Cluster) -> None:
    flags = ("--checkpoint-dir", str(cluster.folder / "snapshots"), "--checkpoint-every", "20")
    server = started(cluster, *flags)
    before = scrape(server)
    assert (
        before["paramserver_version"] == before["paramserver_live_workers"] == before["paramserver_updates_total"] == 0
    )
    assert time.time() - before["paramserver_snapshot_timestamp_seconds"] < 60

    first, second = cluster.worker(0), cluster.worker(1)
    now = scrape_until(
        server,
        lambda now: (
            now["paramserver_live_workers"] == 2
            and min(now.get(f'paramserver_worker_steps_total{{rank="{rank}"}}', 0) for rank in (0, 1)) > 50
            and now["paramserver_durable_version"] > 20
        ),
        "fifty steps of two workers and a snapshot",
    )
    assert now["paramserver_live_workers"] == 2
    assert sum(now[f'paramserver_workers{{state="{state}"}}'] for state in STATES) == 2
    assert now["paramserver_updates_total"] == now["paramserver_version"] > 100
    # In ssp one contribution is one update, and all that is counted is counted in the same moment.
    accepted = now['paramserver_contributions_total{outcome="accepted"}']
    assert accepted == now["paramserver_version"] == total(now, "paramserver_worker_steps_total")
    assert accepted == now["paramserver_staleness_versions_count"] == now["paramserver_update_contributions_sum"]
    assert now['paramserver_staleness_versions_bucket{le="16.0"}'] == accepted
    # Every exchange but the last of each worker has been timed, in all of which it waited or transferred.
    assert accepted - 2 <= now["paramserver_exchange_seconds_count"] + 1 <= accepted
    busy_s = sum(now[f'paramserver_worker_seconds_total{{activity="{a}",rank="0"}}'] for a in ("transfer", "wait"))
    assert 0 < busy_s < now["paramserver_exchange_seconds_sum"] < 2 * now["paramserver_elapsed_seconds"]
    for rank in (0, 1):
        steps = now[f'paramserver_worker_steps_total{{rank="{rank}"}}']
        for name in ("received_bytes", "sent_bytes"):
            assert now[f'paramserver_{name}_total{{rank="{rank}"}}'] > steps * 8  # two floats and more
    assert now["process_resident_memory_bytes"] > 50e6

    first.signal(signal.SIGKILL)
    now = scrape_until(server, lambda now: now["paramserver_live_workers"] == 1, "worker gone")
    assert now['paramserver_departures_total{how="closed"}'] == 1
    cluster.worker(0)
    now = scrape_until(server, lambda now: now["paramserver_live_workers"] == 2, "worker back")
    assert now['paramserver_joins_total{kind="first"}'] == 2
    assert now['paramserver_joins_total{kind="again"}'] == 1

    version = now["paramserver_durable_version"]
    server.signal(signal.SIGKILL)
    server.wait()
    for process in cluster.processes[1:]:
        process.signal(signal.SIGKILL)
    again = started(cluster, *flags)
    now = scrape(again)
    # The run goes on where it was; counters begin anew, like those of every process Prometheus knows.
    assert now["paramserver_version"] == now["paramserver_durable_version"] >= version
    assert now["paramserver_incarnation"] == 2
    assert now["paramserver_updates_total"] == total(now, "paramserver_worker_steps_total") == 0
    assert total(now, "paramserver_received_bytes_total") == total(now, "paramserver_worker_seconds_total") == 0
    assert {key for key in now if key.startswith("paramserver_worker_steps_total")} == {
        f'paramserver_worker_steps_total{{rank="{rank}"}}' for rank in (0, 1)
    }
    assert time.time() - now["paramserver_snapshot_timestamp_seconds"] < DEADLINE_S
    assert second.popen.wait() is not None


def test_what_a_server_says_holds_together_and_is_all_that_alerts_and_docs_name(cluster: Cluster) -> None:
    server = started(cluster, "--checkpoint-dir", str(cluster.folder / "snapshots"))
    cluster.worker(0)
    now = scrape_until(server, lambda now: now["paramserver_version"] > 20, "twenty updates")
    accepted = now['paramserver_contributions_total{outcome="accepted"}']
    assert accepted == now["paramserver_version"] == now["paramserver_updates_total"]
    assert accepted == now["paramserver_step"] == now['paramserver_worker_steps_total{rank="0"}']
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

    server.signal(signal.SIGTERM)
    assert server.wait() == 143
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.event("metrics")["url"], timeout=5)
    assert "metrics_http" not in server.output


def test_a_port_in_use_is_said(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cluster.command("ps", "--listen", "127.0.0.1:0", "--metrics", address)
    assert done.returncode == 10
    assert f"cannot listen on {address} for metrics" in done.stderr
    assert "Traceback" not in done.stderr


def test_none_unless_asked_for_and_a_wrong_address_is_said_at_once() -> None:
    assert type(server_history(Config())) is History
    for address in ("9464", "127.0.0.1:", "127.0.0.1:99999", "/metrics"):
        with pytest.raises(UsageError, match="is not HOST:PORT"):
            server_history(Config.model_validate({"server": {"metrics": address}}))


# ---- the counters ------------------------------------------------------------------------------


def counters_of(config: Config, with_rank: WorkerStats | None = None) -> tuple[Run, Counters]:
    counters = Counters(None)
    run = Run(config, AsyncPolicy(Options()), history=counters)
    if with_rank is not None:
        run.roster.stats[with_rank.rank] = with_rank
    counters.attach(run)
    return run, counters


def accept(counters: Counters, outcome: str, rank: int = 0, incarnation: int = 1, stale: int = 0) -> None:
    counters.write(
        "accept", rank=rank, incarnation=incarnation, step=1, base_version=5 - stale, version=5, outcome=outcome
    )


def test_outcomes_and_staleness_are_counted() -> None:
    async def body() -> None:
        run, counters = counters_of(Config(), WorkerStats(0))
        for outcome in OUTCOMES:
            accept(counters, outcome, stale=3)
        accept(counters, "accepted", stale=-1)  # a worker that is ahead after a rollback
        now = samples_of(counters.text().decode())
        for outcome in OUTCOMES:
            assert now[f'paramserver_contributions_total{{outcome="{outcome}"}}'] == 1 + (outcome == "accepted")
        assert now["paramserver_staleness_versions_count"] == 2
        assert now["paramserver_staleness_versions_sum"] == 3
        run.tensors.close()

    asyncio.run(body())


def test_an_exchange_is_timed_within_one_incarnation_only() -> None:
    async def body() -> None:
        stats = WorkerStats(0)
        run, counters = counters_of(Config(), stats)
        accept(counters, "accepted")  # nothing before it
        stats.wait_s, stats.transfer_s = 0.25, 0.5
        accept(counters, "accepted")
        stats.wait_s = 100.0  # another process, whose first contribution this is
        accept(counters, "accepted", incarnation=2)
        stats.transfer_s += 2.0
        accept(counters, "repeated", incarnation=2)
        accept(counters, "dropped", incarnation=2)
        now = samples_of(counters.text().decode())
        assert now["paramserver_exchange_seconds_count"] == 2
        assert now["paramserver_exchange_seconds_sum"] == pytest.approx(2.75)
        run.tensors.close()

    asyncio.run(body())


def test_what_a_snapshot_brought_is_not_counted_again() -> None:
    async def body() -> None:
        stats = WorkerStats(3, steps=500, samples=16_000, bytes_sent=10**9, wait_s=7.0)
        run, counters = counters_of(Config(), stats)
        stats.accepted(0, 32, 0, 1.0)
        stats.wait_s += 0.5
        now = samples_of(counters.text().decode())
        assert now['paramserver_worker_steps_total{rank="3"}'] == 1
        assert now['paramserver_worker_samples_total{rank="3"}'] == 32
        assert now['paramserver_received_bytes_total{rank="3"}'] == 0
        assert now['paramserver_worker_seconds_total{activity="wait",rank="3"}'] == 0.5
        run.tensors.close()

    asyncio.run(body())


def test_what_is_counted_is_still_written_down(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    counters = Counters(str(path))
    counters.write("join", rank=0, incarnation=1, step=0, resumed=False)
    counters.write("leave", rank=0, incarnation=1, how="lease")
    counters.close()
    assert [line.split('"')[3] for line in path.read_text().splitlines()] == ["join", "leave"]
    now = samples_of(counters.text().decode())
    assert now['paramserver_joins_total{kind="first"}'] == now['paramserver_departures_total{how="lease"}'] == 1


def test_a_thousand_workers_are_scraped_without_stopping_the_server_for_long() -> None:
    async def body() -> None:
        run, counters = counters_of(Config())
        for rank in range(1000):
            run.roster.stats[rank] = WorkerStats(rank, steps=rank, bytes_sent=rank)
        began = time.process_time()
        text = counters.text().decode()
        took_s = time.process_time() - began
        assert len(samples_of(text)) > 8000
        assert took_s < 1.0  # about 0.07 s; the loop stands still meanwhile
        run.tensors.close()

    asyncio.run(body())


# ---- the endpoint under bad callers --------------------------------------------------------------


async def ask(endpoint: MetricsEndpoint, request: bytes) -> bytes:
    host, _, port = endpoint.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return reply


def with_endpoint(body: Callable[[MetricsEndpoint], object]) -> None:
    async def run() -> None:
        endpoint = MetricsEndpoint(Counters(None), request_s=0.5)
        await endpoint.open("127.0.0.1:0")
        await body(endpoint)  # type: ignore[misc]
        assert (await ask(endpoint, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        endpoint.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics?name=up HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"\x16\x03\x01\x02\x00 TLS to a port without\r\n\r\n", 404),
        (b"\r\n\r\n", 404),
    ],
)
def test_requests(request_bytes: bytes, status: int) -> None:
    async def body(endpoint: MetricsEndpoint) -> None:
        reply = await ask(endpoint, request_bytes)
        head, _, text = reply.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == str(status).encode()
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
        assert len(text) == (0 if request_bytes.startswith(b"HEAD") else length)

    with_endpoint(body)


def test_a_caller_that_hangs_up_or_says_nothing_costs_nothing() -> None:
    async def body(endpoint: MetricsEndpoint) -> None:
        host, _, port = endpoint.address.rpartition(":")
        for part in (b"", b"GET", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(part)
            writer.close()
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(16)]
        with pytest.raises(ConnectionError):  # one too many
            await ask(endpoint, b"GET /metrics HTTP/1.1\r\n\r\n")
        for reader, writer in silent:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    with_endpoint(body)


def test_an_address_that_is_none_is_refused() -> None:
    async def body() -> None:
        with pytest.raises(UsageError):
            await MetricsEndpoint(Counters(None)).open("nowhere")
        with pytest.raises(BindError):
            await MetricsEndpoint(Counters(None)).open("host.invalid:1")
        with pytest.raises(BindError):
            await MetricsEndpoint(Counters(None)).open("192.0.2.1:1")

    asyncio.run(body())


def test_an_ipv6_address() -> None:
    async def body() -> None:
        endpoint = MetricsEndpoint(Counters(None))
        try:
            await endpoint.open("[::1]:0")
        except BindError:
            pytest.skip("no IPv6 on this machine")
        assert endpoint.address.startswith("[::1]:")
        endpoint.close()

    asyncio.run(body())
