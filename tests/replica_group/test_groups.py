"""Workers of two processes each, in every mode: as if each were one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paramserver.tests.cluster import Forked, end_well
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


def difference(item: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((item[key] - other[key]).abs().max()) for key in other)


def saved_by_all(run: Run, num_workers: int, size: int = 2) -> dict[str, torch.Tensor]:
    """The weights that the server has saved, and that each process of each worker has."""
    run.end()
    saved = load_file(run.folder / "w.safetensors")
    for rank in range(num_workers):
        for inner in range(size):
            assert difference(torch.load(run.folder / f"w{rank}-{inner}.pt"), saved) == 0
    return saved


def serve(run: Run, mode: str, num_workers: int, steps: int, batch_size: int, *flags: str) -> Forked:
    """A server that saves its weights."""
    return run.serve(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(steps), "--batch-size", str(batch_size),
        "--save", str(run.folder / "w.safetensors"), *flags,
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_in_sync_two_groups_of_two_are_one_process_with_the_union_batch(run: Run, optimizer: str) -> None:
    """The last batch of each epoch has two samples for four processes."""
    serve(run, "sync", 2, 100, 8)
    for rank in range(2):
        run.group(rank, 2, optimizer)
    assert difference(saved_by_all(run, 2), alone(100, 16, optimizer)) <= 1e-9


@pytest.mark.parametrize(
    "mode",
    [
        "async", "ssp", "dssp", "buffered", "localsgd", "diloco", "async_diloco", "allreduce", "async delayed_update",
        "localsgd delayed_update",
    ],
)  # fmt: skip
def test_every_mode_takes_a_group_as_a_worker(run: Run, mode: str) -> None:
    more = EXTRA.get(mode, ("--delayed-update",) if "delayed_update" in mode else ())
    serve(run, mode.split()[0], 2, STEPS, 8, *more)
    for rank in range(2):
        run.group(rank, 2)
    saved_by_all(run, 2)
    summary = run.summary()
    if mode != "async_diloco":  # whose contributions may be of fewer steps
        contributions = STEPS // (4 if len(more) > 1 else 1)
        counts = [(worker["training_steps"], worker["contributions"]) for worker in summary["workers"]]
        assert counts == [(STEPS, contributions)] * 2
    assert summary["workers"][0]["samples"] > STEPS * 6  # of both processes


@pytest.mark.parametrize("codec", ["bf16", "q4"])
def test_after_lossy_replies_all_processes_end_with_the_exact_weights(run: Run, codec: str) -> None:
    """The final weights have the version of the newest reply, and other bytes."""
    serve(run, "sync", 1, 10, 8)
    run.group(0, 2, PS_WORKER__REPLY_CODEC=codec)
    saved_by_all(run, 1)


@pytest.mark.parametrize(("size", "batch_size"), [(2, 10), (3, 9)])
def test_a_model_in_ddp_is_not_averaged_twice(run: Run, size: int, batch_size: int) -> None:
    """With 9 the last batch of an epoch has five samples for three processes."""
    serve(run, "sync", 1, 30, batch_size)
    run.group(0, size, "ddp")
    saved = saved_by_all(run, 1, size)
    assert set(saved) == set(make().state_dict())
    assert difference(saved, alone(30, batch_size, "sgd")) <= 1e-9


def test_any_of_them_stops_the_run(run: Run) -> None:
    server = serve(run, "sync", 1, 1000, 8)
    run.group(0, 2, "stops")
    run.end()
    assert "enough" in server.output
    assert run.summary()["workers"][0]["training_steps"] < 10


def test_one_that_is_killed_takes_the_worker_with_it_which_goes_on_as_a_whole(run: Run) -> None:
    server = serve(run, "sync", 1, 60, 9, "--set", "server.absent_s=60")
    group = run.group(0, 3, PS_SLOWDOWN__BASE_S="0.02")
    group[2].until(lambda: "step 20" in group[2].output, "step 20")
    os.kill(group[2].popen.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    codes = [forked.wait() for forked in group]
    assert time.monotonic() - killed_at < 5  # within a second on a quiet machine
    assert codes == [15, 15, -9], group[0].output + group[1].output
    for item in group[:2]:
        assert "group rank 2 of this worker's 3 processes has ended, and with it the worker" in item.output
    end_well(*run.group(0, 3, life=1), server)
    assert difference(load_file(run.folder / "w.safetensors"), alone(60, 9, "sgd")) <= 1e-9
