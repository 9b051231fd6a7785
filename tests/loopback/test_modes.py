"""Every mode trains a real task through the real programs, and writes what it says it writes."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from paramserver.common.registry import MODES
from paramserver.tests.cluster import end_well
from paramserver.tests.forks import Run
from paramserver.worker.tasks.digits import ENTRY as Digits
from paramserver.worker.tasks.xor import ENTRY as Xor

XOR = (
    "--task", "xor", "--optimizer", "adam", "--lr", "0.05", "--batch-size", "64", "--set",
    "task.args={num_samples: 20000}",
)  # fmt: skip
WORKER = "paramserver.worker.main"
DELAYED = [mode for mode in MODES.names() if MODES.load(mode).may_delay_update]
TRANSPORTS = {"grpc": "grpc", "shared,grpc": "shared memory", "direct,grpc": "direct"}
DIGITS = (
    "--task", "digits", "--set", "task.args={channels: [8], hidden: 256}", "--optimizer", "adam", "--lr", "0.003",
    "--steps", "121",
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "delayed"),
    [(mode, ()) for mode in MODES.names()]
    + [pytest.param(mode, ("--delayed-update",), marks=pytest.mark.slow) for mode in DELAYED],
)
def test_mode_trains_saves_and_summarises(run: Run, mode: str, delayed: tuple[str, ...]) -> None:
    """Over a transport that the modes take in turn."""
    transport = list(TRANSPORTS)[MODES.names().index(mode) % len(TRANSPORTS)]
    weights = run.folder / "w.safetensors"
    run.serve("--mode", mode, "--workers", "2", "--save", str(weights), *delayed, *DIGITS)
    for rank in range(2):
        flags = ("--rank", str(rank), "--server", run.address, "--set", f"worker.transports={transport}")
        run.processes.append(run.forks[WORKER].fork(f"worker{rank}", run.folder, *flags))
    end_well(*reversed(run.processes))
    summary = json.loads((run.folder / "s.json").read_text())
    assert summary["mode"] == mode
    assert summary["final"]["accuracy"] > 0.8
    assert summary["version"]
    assert {row["transport"] for row in summary["workers"]} == {TRANSPORTS[transport]}
    assert all(row["bytes_sent"] > 0 and row["compute_s"] > 0 for row in summary["workers"])
    # The saved weights load into the bare model and are the ones that were evaluated.
    task = Digits(channels=[8], hidden=256)
    model = task.model()
    model.load_state_dict(load_file(weights))
    assert task.evaluate(model)["loss"] == pytest.approx(summary["final"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_polyak_average_is_kept_evaluated_and_saved(cluster):
    server = cluster.server(
        "--mode", "sync", "--workers", "1", "--steps", "100", "--summary", "s.json", "--save", "w.safetensors",
        "--set", "store.polyak=0.9", "--set", "output.save_averaged=true", *XOR,
    )  # fmt: skip
    worker = cluster.worker(0)
    end_well(worker, server)
    final = cluster.summary()["final"]
    task = Xor(num_samples=1000)
    model = task.model()
    model.load_state_dict(load_file(cluster.folder / "w.safetensors"))
    assert task.evaluate(model)["loss"] == pytest.approx(final["averaged_loss"], rel=1e-4)
    assert final["averaged_loss"] != final["loss"]


@pytest.mark.slow
def test_one_bit_adam_sends_signs_after_its_warm_up(cluster):
    """20 of 120 steps in bf16, of two workers; the server is killed in between, and the new one goes on."""
    flags = (
        "--mode", "sync", "--workers", "2", "--steps", "120", "--summary", "s.json", "--task", "digits",
        "--optimizer", "onebitadam", "--lr", "0.002", "--set", "optimizer.warmup_steps=20",
        "--checkpoint-dir", "snapshots", "--checkpoint-every", "5",
    )  # fmt: skip
    server = cluster.server(*flags)
    slow = ("--set", "slowdown.base_s=0.02")  # it is killed before the end
    workers = [cluster.worker(rank, *slow, "--set", "worker.codec=onebit_adam") for rank in range(2)]
    server.snapshot(25)
    server.kill()
    server = cluster.server(*flags, "--listen", cluster.address)
    end_well(*workers, server)
    summary = cluster.summary()
    assert summary["final"]["accuracy"] > 0.9
    for row in summary["workers"]:
        assert row["bytes_sent"] < 0.2 * row["bytes_received"], "an eighth, with the warm-up"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--delayed-update",)])
def test_dataloader_workers_do_not_hang(cluster, flags):
    """gRPC and fork: loader processes are forked after the connection was made, also while an exchange is in flight."""
    server = cluster.server("--mode", "async", *flags, "--workers", "1", "--steps", "40")
    end_well(cluster.script(0, "forking_loader.py"), server)


@pytest.mark.slow
def test_by_hand_a_worker_says_who_it_is_and_when_it_is_through(cluster):
    server = cluster.server("--steps", "3", "--workers", "1", "--task", "xor")
    worker = cluster.worker(0, PS_LOG__FORMAT="text")
    end_well(worker, server)
    lines = [line for line in worker.output.splitlines() if "rank=0" in line]
    assert "training" in lines[0] and "steps=3" in lines[0]
    assert "trained" in lines[-1] and "batches=3" in lines[-1]
