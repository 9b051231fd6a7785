"""Runs on record: real servers and workers, and files that cannot be written."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.errors import ParamServerError
from paramserver.common.reporting.summary import Event, Status, Tick
from paramserver.common.runstore.reading import RunStore, StoredRun
from paramserver.common.runstore.record import Record
from paramserver.common.runstore.schema import FILE, VERSION, StoreError
from paramserver.tests.cluster import Cluster, Process

FLAGS = ("--mode", "async", "--workers", "1", "--steps", "60", "--task", "linear", "--eval-every", "20")
OFTEN = {"PS_SERVER__STATUS_INTERVAL_S": "0.02"}


def database(cluster: Cluster) -> Path:
    return cluster.folder / "runs" / "paramserver.db"


def stored(cluster: Cluster) -> list[StoredRun]:
    with RunStore(database(cluster)) as store:
        return store.runs()


def trained(cluster: Cluster, *flags: str, **env: str) -> Process:
    """A server whose run has ended well."""
    server = cluster.server(*FLAGS, *flags, **OFTEN, **env)
    worker = cluster.worker(0)
    assert [worker.wait(), server.wait()] == [0, 0], server.output + worker.output
    return server


def test_a_run_is_on_record(cluster: Cluster) -> None:
    server = trained(cluster, "--summary", "s.json")
    (run,) = stored(cluster)
    assert (run.id, run.state, run.step, run.version) == (server.event("listening")["run"], "done", 60, 60)
    with RunStore(database(cluster)) as store:
        summary = store.summary(run)
        assert summary is not None
        assert summary.text() == (cluster.folder / "s.json").read_text()
        last, workers = store.series(run)[-1], store.worker_series(run, rank=0)
        assert (last.step, last.version, last.samples, last.num_bytes) == (
            60, 60, summary.samples, summary.num_bytes,
        )  # fmt: skip
        assert (workers[-1].step, workers[-1].samples) == (60, summary.samples)
        points = store.evaluations(run)
        assert [point.step for point in points] == [20, 40, 60]
        assert [point.samples for point in points] == [summary.samples // 3 * part for part in (1, 2, 3)]
        passed = [point.num_bytes or 0 for point in points]
        assert 0 < passed[0] < passed[1] < passed[2] <= summary.num_bytes
        assert [point.num_bytes for point in summary.curve] == passed
        kinds = [event.kind for event in store.events(run)]
        assert kinds[:2] == ["start", "join"] and kinds[-1] == "end" and "leave" in kinds
        assert store.config(run)["run"]["steps"] == 60 and "security" not in store.config(run)
        assert store.machine(run)["num_cores"] == os.cpu_count() and store.code(run)["paramserver"]


@pytest.mark.slow
def test_a_server_to_which_nobody_came_and_one_that_keeps_nothing_leave_nothing(cluster: Cluster) -> None:
    server = cluster.server(*FLAGS)
    server.signal(2)
    assert server.wait() == 130
    trained(cluster, "--no-store")
    assert not (cluster.folder / "runs").exists()


def gated(cluster: Cluster, *flags: str, **env: str) -> tuple[Process, Process]:
    """A run that goes on until it is ended."""
    server = cluster.server("--mode", "async", "--task", "linear", "--steps", "1000000", *flags, **{**OFTEN, **env})
    return server, cluster.worker(0, "--set", "slowdown.base_s=0.005")


def on_record(cluster: Cluster, is_so: Callable[[StoredRun], bool]) -> Callable[[], bool]:
    return lambda: database(cluster).exists() and any(map(is_so, read(cluster)))


def read(cluster: Cluster) -> list[StoredRun]:
    """Nothing yet while the file is made."""
    try:
        return stored(cluster)
    except StoreError:
        return []


def test_of_a_server_that_is_killed_what_was_written_stays(cluster: Cluster) -> None:
    server, worker = gated(cluster)
    server.until(on_record(cluster, lambda run: run.step > 5), "step on record")
    assert stored(cluster)[0].state == "running"
    server.kill()
    worker.popen.kill()
    (run,) = stored(cluster)
    assert run.state == "lost" and run.step > 5 and run.ended_at is None
    with RunStore(database(cluster)) as store:
        assert store.summary(run) is None
        assert store.series(run)[-1].step == run.step


@pytest.mark.slow
def test_a_run_that_goes_back_keeps_its_name_and_loses_what_is_beyond(cluster: Cluster) -> None:
    kept = ("--checkpoint-dir", "snapshots", "--checkpoint-every", "10")
    server, worker = gated(cluster, *kept)
    server.until(on_record(cluster, lambda run: run.step > 35), "step on record")
    server.kill()
    (before,) = stored(cluster)
    with RunStore(database(cluster)) as store:
        at = max(snapshot.version for snapshot in store.snapshots(before))
        num_events = len(store.events(before))
        assert store.series(before)[-1].version > 0
    again = cluster.server("--mode", "async", "--task", "linear", "--steps", "1000000", *kept,
                           "--listen", cluster.address, **OFTEN)  # fmt: skip
    again.until(on_record(cluster, lambda run: run.starts == 2 and run.version > at + 5), "run that goes on")
    worker.popen.kill()
    again.signal(15)
    assert again.wait() == 143
    (run,) = stored(cluster)
    assert (run.id, run.state, run.ended_by) == (before.id, "stopped", "its server was told to stop")
    with RunStore(database(cluster)) as store:
        series, events = store.series(run), store.events(run)
    versions, ticks = [item.version for item in series], [item.tick for item in series]
    assert versions == sorted(versions) and ticks == sorted(set(ticks))
    began = [event.fields["version"] for event in events if event.kind == "start"]
    assert len(began) == 2 and began[0] == 0 and began[1] >= at
    assert [event.number for event in events] == list(range(1, len(events) + 1)) and len(events) > num_events


def newer(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")


def damaged(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def of_something_else(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE songs (name TEXT)")


def no_folder(path: Path) -> None:
    path.parent.write_text("a file")


BAD = {newer: f"version {VERSION + 1}", damaged: "not a database", of_something_else: "another program", no_folder: ""}


@pytest.mark.slow
@pytest.mark.parametrize("spoil", BAD)
def test_a_file_that_cannot_be_used_is_said_once_and_the_run_goes_on(
    cluster: Cluster, spoil: Callable[[Path], None]
) -> None:
    if spoil is not no_folder:
        database(cluster).parent.mkdir()
    spoil(database(cluster))
    before = database(cluster).read_bytes() if database(cluster).exists() else b""
    server = trained(cluster)
    (event,) = server.events("store_off")
    assert event["level"] == "warning" and BAD[spoil] in event["reason"], event
    assert (database(cluster).read_bytes() if database(cluster).exists() else b"") == before
    assert not server.events("sink_off")


@pytest.mark.slow
def test_a_file_that_others_have_locked_is_tried_again(cluster: Cluster) -> None:
    trained(cluster)
    holder = sqlite3.connect(database(cluster), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    server, worker = gated(cluster)
    server.event("store_locked")
    assert len(stored(cluster)) == 1  # reading goes on
    holder.execute("ROLLBACK")
    holder.close()
    server.until(lambda: len(stored(cluster)) == 2 and stored(cluster)[0].step > 5, "run on record")
    worker.popen.kill()
    server.signal(2)
    assert server.wait() == 130
    assert len(server.events("store_locked")) == 1
    with RunStore(database(cluster)) as store:
        (run, _) = store.runs()
        assert [event.kind for event in store.events(run)][:2] == ["start", "join"], "what came meanwhile is not lost"


@pytest.mark.slow
def test_a_full_disk_is_said_once_and_the_run_goes_on(cluster: Cluster) -> None:
    """A limit on the size of files stands for the disk."""
    server, worker = gated(cluster)
    server.until(on_record(cluster, lambda run: run.step > 5), "step on record")
    resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (500_000, 500_000))  # its log is far from that
    event = server.event("store_off")
    assert event["level"] == "warning" and ("full" in event["reason"] or "I/O" in event["reason"]), event
    reached = server.events("status")[-1]["step"]
    server.until(lambda: server.events("status")[-1]["step"] > reached + 5, "step after that")
    worker.popen.kill()
    server.signal(2)
    assert server.wait() == 130
    assert len(server.events("store_off")) == 1 and not server.events("sink_off")
    assert stored(cluster)[0].step > 5, "what was written before stays"


def replace_by_copy(path: Path) -> None:
    (path.parent / "copy").write_bytes(path.read_bytes())
    (path.parent / "copy").replace(path)


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def size(path: Path) -> int:
    return path.stat().st_size


SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, "was deleted"), (replace_by_copy, "was replaced"),
    (lambda path: os.truncate(path, 0), "was emptied"),
    (lambda path: os.truncate(path, size(path) // 2), "was truncated"),
    (lambda path: overwrite(path, 0, b"no database" * 10), "was damaged"),
    (lambda path: overwrite(path, size(path) // 2, b"\xff" * (size(path) // 2)), "was damaged"),
]  # fmt: skip


def tick(at: float, fields: dict[str, str]) -> Tick:
    return Tick(at=at, status=Status(), events=[Event(at=at, kind="join", rank=0, fields=fields)])


def _write_thrice(record: Record) -> None:
    for _ in range(3):
        record.add(tick(1.0, {}))
        assert record.write()


@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_a_file_that_is_spoilt_under_a_writer_is_said(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    path, config = tmp_path / FILE, Config.model_validate({"output": {"track_dir": str(tmp_path)}})
    record = Record(config, run="run", mode="sync")
    for number in range(200):
        record.add(tick(float(number), {"some": "text" * 50}))
        assert record.write()
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # as any process does that has written enough
    _write_thrice(record)
    spoil(path)
    with pytest.raises((ParamServerError, sqlite3.Error)) as raised:  # SQLite's own word where it notices first
        _write_thrice(record)
    assert words in str(raised.value) or "malformed" in str(raised.value)
    record.close()


def test_a_file_that_another_run_writes_into_is_whole(tmp_path: Path) -> None:
    config = Config.model_validate({"output": {"track_dir": str(tmp_path)}})
    records = [Record(config, run=name, mode="sync") for name in ("one", "two")]
    for number in range(1500):  # each writes its log back now and then
        for record in records:
            record.add(tick(float(number), {"some": "text" * 50}))
            assert record.write()
    for record in records:
        record.close()
    with RunStore(tmp_path / FILE) as store:
        assert [len(store.events(run)) for run in store.runs()] == [1500, 1500]


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_folder_that_may_not_be_written_is_a_warning_where_it_was_asked_for(
    cluster: Cluster, is_asked_for: bool
) -> None:
    # where nobody makes folders, root neither
    asked = {"PS_OUTPUT__TRACK_DIR": "/proc/self/runs"} if is_asked_for else {}
    code = (
        "import pathlib, runpy, sys\n"
        "def mkdir(*_, **__): raise PermissionError(13, 'Permission denied')\n"
        "pathlib.Path.mkdir = mkdir\n"
        "sys.argv[0] = 'ps-server'; runpy.run_module('paramserver.ps', run_name='__main__')"
    )
    server = cluster.start("server", "-c", code, *FLAGS, "--listen", "127.0.0.1:0", **OFTEN, **asked)
    cluster.address = server.event("listening")["address"]
    assert [cluster.worker(0).wait(), server.wait()] == [0, 0], server.output
    assert [event["level"] for event in server.events("store_off")] == ["warning" if is_asked_for else "info"]
