"""Workers of two processes each, in every mode: as if each were one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paramserver.tests.forks import Run
from paramserver.tests.replica_group.member import data, make, optimizer_of
from paramserver.worker.training.data import Shares

STEPS = 20
EXTRA = {
    "localsgd": ("--local-steps", "4"),
    "diloco": ("--local-steps", "4"),
    "async_diloco": ("--local-steps", "4"),
    "localsgd delayed_update": ("--local-steps", "4", "--delayed-update"),
}


def alone(
    steps: int, batch_size: int, optimizer: str, seed: int = 0, make: Callable[[], nn.Module] = make
) -> dict[str, torch.Tensor]:
    """One process with the union batch."""
    model = make()
    local_optimizer = optimizer_of(optimizer, model)
    shares = Shares(data(), batch_size, seed)
    inputs, targets = data().tensors
    plan = [rows for epoch in range(steps) for rows, _ in shares.batches_of(epoch, 1, 0)][:steps]
    for rows in plan:
        local_optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        local_optimizer.step()
    return model.state_dict()


def ended(run: Run) -> None:
    codes = {process.name: process.wait() for process in reversed(run.processes)}
    outputs = "".join(f"== {process.name}: {codes[process.name]}\n{process.output}" for process in run.processes)
    assert not any(codes.values()), outputs


def difference(item: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((item[key] - other[key]).abs().max()) for key in other)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_in_sync_two_groups_of_two_are_one_process_with_the_union_batch(run: Run, optimizer: str) -> None:
    """The last batch of each epoch has two samples for four processes."""
    run.serve(
        "--mode", "sync", "--workers", "2", "--steps", "100", "--batch-size", "8", "--save",
        str(run.folder / "w.safetensors"),
    )  # fmt: skip
    for rank in range(2):
        run.group(rank, 2, optimizer)
    ended(run)
    saved = load_file(run.folder / "w.safetensors")
    assert difference(saved, alone(100, 16, optimizer)) <= 1e-9
    for rank in range(2):
        for inner in range(2):
            assert difference(torch.load(run.folder / f"w{rank}-{inner}.pt"), saved) == 0


@pytest.mark.parametrize(
    "mode",
    [
        "async", "ssp", "dssp", "buffered", "localsgd", "diloco", "async_diloco", "allreduce", "async delayed_update",
        "localsgd delayed_update",
    ],
)  # fmt: skip
def test_every_mode_takes_a_group_as_a_worker(run: Run, mode: str) -> None:
    more = EXTRA.get(mode, ("--delayed-update",) if "delayed_update" in mode else ())
    run.serve("--mode", mode.split()[0], "--workers", "2", "--steps", str(STEPS), "--batch-size", "8",
              "--save", str(run.folder / "w.safetensors"), *more)  # fmt: skip
    for rank in range(2):
        run.group(rank, 2)
    ended(run)
    summary = json.loads((run.folder / "s.json").read_text())
    if mode != "async_diloco":  # whose contributions may be of fewer steps
        contributions = STEPS // (4 if len(more) > 1 else 1)
        counts = [(worker["training_steps"], worker["contributions"]) for worker in summary["workers"]]
        assert counts == [(STEPS, contributions)] * 2
    assert summary["workers"][0]["samples"] > STEPS * 6  # of both processes
    saved = load_file(run.folder / "w.safetensors")
    for rank in range(2):
        for inner in range(2):
            assert difference(torch.load(run.folder / f"w{rank}-{inner}.pt"), saved) == 0


@pytest.mark.parametrize("codec", ["bf16", "q4"])
def test_after_lossy_replies_all_processes_end_with_the_exact_weights(run: Run, codec: str) -> None:
    """The final weights have the version of the newest reply, and other bytes."""
    run.serve("--mode", "sync", "--workers", "1", "--steps", "10", "--batch-size", "8", "--save",
              str(run.folder / "w.safetensors"))  # fmt: skip
    run.group(0, 2, PS_WORKER__REPLY_CODEC=codec)
    ended(run)
    saved = load_file(run.folder / "w.safetensors")
    for inner in range(2):
        assert difference(torch.load(run.folder / f"w0-{inner}.pt"), saved) == 0


@pytest.mark.parametrize(("size", "batch_size"), [(2, 10), (3, 9)])
def test_a_model_in_ddp_is_not_averaged_twice(run: Run, size: int, batch_size: int) -> None:
    """With 9 the last batch of an epoch has five samples for three processes."""
    run.serve(
        "--mode", "sync", "--workers", "1", "--steps", "30", "--batch-size", str(batch_size), "--save",
        str(run.folder / "w.safetensors"),
    )  # fmt: skip
    run.group(0, size, "ddp")
    ended(run)
    saved = load_file(run.folder / "w.safetensors")
    assert set(saved) == set(make().state_dict())
    assert difference(saved, alone(30, batch_size, "sgd")) <= 1e-9


def test_any_of_them_stops_the_run(run: Run) -> None:
    server = run.serve("--mode", "sync", "--workers", "1", "--steps", "1000", "--batch-size", "8")
    run.group(0, 2, "stops")
    ended(run)
    assert "enough" in server.output
    assert json.loads((run.folder / "s.json").read_text())["workers"][0]["training_steps"] < 10


def test_one_that_is_killed_takes_the_worker_with_it_which_goes_on_as_a_whole(run: Run) -> None:
    run.serve("--mode", "sync", "--workers", "1", "--steps", "60", "--batch-size", "9", "--set", "server.absent_s=60",
              "--save", str(run.folder / "w.safetensors"), "--history", str(run.folder / "h.jsonl"))  # fmt: skip
    group = run.group(0, 3, PS_SLOWDOWN__BASE_S="0.02")
    group[2].until(lambda: "step 20" in group[2].output, "step 20")
    os.kill(group[2].popen.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    codes = [forked.wait() for forked in group]
    assert time.monotonic() - killed_at < 5  # within a second on a quiet machine
    assert codes == [15, 15, -9], group[0].output + group[1].output
    for item in group[:2]:
        assert "group rank 2 of this worker's 3 processes has ended, and with it the worker" in item.output
    again = run.group(0, 3, life=1)
    assert [forked.wait() for forked in again] == [0, 0, 0], again[0].output
    assert run.processes[0].wait() == 0
    saved = load_file(run.folder / "w.safetensors")
    assert difference(saved, alone(60, 9, "sgd")) <= 1e-9
