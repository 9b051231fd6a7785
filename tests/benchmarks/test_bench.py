"""The real commands with tiny sizes: what they report is complete and possible. No metric is judged by its speed."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from paramserver.benchmarks.output.plot import can_plot


def check_numbers(value: Any) -> None:
    """Every metric, however deep, is a finite one."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            check_numbers(inner)
    elif not isinstance(value, str):
        assert math.isfinite(value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("exchange --mb 0", "--mb"),
        ("exchange --mode snyc", "did you mean 'sync'?"),
        ("exchange --codec zip", "unknown codec 'zip'"),
        ("exchange --device tpu", "no such device"),
        ("exchange --transport shard", "did you mean 'shared'?"),
        ("round --baselines gloo,rey", "did you mean 'ray'?"),
        ("exchange --plot x.png", "add --sweep"),
        ("exchange --sweep --min-kb 2000 --max-mb 1", "--min-kb 2000 is above"),
        ("scale --workers 1,x", "'x' is no whole number"),
        ("memory --mode sync,sspp", "did you mean 'ssp'?"),
        ("memory --workers 0", "from 1 to 64"),
        ("step --task digit", "did you mean 'digits'?"),
        ("latency --exchange 10", "--exchanges"),
        ("zero --stages 0,2", "'2' is no stage"),
        ("pipeline --parts spede", "has no part 'spede'"),
        ("pipeline --layers 3", "are not divided evenly"),
        ("pipeline --schedule LoopedBFS", "has no schedule 'LoopedBFS'"),
        ("xor --json nowhere/x.json", "there is no directory"),
        ("allreduce --sweep --min-kb 2000 --max-mb 1", "--min-kb 2000 is above"),
        ("allreduce --width 24", "of 16"),
        ("race --baselines ddp,ddp-powersdg", "did you mean 'ddp_powersgd'?"),
        ("race --mode sync,diloco", "did you mean 'diloco-q4'?"),
        ("race --bandwidth 100", "--bandwidth 100mbit"),
        ("race --bandwidth 10kbit", "below 1 Mbit/s"),
        ("race --latency fast", "--latency 20ms"),
        ("race --lr 0.1,0", "above 0"),
        ("race --workers 1", "--workers"),
        ("race --seconds 1", "--seconds"),
        ("race --shards 3", "at most one on each worker's host"),
        ("race --plot race.gif", "SVG or PNG" if can_plot() else "needs matplotlib"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(bench: Any, argv: str, words: str) -> None:
    done = bench.run(*argv.split())
    assert done.returncode == 2 or "nowhere" in argv
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_no_torch(bench: Any) -> None:
    names = (
        "import sys; from paramserver.benchmarks import main; print([n for n in ('torch', 'grpc') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]"
    out = bench.run("--help").stdout
    assert out.index("Examples") < out.index("Commands")


@pytest.mark.slow
def test_sigterm_stops_every_process_too(bench: Any) -> None:
    process = bench.start("memory", "--mb", "1000", "--transport", "grpc")
    deadline = time.monotonic() + bench.deadline_s
    while len(bench.left()) < 2:
        assert time.monotonic() < deadline, "nothing was started"
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=bench.deadline_s)
    assert process.returncode == 143
    assert bench.left() == []


@pytest.mark.slow
def test_exchange_beside_peers(bench: Any) -> None:
    report, table = bench.measure(
        "exchange --mb 2 --runs 2 --mode bsp --codec bf16 --transport grpc --baselines unary,iperf,ddp"
    )
    config = report["config"]
    assert (config["mode"], config["codec"], config["transport"], config["workers"]) == ("sync", "bf16", "grpc", 1)
    check_numbers(report["results"])
    found = report["results"]["ours"]["grpc"]
    assert (report["results"]["size_mb"], found["sent_mb"], found["transport"]) == (2.0, 1.0, "grpc")
    for part in ("exchange", "up", "down"):
        assert 0 < found[f"{part}_best_ms"] <= found[f"{part}_ms"]
    assert found["gate_wait_ms"] >= 0  # one worker: nobody is waited for
    for part, num_mb in (("up", 1.0), ("down", 2.0)):
        assert found[f"{part}_gb_s"] == pytest.approx(num_mb / found[f"{part}_ms"], rel=0.01)
    # In every single exchange the parts are within the whole.
    assert found["gate_wait_best_ms"] + found["down_best_ms"] < found["exchange_ms"] * 1.01
    baselines, ratios = report["results"]["baselines"], report["results"]["ratios"]["grpc"]
    assert ratios.keys() == baselines.keys() == {"unary", *(["iperf"] if shutil.which("iperf3") else [])}
    assert "our rate / the baseline's" in table
    assert "ddp: has no part in exchange" in table
    assert ("iperf: NOT INSTALLED" in table) == (shutil.which("iperf3") is None)


@pytest.mark.slow
def test_a_sweep_and_its_picture(bench: Any) -> None:
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    plot = "--plot sweep.png" if has_matplotlib else ""
    report, table = bench.measure(f"exchange --sweep --min-kb 400 --max-mb 1 --runs 1 --transport shared {plot}")
    (size,) = report["results"]["sizes"]
    assert size["size_mb"] == 0.4
    assert set(size["ours"]) == {"shared", "shared, in place"}
    check_numbers(size["ours"])
    assert "0.4 MB" in table
    if has_matplotlib:
        assert (bench.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_round_beside_gloo_and_ddp(bench: Any) -> None:
    report, table = bench.measure("round --mb 1 --runs 2 --transport grpc --workers 2 --baselines gloo,ddp")
    found = report["results"]
    assert set(found["baselines"]) == {"gloo", "ddp"}
    check_numbers(found)
    for metric in (found["ours"]["grpc"], *found["baselines"].values()):
        assert 0 < metric["round_best_ms"] <= metric["round_ms"]
        assert metric["gb_s"] == pytest.approx(4 / metric["round_ms"], rel=0.01)
    assert "the slowest worker of each" in table


@pytest.mark.slow
def test_an_all_reduce_by_size_and_in_a_step(bench: Any) -> None:
    report, table = bench.measure("allreduce --sweep --min-kb 100 --max-mb 1 --layers 1 --width 16 --runs 2")
    found = report["results"]
    check_numbers(found)
    assert [size["size_kb"] for size in found["sizes"]] == [100, 1000]
    for size in found["sizes"]:
        assert set(size["of"]) == {"ours", "gloo", "ddp"}
        # Two workers: each link of a ring carries as much as is reduced.
        assert size["ring_ms"] == pytest.approx(size["size_kb"] * 1e3 / (found["stream_gb_s"] * 1e6), rel=0.01)
        for item in size["of"].values():
            assert (
                item["algorithm_gb_s"]
                == item["bus_gb_s"]
                == pytest.approx(size["size_kb"] / item["ms"] / 1e3, rel=0.01)
            )
        assert size["ratios"]["ddp"] == pytest.approx(size["of"]["ours"]["ms"] / size["of"]["ddp"]["ms"], rel=0.01)
    assert set(found["step"]) == {"computing alone", "ours", "sync, by the server", "ddp"}
    for item in found["step"].values():
        assert 0 < item["best_ms"] <= item["whole_ms"]
    assert "gloo: has no part in profile" in table


@pytest.mark.campaign
def test_what_each_worker_holds_by_stage(bench: Any) -> None:
    report, _ = bench.measure("zero --mb 1 --workers 1,2")
    *alone, whole, first, third = sorted(report["results"]["runs"], key=lambda run: (run["workers"], run["stage"]))
    assert [item["stage"] for item in alone] == [0, 1, 3]  # of one worker, which divides nothing
    assert len({item["held_mb"] for item in (*alone, whole)}) == 1
    for part in ("parameters", "gradients", "optimizer"):
        assert third[f"{part}_mb"] == pytest.approx(whole[f"{part}_mb"] / 2, rel=0.01)
    assert first["optimizer_mb"] == pytest.approx(whole["optimizer_mb"] / 2, rel=0.01)
    assert first["parameters_mb"] == whole["parameters_mb"]


@pytest.mark.slow
def test_stages_beside_one_process_and_bare_torch(bench: Any) -> None:
    report, table = bench.measure(
        "pipeline --parts speed --width 16 --layers 2 --batch-size 4 --microbatches 2 --runs 2"
    )
    check_numbers(report["results"])
    found = report["results"]["speed"]
    assert found["beside_bare"] == pytest.approx(found["stages_ms"] / found["bare_ms"], rel=1e-3)
    assert found["of_ideal"] == pytest.approx(found["speed_up"] / (2 * 2 / 3), rel=1e-3)
    assert "beside bare" in table


@pytest.mark.slow
def test_latency_beside_torch_rpc(bench: Any) -> None:
    report, table = bench.measure("latency --exchanges 50 --optimizer adam --baselines torch-rpc")
    assert report["config"]["payload_bytes"] == 203 * 4
    found = report["results"]
    for name in ("grpc", "direct", "ping", "torch-rpc"):
        metrics = found[name]
        assert 0 < metrics["best_us"] <= metrics["median_us"] <= metrics["p90_us"] <= metrics["p99_us"]
    assert found["ratios"]["direct"]["ping"]["median_us"] == pytest.approx(
        found["direct"]["median_us"] / found["ping"]["median_us"], rel=0.01
    )
    assert found["ratios"]["grpc"].keys() == {"ping", "torch-rpc"}
    assert "bare gRPC ping-pong" in table


@pytest.mark.slow
def test_scale(bench: Any) -> None:
    report, table = bench.measure("scale --workers 3 --seconds 0.5 --generators 2 --transport all")
    assert report["results"]["transports"].keys() == {"grpc", "direct"}
    for transport in report["results"]["transports"].values():
        found = transport["3"]
        assert found["exchanges_per_s"] > 0
        assert found["per_worker_ms"] == pytest.approx(3e3 / found["exchanges_per_s"], rel=0.01)
        # Each is a few threads on all cores.
        assert 0 < found["server_cpu"] < report["machine"]["cores"] * 1.2
        assert 0 < found["generator_cpu"] < report["machine"]["cores"] * 1.2
    assert "2 processes play the workers" in table


@pytest.mark.slow
def test_step(bench: Any) -> None:
    report, table = bench.measure("step --task digits --steps 5 --workers 2 --batch-size 4")
    found = report["results"]
    workers = found["transports"]["direct"]
    assert len(workers) == 2
    assert all(0 <= worker["overhead"] < 1 and worker["compute_ms"] > 0 for worker in workers)
    assert workers[0]["apply_ms"] == workers[1]["apply_ms"]
    item = found["payload_mb"] / found["stream_gb_s"]
    assert found["predicted_ms"] == pytest.approx(
        {"parameter_server": 2 * item, "parameter_server_shared_link": 4 * item, "ring_all_reduce": item}, rel=0.01
    )
    assert "a ring all-reduce" in table


@pytest.mark.slow
def test_memory(bench: Any) -> None:
    report, table = bench.measure("memory --mb 8 --workers 1 --mode async --transport grpc")
    (found,) = report["results"]["runs"]
    assert (found["mode"], found["transport"], found["workers"]) == ("async", "grpc", 1)
    # Parameters, twice that for Adam, a mean, one upload (there is one worker), a reply.
    assert found["expected_mb"] == 8 * (1 + 2 + 1 + 1 + 1)
    assert found["model_mb"] == pytest.approx(found["peak_mb"] - found["before_mb"], abs=0.2)
    assert found["model_mb"] > 8 * (1 + 2), "less than what it certainly holds"
    assert found["anonymous_mb"] > 8 * (1 + 2)
    assert "worker's copies" in table


@pytest.mark.slow
def test_xor(bench: Any) -> None:
    report, table = bench.measure("xor --workers 1 --steps 10 --runs 1")
    found = report["results"]["ours"]
    assert 0 < found["steps_per_s"] == found["best_steps_per_s"]
    assert "worker-steps/s" in table


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or "PS_TEST_RAY" not in os.environ,
    reason="RAY IS NOT TESTED: it takes half a minute; pip install ray, and set PS_TEST_RAY=1",
)
@pytest.mark.parametrize(
    "line",
    [
        "exchange --mb 1 --runs 1 --transport grpc --baselines ray",
        "latency --exchanges 20 --baselines ray",
        "xor --workers 2 --steps 5 --runs 1 --baselines ray",
    ],
)
def test_ray(bench: Any, line: str) -> None:
    report, _ = bench.measure(line)
    check_numbers(report["results"])
    assert "ray" in report["config"]["baselines"]
