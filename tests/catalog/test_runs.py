"""ps-runs: on runs of real servers, and on files with many."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from platform import node
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.catalog.showing import fitting, labels_of
from paramserver.common.config.schema import Config
from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.common.reporting.log import setup_logging
from paramserver.common.reporting.summary import EvaluatedPoint, Status, Summary, Tick, WorkerStatus, event
from paramserver.common.runstore import reading
from paramserver.common.runstore.reading import RunStore, StoredRun, relevant_settings
from paramserver.common.runstore.record import Ran, Record
from paramserver.common.runstore.schema import VERSION
from paramserver.tests.cluster import Cluster, run_forked
from paramserver.web.stored import Store, summary_of, view_of

EVIL = "<script>alert(1)</script> [bold red]x[/] \x1b[2J"


def write(path: Path, run: str, *, mode: str = "sync", seed: int = 0, work: str = "digits", ends: bool = True,
          **config: Any) -> None:  # fmt: skip
    """A run of three statuses and two evaluations."""
    settings = {"run": {"mode": mode, "seed": seed, "steps": 100}, "optimizer": {"lr": 0.1, **config}}
    record = Record(config_of(path.parent), run=run, mode=mode)
    record.ran = Ran(work, settings)
    curve = [
        EvaluatedPoint(step=step, version=step, elapsed_s=step / 10, metrics={"accuracy": step / 200},
                       samples=10 * step, num_bytes=1000 * step, is_best=True)
        for step in (50, 100)
    ]  # fmt: skip
    for step in (0, 50, 100):
        worker = WorkerStatus(rank=0, step=step, loss=1 / (step + 1), samples=10 * step, bytes_sent=1000 * step)
        status = Status(version=step, step=step, elapsed_s=step / 10, workers=[worker])
        events = [event(time.time(), "leave", 0, {"how": "closed", "reason": "lost"})] if step == 50 else []
        tick = Tick(at=time.time(), status=status, events=events,
                    evaluations=[point for point in curve if point.step == step])  # fmt: skip
        if step < 100 or not ends:
            record.add(tick)
    if ends:
        workers = [WorkerStatus(rank=0, training_steps=100, samples=1000, compute_s=1.0, bytes_sent=50_000)]
        summary = Summary(mode=mode, wall_s=10.0 + seed, final={"accuracy": 0.5}, curve=list(curve), version=100,
                          workers=workers)  # fmt: skip
        record.end(tick, summary, "")
    else:
        assert record.write()
        record.close()


def write_many(file: Path, count: int) -> None:
    """So many runs, all but the first copies of it in SQL."""
    write(file, "aaaa00000000")
    with closing(sqlite3.connect(file)) as db, db:
        names = [row[1] for row in db.execute("PRAGMA table_info(runs)")]
        others = ", ".join(name for name in names if name not in ("key", "id"))
        for number in range(1, count):
            db.execute(
                f"INSERT INTO runs (id, {others}) SELECT ?, {others} FROM runs WHERE key = 1", [f"{number:012d}"]
            )
        db.execute("INSERT INTO documents SELECT key, 'config', printf('%.*c', 20000, 'x') FROM runs WHERE key > 1")


def ps_runs(*arguments: str, folder: Path, code: int = 0) -> str:
    done = run_forked(folder, "-m", "paramserver.catalog", *arguments, environ=dict(os.environ))
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = tmp_path / "runs" / "paramserver.db"
    write(file, "aaaa00000001")
    write(file, "aaaa00000002", seed=1)
    write(file, "bbbb00000003", mode="async", lr=0.2)
    write(file, "cccc00000004", work="gpt", ends=False)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:  # its writer is a process that is gone
        db.execute("UPDATE runs SET process = '999999999 1' WHERE id = 'cccc00000004'")
    return tmp_path


@pytest.mark.slow
def test_runs_are_listed_shown_named_and_forgotten(folder: Path) -> None:
    found = json.loads(ps_runs("list", "--json", folder=folder))
    assert [run["id"] for run in found] == ["cccc00000004", "bbbb00000003", "aaaa00000002", "aaaa00000001"]
    assert [run["state"] for run in found] == ["lost", "done", "done", "done"], "its writer is gone"
    assert "crashed" in ps_runs("list", folder=folder)
    assert "bbbb00000003 is baseline" in ps_runs("tag", "bbbb", "baseline", folder=folder)
    assert "baseline" in ps_runs("list", folder=folder) and f"host {node()}" in ps_runs(
        "show", "baseline", folder=folder
    )
    output = ps_runs("tag", "aaaa00000001", "baseline", folder=folder, code=2)
    assert "another run is called baseline" in output
    assert "worker 0 is gone: lost" in ps_runs("show", "baseline", folder=folder), "an event is a sentence"
    assert "did you mean 'baseline'?" in ps_runs("show", "baselin", folder=folder, code=2)
    assert "may be" in ps_runs("show", "aaaa", folder=folder, code=2)
    everything = json.loads(ps_runs("show", "baseline", "--json", folder=folder))
    assert [point["step"] for point in everything["series"]] == [0, 50, 100]
    assert everything["config"]["optimizer"]["lr"] == 0.2
    rows = list(csv.DictReader(io.StringIO(ps_runs("export", "baseline", folder=folder))))
    assert [row["step"] for row in rows] == ["0", "50", "100"]
    ps_runs("delete", "baseline", "aaaa00000001", folder=folder)
    found = json.loads(ps_runs("list", "--json", folder=folder))
    assert [run["id"] for run in found] == ["cccc00000004", "aaaa00000002"]


def test_runs_are_compared_with_what_differs(folder: Path) -> None:
    result = json.loads(ps_runs("compare", "aaaa00000001", "aaaa00000002", "bbbb", "--json", folder=folder))
    assert [run["label"] for run in result["runs"]] == ["sync", "sync", "async"], "of two seeds one name"
    assert result["differences"] == {
        "run.mode": ["sync", "sync", "async"], "run.seed": [0, 1, 0], "optimizer.lr": [0.1, 0.1, 0.2],
    }  # fmt: skip
    assert any(
        line.startswith("Seconds in all: async is best") or "no difference" in line for line in result["findings"]
    )
    shown = ps_runs("compare", "aaaa00000001", "bbbb", "--report", "out", folder=folder)
    assert "optimizer.lr" in shown and "out/report.html" in shown
    html, text = ((folder / "out" / name).read_text() for name in ("report.html", "report.md"))
    assert '"accuracy"' in html and "optimizer.lr" in html
    assert "| 5.0 | 50 | 0.2500 | 50.0 kB |" in text
    drawn = sorted(path.name for path in (folder / "out").glob("*.png"))
    assert (
        drawn == ["accuracy-over-bytes.png", "accuracy-over-s.png", "accuracy-over-steps.png"]
        or find_spec("matplotlib") is None
    )


def test_runs_of_different_tasks_are_not_ranked(folder: Path) -> None:
    result = json.loads(ps_runs("compare", "aaaa00000001", "cccc", "--json", "--report", "out", folder=folder))
    assert result["findings"] == [] and "different tasks (digits, gpt)" in result["notes"][0]
    assert "crashed" in result["notes"][1]
    assert "different tasks" in (folder / "out" / "report.html").read_text()
    assert "a comparison needs two runs" in ps_runs("compare", "cccc", folder=folder, code=2)


def test_runs_without_evaluations_are_compared_by_their_training_loss(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "runs" / "paramserver.db")) as db, db:
        db.execute("DELETE FROM evaluations")
        db.execute("UPDATE documents SET body = json_set(body, '$.curve', json('[]')) WHERE name = 'summary'")
    compared = ["compare", "aaaa00000001", "bbbb", "--report", "out", "--target"]
    assert "s to train_loss <= 0.1" in ps_runs(*compared, "train_loss<=0.1", folder=folder)
    assert "train_loss is drawn" in (folder / "out" / "report.html").read_text()
    assert "| 5.0 | 50 | 0.0196 | 50.0 kB |" in (folder / "out" / "report.md").read_text()
    assert "'accuracy' is no condition" in ps_runs(*compared, "accuracy", folder=folder, code=2)


def test_a_run_without_a_summary_has_its_cost_so_far(folder: Path) -> None:
    file = folder / "runs" / "paramserver.db"
    write(file, "dddd00000005", ends=False)
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE documents SET body = json_set(body, '$.cost', json('{\"per_hour\": 360}')) "
                   "WHERE name = 'config' AND run = (SELECT key FROM runs WHERE id = 'dddd00000005')")  # fmt: skip
    with RunStore(file) as store:
        run = store.find("dddd")
        cost = summary_of(run, view_of(store, run)).cost
    assert cost is not None and (cost.total, cost.currency) == (1.0, "USD")  # of 10 s


def test_a_metric_is_drawn(folder: Path) -> None:
    assert ps_runs("plot", "bbbb", folder=folder).count("•") == 3
    ps_runs("plot", "bbbb", "--metric", "accuracy", "--over", "bytes", "--out", "a.svg", folder=folder)
    assert (folder / "a.svg").read_text().count("<polyline") == 1
    output = ps_runs("plot", "bbbb", "--metric", "accuracy", "--over", "samples", "--json", folder=folder)
    assert json.loads(output)["points"] == [[500.0, 0.25], [1000.0, 0.5]]
    assert "has no metric loos" in ps_runs("plot", "bbbb", "--metric", "loos", folder=folder, code=2)


def test_names_are_data(folder: Path) -> None:
    write(folder / "runs" / "paramserver.db", "dddd00000005", mode=EVIL, work=EVIL, lr=EVIL)
    for arguments in (["list"], ["show", "dddd"], ["compare", "dddd", "bbbb", "--report", "out"], ["plot", "dddd"]):
        output = ps_runs(*arguments, folder=folder)
        assert "\x1b[2J" not in output and ("[bold red]" in output or "[2J-" in output)
    assert "<script>alert" not in (folder / "out" / "report.html").read_text()


@pytest.mark.parametrize("text", ["newer", "older", "damaged", "none"])
def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path, text: str) -> None:
    file, expected = tmp_path / "paramserver.db", {
        "newer": f"version {VERSION + 1}", "older": "an older paramserver wrote it", "damaged": "not a database"
    }  # fmt: skip
    if text in ("newer", "older"):
        with closing(sqlite3.connect(file)) as db:
            db.execute(f"PRAGMA user_version = {VERSION + (1 if text == 'newer' else -1)}")
    elif text == "damaged":
        file.write_bytes(b"no database" * 1000)
    assert expected.get(text, "there is no run store") in ps_runs("list", "--db", str(file), folder=tmp_path, code=14)


def test_a_thousand_runs_are_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "paramserver.db"
    write_many(file, 1000)
    took = []
    for _ in range(5):
        began = time.process_time()
        with RunStore(file) as store:
            assert len(store.runs()) == 1000
        took.append(time.process_time() - began)
    assert min(took) < 0.3


def test_a_page_reads_the_list_again_once_somebody_has_written(tmp_path: Path) -> None:
    file = tmp_path / "paramserver.db"
    store = Store(file)
    assert store.runs() == []
    write(file, "a" * 12)
    first = store.runs()
    assert [stored_run.id for stored_run in first] == ["a" * 12] and store.runs() is first
    write(file, "b" * 12)
    assert {stored_run.id for stored_run in store.runs()} == {"a" * 12, "b" * 12}
    reading.rename(file, 1, "lively")
    assert "lively" in [stored_run.name for stored_run in store.runs()]
    reading.remove(file, [1])
    assert [stored_run.id for stored_run in store.runs()] == ["b" * 12]
    write(file, "c" * 12, ends=False)
    assert store.runs()[0].state == "running" and store.runs() is not store.runs()  # it may be lost without a word
    file.unlink()
    assert store.runs() == []


def test_a_long_run_is_thinned_and_its_end_is_there(tmp_path: Path) -> None:
    file = tmp_path / "paramserver.db"
    record = Record(config_of(tmp_path), run="a", mode="sync")
    for step in range(1, 5001):
        status = Status(step=step, version=step, workers=[WorkerStatus(rank=0)])
        record.add(Tick(at=float(step), status=status, is_over=step == 5000))
    assert record.write()
    record.close()
    with RunStore(file) as store:
        (run,) = store.runs()
        steps = [point.step for point in store.series(run)]
        assert 512 <= len(steps) <= 1024 and run.step == steps[-1] == 5000
        gaps = {after - before for before, after in pairwise(steps[:-1])}
        assert gaps == {8}
        assert [point.tick for point in store.worker_series(run)] == [point.tick for point in store.series(run)]


def test_a_finished_run_has_its_staleness_by_versions_and_its_waits(tmp_path: Path) -> None:
    file = tmp_path / "paramserver.db"
    record = Record(config_of(tmp_path), run="a", mode="async")
    for step in (1, 2):
        ranks = [WorkerStatus(rank=rank, compute_s=3.0 * step, wait_s=1.0 * step * rank, contributions=rank + 1,
                              staleness_sum=rank * (rank + 1)) for rank in range(2)]  # fmt: skip
        tick = Tick(at=float(step), status=Status(step=step, version=step, elapsed_s=step, workers=ranks))
        if step == 1:
            record.add(tick)
    record.end(tick, Summary(mode="async", staleness={0: 5, 2: 1}), "")
    with RunStore(file) as store:
        (run,) = store.runs()
        found = view_of(store, run)
    assert found.newest is not None and found.newest.staleness == {0: 5, 2: 1}
    assert found.series["wait_share"] == [pytest.approx(1 / 7)] * 2
    assert found.series["staleness_mean"] == [pytest.approx(2 / 3)] * 2


def test_a_run_alone_goes_on_without_a_file_that_is_damaged(cluster: Cluster) -> None:
    (cluster.folder / "runs").mkdir()
    (cluster.folder / "runs" / "paramserver.db").write_bytes(b"no database" * 1000)
    done = cluster.command("launch", "--task", "linear", "--mode", "single", "--steps", "20", "--save", "w.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("store_off") == 1 and "not on record" in done.stderr
    assert (cluster.folder / "w.safetensors").exists() and "single" in done.stdout


def test_a_file_that_may_only_be_read_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "paramserver.db"
    write(file, "a" * 12)
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = DELETE")  # nothing beside the file
    before = file.read_bytes()
    with read_only(file):
        record = record_in(tmp_path)
        record.add(tick(1))
        record.flush()
        record.end(tick(50), Summary(mode="sync"), "")
        assert record.is_off and capsys.readouterr().err.count("store_off") == 1
        with RunStore(file) as store:
            assert [run.id for run in store.runs()] == ["a" * 12]
    assert file.read_bytes() == before


def process(run: str) -> str:
    """A process that begins a run in the store of its folder, and lives until its input ends."""
    return (
        "import sys; from paramserver.common.config.schema import Config; "
        "from paramserver.common.runstore.record import Record; "
        f"Record(Config(), run='{run}', mode='sync').write(); print('begun', flush=True); sys.stdin.read()"
    )


def test_a_run_has_one_writer_and_its_key_goes_to_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs" / "paramserver.db"
    command = [sys.executable, "-c", process("b" * 12)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "begun\n"
        record = record_in(file.parent)
        record.add(tick(1))
        record.flush()
        assert f"process {other.pid} on " in capsys.readouterr().err and not record.is_off
        with RunStore(file) as store:
            assert [(run.starts, run.step) for run in store.runs()] == [(1, 0)], "nothing of this process"
        assert other.stdin is not None
        other.stdin.close()
        other.wait()
    record.flush()  # the other has crashed
    with RunStore(file) as store:
        (run,) = store.runs()
        assert (run.starts, run.step) == (2, 1)
    reading.remove(file, [run.key])
    write(file, "c" * 12)
    record.add(tick(2))
    record.flush()
    assert record.is_off and "was deleted while this process wrote it" in capsys.readouterr().err
    with RunStore(file) as store:
        (left,) = store.runs()
        assert left.key != run.key and [point.step for point in store.series(left)] == [0, 50, 100]


def test_a_run_that_goes_back_loses_the_evaluations_beyond_its_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "paramserver.db"
    write(file, "a" * 12)
    again = Record(config_of(tmp_path, name="mine", note="a note"), run="a" * 12, mode="sync", at_version=60)
    assert again.write()
    again.close()
    with RunStore(file) as store:
        (run,) = store.runs()
        assert [(point.version, point.num_bytes) for point in store.evaluations(run)] == [(50, 50_000)]
        assert (run.metrics, run.name, run.note) == ({"accuracy": 0.25}, "mine", "a note")
        assert run.work == "digits" and store.config(run)["optimizer"] == {"lr": 0.1}, "until a worker says it again"


@pytest.mark.parametrize(
    ("terms", "found"),
    [(["digits-sync"], "123"), (["lr<0.15"], "12"), (["lr=0.2", "mode=async"], "4"), (["accuracy>0.4", "seed=1"], "2"),
     (["optimizer.lr!=0.1"], "34"), (["mode=a*"], "4"), (["nobody"], ""), (["width=1"], None)],
)  # fmt: skip
def test_runs_are_filtered_by_what_is_on_record(tmp_path: Path, terms: list[str], found: str | None) -> None:
    file = tmp_path / "runs" / "paramserver.db"
    for number, (mode, seed, lr) in enumerate(
        [("sync", 0, 0.1), ("sync", 1, 0.1), ("sync", 0, 0.2), ("async", 0, 0.2)]
    ):
        write(file, f"aaaa0000000{number + 1}", mode=mode, seed=seed, lr=lr)
    with RunStore(file) as store:
        runs = store.runs()
        settings = {key: relevant_settings(config) for key, config in store.configs(run.key for run in runs).items()}
    if found is None:
        with pytest.raises(UsageError, match="no run has 'width'"):
            fitting(runs, settings, terms)
    else:
        assert sorted(run.id[-1] for run in fitting(runs, settings, terms)) == list(found)


VALUES = st.fixed_dictionaries({
    "run.seed": st.integers(0, 2), "optimizer.lr": st.sampled_from([0.1, 0.2]),
    "script.arguments": st.sampled_from("ab"), "config.x": st.integers(0, 1),
})  # fmt: skip


@given(all_values=st.lists(VALUES, min_size=2, max_size=6))
def test_runs_are_pooled_only_if_nothing_but_their_seed_differs(all_values: list[dict[str, Any]]) -> None:
    runs = [StoredRun(id=f"{number:06d}000000", mode="sync", work="w") for number in range(len(all_values))]
    differs = {name: [values[name] for values in all_values] for name in all_values[0]}
    labels = labels_of(runs, {name: values for name, values in differs.items() if len(set(values)) > 1})
    rest = [{name: value for name, value in values.items() if name != "run.seed"} for values in all_values]
    for index, label in enumerate(labels):
        assert [other == label for other in labels] == [item == rest[index] for item in rest]


def test_runs_of_which_nobody_said_what_they_run_are_pooled_with_none() -> None:
    labels = labels_of([StoredRun(id=f"{number:06d}000000", mode="sync") for number in range(3)], {})
    assert len(set(labels)) == 3


def tick(step: int) -> Tick:
    return Tick(at=time.time(), status=Status(step=step))


def config_of(folder: Path, **output: str) -> Config:
    return Config.model_validate({"output": {"track_dir": str(folder), **output}})


def record_in(folder: Path) -> Record:
    config = load_config(None, {"output.track_dir": str(folder)}, [], {}).config
    setup_logging(config.log, "ps-server")
    return Record(config, run="b" * 12, mode="sync")


@contextmanager
def read_only(file: Path) -> Iterator[None]:
    """Also for root, who may write what nobody may: then by an attribute of the file system, where it has one."""
    file.chmod(0o444)
    file.parent.chmod(0o555)
    is_kept = os.geteuid() == 0
    try:
        if is_kept and subprocess.run(["chattr", "+i", str(file)], capture_output=True, check=False).returncode:
            pytest.skip("root may write anything here: no chattr +i")
        yield
    finally:
        if is_kept:
            subprocess.run(["chattr", "-i", str(file)], capture_output=True, check=False)
        file.parent.chmod(0o755)


def test_the_command_starts_without_what_is_heavy() -> None:
    heavy = ("torch", "numpy", "grpc", "google.protobuf", "starlette", "uvicorn", "matplotlib")
    imports = "paramserver.catalog.main, paramserver.catalog.showing, paramserver.catalog.showing"
    code = f"import sys, {imports}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
