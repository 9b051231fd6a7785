"""Buffers that are no running statistics: those of the lowest live rank, to the bit, in every mode."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.buffers.member import KEYS
from paramserver.tests.buffers.member import digest as digest_of
from paramserver.tests.forks import Forked, Run

MEMBER, SERVER = "paramserver.tests.buffers.member", "paramserver.ps.main"
STEPS = 12
MODES = {
    "sync": (),
    "async": (),
    "ssp": ("--staleness", "2"),
    "dssp": (),
    "buffered": ("--buffer", "3"),
    "localsgd": ("--local-steps", "3"),
    "diloco": ("--local-steps", "3"),
    "async_diloco": ("--local-steps", "3"),
    "allreduce": (),
    "allreduce staleness": ("--staleness", "1"),
    "localsgd delayed_update": ("--local-steps", "3", "--delayed-update"),
    "async delayed_update": ("--delayed-update",),
}
IN_ROUNDS = ("sync", "localsgd", "diloco", "allreduce")


def serve(run: Run, mode: str, *more: str, life: int = 0) -> Forked:
    flags = ("--mode", mode.split()[0], "--workers", "2", "--steps", str(STEPS), *MODES[mode])
    where = ("--listen", "127.0.0.1:0", "--save", str(run.folder / "w.safetensors"))
    server = run.forks[SERVER].fork(f"server-{life}", run.folder, *flags, *where, *more)
    run.processes.append(server)
    run.address = server.event("listening")["address"]
    return server


def worker(run: Run, rank: int, *words: str, life: int = 0) -> Forked:
    environ = {"RANK": str(rank), "PS_SERVER": run.address}
    item = run.forks[MEMBER].fork(f"w{rank}-{life}", run.folder, *words, **environ)
    run.processes.append(item)
    return item


def ended(*processes: Forked) -> None:
    codes = [process.wait() for process in processes]
    assert set(codes) == {0}, "\n".join(f"== {process.name}\n{process.output}" for process in processes)


def seen(forked: Forked) -> list[str]:
    """What its queue was with each of its contributions."""
    return [line.split()[2] for line in forked.output.splitlines() if line.startswith("seen ")]


def saved(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "w.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_queue_is_one_rank_s_to_the_bit(run: Run, mode: str) -> None:
    server = serve(run, mode)
    workers = [worker(run, rank) for rank in range(2)]
    ended(server, *workers)
    found = saved(run)
    mine = [seen(worker) for worker in workers]
    if mode in IN_ROUNDS:
        assert digest_of(found) == mine[0][-1], "rank 0 is the lowest of every round"
        assert found["pointer"].item() == STEPS
    assert digest_of(found) in {*mine[0], *mine[1]}, "one worker had just this queue, with this pointer"
    assert (found["queue"].norm(dim=1) - 1).abs().max() < 1e-6
    assert found["pointer"].dtype == torch.int64
    assert 0 <= found["pointer"].item() < KEYS
    assert found["age"].dtype == torch.uint8
    assert all(worker.output.splitlines()[-1].split() == ["end", digest_of(found)] for worker in workers)


def test_the_lowest_live_rank_s_after_a_death(run: Run) -> None:
    server = serve(run, "sync")
    workers = [worker(run, 0, "kill:5"), worker(run, 1)]
    ended(server, workers[1])
    assert digest_of(saved(run)) == seen(workers[1])[-1]


def test_statistics_are_averaged_and_what_is_not_is_named_once(run: Run) -> None:
    server = serve(run, "sync")
    workers = [worker(run, rank) for rank in range(2)]
    ended(server, *workers)
    (event,) = server.events("buffers_not_averaged")
    assert event["buffers"] == "queue, pointer, age, scale.mean"
    found = saved(run)
    assert found["norm.num_batches_tracked"].item() == STEPS
    assert found["scale.mean"].mean().item() == pytest.approx(0.0, abs=0.5)  # rank 0's data
    # What BatchNorm sees is without `scale.mean`, which is rank 0's for both: 0 and 2 in the mean.
    assert found["norm.running_mean"].mean().item() == pytest.approx(0.5, abs=0.5)


def test_a_norm_of_ones_own_is_averaged_where_its_statistics_are_named(run: Run) -> None:
    server = serve(run, "sync")
    workers = [worker(run, rank, "declared") for rank in range(2)]
    ended(server, *workers)
    (event,) = server.events("buffers_not_averaged")
    assert event["buffers"] == "queue, pointer, age"
    assert saved(run)["scale.mean"].mean().item() == pytest.approx(1.0, abs=0.5)  # of 0 and 2


def test_a_name_that_no_buffer_has_is_refused_with_the_nearest(run: Run) -> None:
    serve(run, "sync")
    process = worker(run, 0, "misspelt")
    assert process.wait() == 2
    assert "no buffer 'scale.maen'" in process.output
    assert "did you mean 'scale.mean'?" in process.output
    assert "Traceback" not in process.output


def test_workers_whose_rules_differ_are_refused_with_the_difference(run: Run) -> None:
    server = serve(run, "sync", "--set", "policy.min_workers=2")
    worker(run, 0, "declared")
    server.event("model")
    second = worker(run, 1)
    assert second.wait() == 12
    assert "scale.mean" in second.output
    assert "averaged over the workers in the run, and that of the lowest live rank here" in second.output


@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_a_resumed_run_keeps_the_rule(run: Run, mode: str) -> None:
    """The snapshot has the rules: who comes with others is refused."""
    kept = ("--checkpoint-dir", str(run.folder / "snapshots"), "--checkpoint-every", "1")
    server = serve(run, mode, *kept)
    ended(server, *[worker(run, rank, "declared") for rank in range(2)])
    server = serve(run, mode, *kept, "--steps", str(2 * STEPS), life=1)
    wrong = worker(run, 0, life=1)
    assert wrong.wait() == 12
    assert "scale.mean" in wrong.output
    workers = [worker(run, rank, "declared", life=2) for rank in range(2)]
    ended(server, *workers)
    found = saved(run)
    assert digest_of(found) == seen(workers[0])[-1]
    assert found["pointer"].item() == 2 * STEPS % KEYS


@pytest.mark.parametrize("mode", ["sync", "async", "localsgd"])
def test_several_shards_take_each_part_of_the_lowest(run: Run, mode: str) -> None:
    server = serve(run, mode, "--shards", "2")
    other = run.forks[SERVER].fork(
        "shard1", run.folder, "--shard", "1", "--shards", "2", "--coordinator", run.address, "--listen", "127.0.0.1:0"
    )
    run.processes.append(other)
    workers = [worker(run, rank) for rank in range(2)]
    ended(server, other, *workers)
    found = saved(run)
    assert digest_of(found) in {*seen(workers[0]), *seen(workers[1])}
    assert all(worker.output.splitlines()[-1].split() == ["end", digest_of(found)] for worker in workers)


@pytest.mark.parametrize("mode", ["sync", "localsgd", "allreduce"])
def test_within_a_worker_of_several_processes_it_is_inner_rank_0_s(run: Run, mode: str) -> None:
    server = serve(run, mode)
    found = [run.group(rank, 2, of=MEMBER) for rank in range(2)]
    ended(server, *(number for group in found for number in group))
    assert digest_of(saved(run)) == seen(found[0][0])[-1]
    assert {number.output.splitlines()[-1] for group in found for number in group} == {f"end {digest_of(saved(run))}"}
