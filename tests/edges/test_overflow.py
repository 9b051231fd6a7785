"""Finite gradients whose step is not finite: the run ends as diverged, says where, and keeps its last good snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paramserver.common.reporting.summary import Summary
from paramserver.common.runstore.reading import RunStore
from paramserver.tests.forks import Forked, Run

MEMBER, SERVER = "paramserver.tests.edges.overflowing", "paramserver.ps.main"
STEPS, STEP_AT = 8, 4


def serve(run: Run, *flags: str) -> Forked:
    folder = run.folder
    return run.serve(
        "--workers", "2", "--steps", str(STEPS), "--history", str(folder / "h.jsonl"), "--checkpoint-every", "1",
        "--checkpoint-dir", str(folder / "kept"), "--save", str(folder / "w.safetensors"),
        "--set", f"output.track_dir={folder}", *flags,
    )  # fmt: skip


def worker(run: Run, rank: int, *words: str) -> Forked:
    environ = {"RANK": str(rank), "PS_SERVER": run.address}
    item = run.forks[MEMBER].fork(f"w{rank}", run.folder, *words, **environ)
    run.processes.append(item)
    return item


def strictly(text: str) -> object:
    """JSON without the tokens that Python takes and others do not."""
    return json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} in JSON: {text[:300]}"))


def snapshots(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("weights.safetensors"))


def check_files(run: Run, *processes: Forked) -> Summary:
    """Everything that was written is JSON, and every snapshot is finite."""
    for line in (run.folder / "h.jsonl").read_text().splitlines():
        strictly(line)
    for process in processes:
        for line in process.output.splitlines():
            if line.startswith("{"):
                strictly(line)
    kept = snapshots(run.folder / "kept")
    assert kept
    assert all(bool(value.isfinite().all()) for path in kept for value in load_file(path).values())
    return Summary.model_validate(strictly((run.folder / "s.json").read_text()))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_run_ends_as_diverged_and_says_where(run: Run, mode: str, optimizer: str) -> None:
    server = serve(run, "--mode", mode)
    workers = [worker(run, rank, optimizer, str(STEP_AT if optimizer == "sgd" else 0)) for rank in range(2)]
    assert [worker.wait() for worker in (server, *workers)] == [16] * 3, server.output
    (event,) = server.events("diverged")
    value = "-inf" if optimizer == "sgd" else "nan"
    assert f"has {value} in '1.weight'" in event["error"]
    assert "the weights overflowed: version" in event["error"]
    assert "of rank " in event["error"]
    assert ("(lr 1000)" if optimizer == "sgd" else "(lr 0.1, eps 0)") in event["error"]
    for item in (server, *workers):
        assert "Traceback" not in item.output
        assert "the weights overflowed" in item.output
    if optimizer == "adam":  # before there was a snapshot of anything but version 0
        return
    summary = check_files(run, server, *workers)
    assert "the weights overflowed" in summary.ended_by
    assert not (run.folder / "w.safetensors").exists()
    assert server.events("not_saved")
    (stored,) = RunStore(run.folder / "paramserver.db").runs()
    assert "the weights overflowed" in stored.ended_by


def test_of_several_shards_any_ends_all(run: Run) -> None:
    """The tensor that overflows lies on shard 1."""
    server = serve(run, "--mode", "sync", "--shards", "2")
    other = run.forks[SERVER].fork(
        "shard1", run.folder, "--shard", "1", "--shards", "2", "--coordinator", run.address, "--listen", "127.0.0.1:0",
        "--checkpoint-dir", str(run.folder / "kept"),
    )  # fmt: skip
    run.processes.append(other)
    workers = [worker(run, rank, "sgd", str(STEP_AT)) for rank in range(2)]
    assert [worker.wait() for worker in (server, other, *workers)] == [16] * 4, server.output + other.output
    for item in (server, other, *workers):
        assert "the weights overflowed: version 5 has -inf in '1.weight" in item.output
        assert "Traceback" not in item.output
    check_files(run, server, other, *workers)


@pytest.mark.parametrize("mode", ["localsgd", "diloco", "allreduce"])
def test_weights_that_workers_step_themselves(run: Run, mode: str) -> None:
    local = () if mode == "allreduce" else ("--local-steps", "2")
    server = serve(run, "--mode", mode, *local, "--set", "store.max_nonfinite=3")
    workers = [worker(run, rank, "sgd", str(STEP_AT)) for rank in range(2)]
    codes = [worker.wait() for worker in workers]
    assert 16 in codes
    assert set(codes) <= {16, 15}, workers[0].output + workers[1].output
    output = "\n".join(worker.output for worker in (server, *workers))
    assert "Traceback" not in output
    assert "1.weight" in output
    message = (
        "the weights overflowed" if mode == "allreduce" else "contributions with NaN or Inf in '1.weight' in a row"
    )
    assert message in output
    if mode == "allreduce":
        server.popen.send_signal(15)
    assert server.wait() in (16, 143)
    check_files(run, server, *workers)
