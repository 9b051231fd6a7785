"""Evaluations while a run goes on: of the server's weights of one version, without a trace in the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, Process, end_well

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "evaluation" / "evaluated.py"
MODES = {
    "sync": ("--mode", "sync"),
    "async": ("--mode", "async"),
    "delayed_update": ("--mode", "async", "--delayed-update"),
    "localsgd": ("--mode", "localsgd", "--local-steps", "4"),
    "averaging": ("--mode", "localsgd", "--local-steps", "2", "--delayed-update"),
}


def run(cluster: Cluster, mode: str, **env: str) -> list[Process]:
    """The two workers of a run that has ended well."""
    outputs = ("--summary", "s.json", "--save", "w.safetensors", "--curve", "c.csv")
    server = cluster.server("--workers", "2", *MODES[mode], *outputs)
    scripts = [cluster.script(rank, SCRIPT, **env) for rank in range(2)]
    end_well(*scripts, server)
    return scripts


def total(path: Path) -> float:
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    return sum(tensor.double().sum().item() for name, tensor in load_file(path).items() if name in names)


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_evaluates_versions_and_the_best_is_kept(cluster: Cluster, mode: str) -> None:
    """24 steps each."""
    scripts = run(cluster, mode, EVERY="5")
    found = cluster.summary()
    steps = [point["step"] for point in found["curve"]]
    assert steps == ([8, 12, 16, 20, 24] if mode == "localsgd" else steps) and len(steps) >= 3
    if mode == "sync":
        assert steps == [5, 10, 15, 20, 24] and [point["version"] for point in found["curve"]] == steps
    by = [script.output.count("evaluates") for script in scripts]
    assert by == [len(steps), 0], "one of them"
    best = min(found["curve"], key=lambda point: point["metrics"]["loss"])
    assert found["best"] == best
    assert total(cluster.folder / "best.safetensors") == pytest.approx(best["metrics"]["total"], abs=1e-12)
    lines = (cluster.folder / "c.csv").read_text().splitlines()
    assert lines[0] == "step,version,elapsed_s,loss,total" and len(lines) == len(steps) + 1


def test_it_changes_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    """BatchNorm, dropout, random numbers; the evaluation leaves the model in training mode, too."""
    run(cluster, "sync")
    without = load_file(cluster.folder / "w.safetensors")
    run(cluster, "sync", EVERY="3", SAVE=str(tmp_path / "w.pt"))
    both = load_file(cluster.folder / "w.safetensors")
    assert all(torch.equal(both[name], without[name]) for name in without)
    local = torch.load(tmp_path / "w.pt")
    assert all(torch.equal(local[name], without[name]) for name in without)


TASK = ("--task", f"{SCRIPT.with_name('fragile.py')}:Fragile")


def test_a_evaluator_evaluates_and_the_workers_need_not(cluster: Cluster) -> None:
    every, outputs = ("--eval-every", "5"), ("--summary", "s.json", "--save", "w.safetensors")
    server = cluster.server("--workers", "1", "--steps", "60", *outputs, *every, *TASK)
    where = ("--evaluate", "--server", cluster.address)
    evaluator = cluster.start("evaluator", "-m", "paramserver.worker", *where, *every, *TASK)
    server.event("evaluator")
    worker = cluster.worker(0, "--set", "slowdown.base_s=0.05", *TASK)
    end_well(worker, server, evaluator)
    found = cluster.summary()
    versions = [event["version"] for event in evaluator.events("evaluated")]
    assert len(versions) >= 3 and set(versions) <= {point["version"] for point in found["curve"]}
    assert {point["version"] for point in found["curve"]} - set(versions) <= {5, 10, 15, 20, 60}, "before it was there"
    assert found["best"]["version"] == min(found["curve"], key=lambda point: point["metrics"]["loss"])["version"]
    weights = load_file(cluster.folder / "best.safetensors").values()
    assert sum(weight.double().sum().item() for weight in weights) == pytest.approx(found["best"]["metrics"]["total"])


def test_a_script_is_a_evaluator_too_and_ends_where_its_loop_would_begin(cluster: Cluster) -> None:
    server = cluster.server("--workers", "1", "--summary", "s.json", "--save", "w.safetensors")
    evaluator = cluster.script(0, SCRIPT, EVERY="5", SAVE="evaluator.pt", PS_WORKER__EVALUATE="1")
    server.event("evaluator")
    worker = cluster.script(0, SCRIPT, EVERY="5", PS_SLOWDOWN__BASE_S="0.05")
    end_well(worker, server, evaluator)
    events = evaluator.events("evaluated")
    assert len(events) >= 3 and {event["version"] for event in events} <= {
        point["version"] for point in cluster.summary()["curve"]
    }
    assert worker.output.count("evaluates") <= 2, "what was due before it was there, and the final weights"
    assert not (cluster.folder / "evaluator.pt").exists() and cluster.summary()["workers"][0]["training_steps"] == 48
    assert total(cluster.folder / "best.safetensors") == pytest.approx(cluster.summary()["best"]["metrics"]["total"])


def test_a_evaluator_over_shards_evaluates_one_version_and_what_is_enough_is_the_end(cluster: Cluster) -> None:
    task = ("--task", f"{SCRIPT.with_name('even.py')}:Even")
    outputs = ("--summary", "s.json", "--save", "w.safetensors", "--optimizer", "sgd", "--lr", "1")
    run_of = ("--workers", "2", "--steps", "500", "--stop-when", "loss < -60", "--mode", "async", *outputs, *task)
    server = cluster.server("--shards", "3", *run_of)
    shards = cluster.shards(3)
    where = ("--evaluate", "--server", cluster.address, "--eval-every", "5")
    evaluator = cluster.start("evaluator", "-m", "paramserver.worker", *where, *task)
    server.event("evaluator")
    workers = [cluster.worker(rank, "--set", "slowdown.base_s=0.02", *task) for rank in range(2)]
    end_well(*workers, server, *shards, evaluator)
    events = evaluator.events("evaluated")
    assert len(events) >= 3 and all(event["spread"] == 0 for event in events)
    assert all(event["loss"] == -event["version"] for event in events)
    found = cluster.summary()
    assert {event["version"] for event in events[:-1]} <= {point["version"] for point in found["curve"]}
    assert found["ended_by"].startswith("stopped: loss < -60 (run.stop_when): ")
    weight = load_file(cluster.folder / "best.safetensors")["weight"]
    assert torch.equal(weight, torch.full_like(weight, -found["best"]["version"]))


def test_a_task_is_evaluated_each_epoch_where_nothing_else_is_said(cluster: Cluster) -> None:
    """40 samples in batches of 10: 4 steps an epoch. The curve goes on after a resume, without what came after the
    last snapshot, which is of the final weights before they were evaluated."""
    kept = ("--workers", "1", "--stop-when", "loss < -1", "--checkpoint-dir", "snapshots", "--batch-size", "10", *TASK)
    outputs = ("--summary", "s.json", "--curve", "c.jsonl")
    for total_epochs, steps in (("2", [4, 8]), ("4", [4, 12, 16])):
        server = cluster.server(*kept, *outputs, "--epochs", total_epochs)
        end_well(cluster.worker(0, *TASK), server)
        assert [point["step"] for point in cluster.summary()["curve"]] == steps
        assert len((cluster.folder / "c.jsonl").read_text().splitlines()) == len(steps)


@pytest.mark.parametrize("every", [("--eval-every", "5"), ()])
def test_alone_one_that_fails_fails_the_run_too(cluster: Cluster, every: tuple[str, ...]) -> None:
    """In the middle and at the end: the weights are of the newest step, and what the task has written is there."""
    outputs = ("--save", "w.safetensors", "--summary", "s.json", "--steps", "12")
    done = cluster.command("worker", "--server", "none", *outputs, *every, *TASK, FAIL="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("Traceback") == 1 and "ValueError: no such metric" in done.stderr, done.stderr
    steps = 5 if every else 12
    assert cluster.summary()["ended_by"] == f"failed at step {steps}: ValueError: no such metric"
    assert cluster.summary()["version"] == steps and f"step {steps}" in done.stdout + done.stderr
    with safe_open(cluster.folder / "w.safetensors", "pt") as weights:
        assert weights.metadata()["version"] == str(steps)
    assert (cluster.folder / "steps.txt").read_text().split() == [str(step) for step in range(steps)]
