"""`ps-launch --estimate`: a few real steps, and what all would take and cost."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from paramserver.common.config.flags import settings
from paramserver.common.config.sources import load_config
from paramserver.common.reporting.summary import Status, Summary, WorkerStatus
from paramserver.launch import run
from paramserver.launch.plan.runs import Machine, Request, plan_runs
from paramserver.launch.plan.settings import value_of, variable
from paramserver.tests.cluster import Cluster
from paramserver.tests.launch.plans import sets_of


@pytest.mark.slow
def test_an_estimate_leaves_nothing_behind(cluster: Cluster) -> None:
    (cluster.folder / "c.yaml").write_text(
        "run: {eval_every: 10}\noutput: {summary: s.json, curve: c.csv, history: h.jsonl}\n"
    )
    result = cluster.command(
        "launch", "c.yaml", "-n", "2", "--task", "xor", "--mode", "sync,localsgd", "--steps", "100000", "--estimate",
        "--save", "w.safetensors", "--checkpoint-dir", "snapshots", "--set", "cost.per_hour=36",
        "--set", "slowdown.base_s=0.02", "--local-steps", "4", "--set", "policy.backup_workers=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r"(sync|localsgd) ", line)]
    assert [row[0] for row in rows] == ["sync", "localsgd"]
    assert len(re.findall(r"a server and 2 workers", result.stderr)) == 2, "one short run of each mode"
    last = result.stdout.strip().splitlines()[-1]
    assert re.match(r"100,000 steps take about .* in (sync|localsgd), plus the time to start; .* times as long", last)
    for row in rows:
        assert 20 <= float(row[1].replace(",", "")) < 200  # ms: each step sleeps 20
        cost = float(row[row.index("USD") - 1].replace(",", ""))
        assert 20.0 <= cost < 200.0  # 1 cent a second
    left = {path.name for path in cluster.folder.iterdir() if not path.name.startswith("command")}  # the test's logs
    assert left == {"c.yaml"}


# Settings of results and snapshots that an estimate keeps, because nothing is written by them alone.
_KEPT = {"output.name", "output.note", "output.target", "output.project", "output.track_dir", "checkpoint.keep"}
_VALUES = {
    "output.curve": "c.csv", "output.traces": "http://h:1", "output.track": "tensorboard", "output.store": True,
    "output.save_averaged": True, "output.target": "loss < 1", "checkpoint.every_steps": 2, "checkpoint.every_s": 1.0,
    "checkpoint.keep": 2,
}  # fmt: skip


@pytest.mark.parametrize("source", ["flag", "set", "file", "environment"])
@pytest.mark.parametrize("mode", ["sync", "single"])
def test_a_short_run_gets_no_place_of_the_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, mode: str
) -> None:
    names = [name for name in settings() if name.startswith(("output.", "checkpoint.")) and name not in _KEPT]
    values = {key: _VALUES.get(key, "x.safetensors") for key in names} | {"run.eval_every": "2", "run.patience": 2}
    if mode == "single":  # it has no server, which alone takes snapshots
        values = {key: value for key, value in values.items() if not key.startswith("checkpoint.")}
    texts = [f"{key}={value}" for key, value in values.items()]
    path = tmp_path / "c.yaml"
    body: dict[str, dict[str, object]] = {"store": {"polyak": 0.9}}  # save_averaged needs it
    for key, value in values.items() if source == "file" else ():
        section, _, name = key.partition(".")
        body.setdefault(section, {})[name] = value
    path.write_text(json.dumps(body))
    if source == "environment":
        for key, value in values.items():
            monkeypatch.setenv(variable(key), str(value))
    flags = {"run.mode": mode, **(values if source == "flag" else {})}
    sets = texts if source == "set" else []
    _, resolved = run.resolve(str(path), flags, sets)
    only, short = run.resolve(str(path), flags, sets, run.short_settings(resolved, mode, 60))
    (plan,) = plan_runs(short, Request(modes=only, config_path=str(path)), Machine(python="python"))
    config = load_config(str(path), {}, sets_of(plan.processes()[0].argv), os.environ).config
    on = {key: value_of(config, key) for key in values}
    assert {key: value for key, value in on.items() if value not in (None, False)} == {}
    assert (plan.save, plan.history, plan.checkpoint_dir, plan.summary) == (None, None, None, None)


def status(elapsed_s: float, step: int) -> Status:
    return Status(mode="sync", elapsed_s=elapsed_s, step=step)


def test_a_short_run_ends_when_its_pace_is_steady() -> None:
    enough = run.Enough(least=2)
    assert not enough(status(1.0, 1)), "its first step loads and allocates"
    found = [enough(status(*item)) for item in ((2.0, 4), (3.0, 14), (4.0, 24), (5.0, 34), (6.0, 44))]
    assert found == [False, False, False, True, True]
    enough = run.Enough(least=2)
    uneven = [enough(status(float(at), at * at)) for at in range(2, 22)]
    assert uneven == [False] * 18 + [True, True], "after 20 s at any rate"
    assert not run.Enough(least=64)(status(30.0, 63)), "two rounds, however long they take"


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_bytes_that_travel_once_are_left_out(num_workers: int) -> None:
    """60 rounds of 1,000 bytes each way; the weights once up, and once down to each."""
    workers = [
        WorkerStatus(
            rank=rank, training_steps=60, contributions=60, bytes_sent=60_000 + 1_000 * (rank == 0),
            bytes_received=61_000,
        )
        for rank in range(num_workers)
    ]  # fmt: skip
    summary = Summary(mode="sync", local_steps=1, staleness_bound=0, version=60, workers=workers)
    assert run.bytes_once(summary) == pytest.approx(1_000 * (num_workers + 1))
    assert run.steps_taken(summary, 60) == 60


def test_the_closing_sentence() -> None:
    text = run.sentence({"sync": 120.0, "localsgd": 40.0}, 1000)
    assert text == "1,000 steps take about 40 s in localsgd, plus the time to start; sync takes 3.0 times as long."
    assert run.sentence({"sync": 3.0}, 10) == "10 steps take about 3.0 s in sync, plus the time to start."


@pytest.mark.slow
def test_ctrl_c_shows_the_modes_that_were_estimated(cluster: Cluster) -> None:
    flags = ("-n", "2", "--task", "xor", "--mode", "localsgd,sync", "--steps", "1000", "--set", "slowdown.base_s=1")
    process = cluster.start("estimate", "-m", "paramserver.launch", *flags, "--estimate", "--local-steps", "1",
                            PS_LOG__FORMAT="text")  # fmt: skip
    process.until(lambda: re.search(r"step [1-3]/60", process.output) is not None, "some steps")
    process.signal(signal.SIGINT)
    assert process.wait() == 130, process.output
    assert "Traceback" not in process.output
    assert "1,000 steps take about" in process.output and "ended: 1 of 2 modes were estimated" in process.output


def test_what_cannot_be_estimated_is_said(cluster: Cluster) -> None:
    result = cluster.command("launch", "-n", "2", "--task", "xor", "--epochs", "3", "--estimate")
    assert result.returncode == 2
    assert "of a number of epochs, is unknown" in result.stderr and "--steps N" in result.stderr
