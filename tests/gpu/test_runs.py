"""Real runs of workers on a GPU: modes, transports, precision, two kinds of device, torch.compile, resume."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from paramserver.common.registry import MODES
from paramserver.tests.cluster import Cluster
from paramserver.tests.gpu.conftest import HERE, events, launched, task

pytestmark = pytest.mark.gpu

STEPS = 40
LEARNED = 0.5  # the loss begins at 1.4
TRANSPORTS = {"shared": "shared memory", "direct": "direct", "grpc": "grpc"}
# Of two float32 runs on devices that add in another order, 40 steps of SGD.
TOLERANCE = 1e-4


def run(cluster: Cluster, device: str, *flags: str, precision: str = "float32") -> dict:
    common = ("-n", "2", "--device", device, "--steps", str(STEPS))
    summary, lines = launched(cluster, *task(device, precision), *common, *flags)
    joined = {line["rank"]: line["device"].partition(":")[0] for line in events(lines, "joined")}
    assert joined == ({} if "single" in flags else {0: device, 1: device})
    assert summary["final"]["loss"] < LEARNED, summary["final"]
    assert all(worker["training_steps"] > 0 for worker in summary["workers"])
    assert all(worker["rejected"] == worker["skipped"] == 0 for worker in summary["workers"])
    return summary


@pytest.mark.parametrize("mode", [*MODES.names(), "single"])
def test_workers_train_in_every_mode(cluster: Cluster, device: str, mode: str) -> None:
    summary = run(cluster, device, "--mode", mode)
    assert summary["mode"] == mode
    if mode not in ("single", "allreduce"):
        assert {worker["transport"] for worker in summary["workers"]} == {"shared memory"}


@pytest.mark.parametrize("transport", ["direct", "grpc"])  # shared memory is the default, above
@pytest.mark.parametrize("mode", ["sync", "localsgd", "diloco"])  # gradients, weights, differences
def test_every_transport_carries_every_kind_of_contribution(
    cluster: Cluster, device: str, mode: str, transport: str
) -> None:
    transports = f"worker.transports={transport}" if transport == "grpc" else f"worker.transports={transport},grpc"
    summary = run(cluster, device, "--mode", mode, "--set", transports)
    assert {worker["transport"] for worker in summary["workers"]} == {TRANSPORTS[transport]}


def test_a_run_on_a_gpu_ends_with_the_weights_of_a_run_on_a_cpu(cluster: Cluster, device: str) -> None:
    for where in (device, "cpu"):
        flags = (
            "-n", "2", "--mode", "sync", "--steps", str(STEPS), "--device", where, "--save", f"on-{where}.safetensors",
        )  # fmt: skip
        launched(cluster, *task(where), *flags)
    ours, theirs = (load_file(cluster.folder / f"on-{where}.safetensors") for where in (device, "cpu"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def test_workers_on_a_cpu_and_on_a_gpu_share_a_run(cluster: Cluster, device: str) -> None:
    flags = ("--mode", "sync", "--workers", "2", "--steps", str(STEPS), "--lr", "0.05", "--set=output.store=false")
    server = cluster.server(*flags, PS_LOG__LEVEL="debug")
    workers = [cluster.worker(rank, *task(where), "--device", where) for rank, where in enumerate((device, "cpu"))]
    assert [worker.wait() for worker in workers] == [0, 0], [worker.output for worker in workers]
    assert server.wait() == 0, server.output
    joined = {event["rank"]: event["device"].partition(":")[0] for event in server.events("joined")}
    assert joined == {0: device, 1: "cpu"}
    assert server.events("summary")[-1]["final"]["loss"] < LEARNED


@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_the_forward_pass_is_in_bf16(cluster: Cluster, device: str, mode: str) -> None:
    run(cluster, device, "--mode", mode, "--precision", "bf16", precision="bfloat16")


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_run_with_a_lossy_codec_learns(cluster: Cluster, device: str, codec: str) -> None:
    summary = run(cluster, device, "--mode", "sync", "--optimizer", "sgd", "--set", f"worker.codec={codec}")
    assert {worker["codec"] for worker in summary["workers"]} == {codec}


def test_a_compiled_model_trains(cluster: Cluster, device: str) -> None:
    if device == "cuda" and not torch._inductor.utils.has_triton():  # type: ignore[attr-defined]
        pytest.skip("NOT RUN: torch.compile on CUDA needs triton, and this torch has none")
    backend = "inductor" if device == "cuda" else "aot_eager"
    ran = cluster.command(
        "launch", "-n", "2", "--mode", "sync", "--steps", str(STEPS), "--no-store", "--script",
        str(HERE / "compiled.py"), "--", device, backend,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    losses = [
        line.partition("LOSSES ")[2].split() for line in (ran.stdout + ran.stderr).splitlines() if "LOSSES" in line
    ]
    assert {item[2] for item in losses} == {"0", "1"}
    for first, last, _ in losses:
        assert float(last) < 0.2 * float(first), losses


def test_a_run_goes_on_from_a_cpu_to_a_gpu_and_back(cluster: Cluster, device: str) -> None:
    """Each part goes on from the snapshot of the one before; the whole equals a run that was never ended."""
    for steps, where in ((20, "cpu"), (40, device), (60, "cpu")):
        flags = ("-n", "2", "--mode", "sync", "--steps", str(steps), "--device", where, "--checkpoint-dir", "snapshots")
        summary, _ = launched(cluster, *task(where), *flags, "--optimizer", "adam", "--save", f"{steps}.safetensors")
        assert summary["version"] == steps
    launched(cluster, *task("cpu"), "-n", "2", "--mode", "sync", "--steps", "60", "--device", "cpu", "--optimizer",
             "adam", "--save", "whole.safetensors")  # fmt: skip
    parts, whole = load_file(cluster.folder / "60.safetensors"), load_file(cluster.folder / "whole.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)
