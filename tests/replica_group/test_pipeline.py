"""A model whose stages are the processes of a worker: to the bit as one process that computes the same microbatches."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from paramserver.tests.cluster import Forked
from paramserver.tests.forks import STAGES, Run
from paramserver.tests.replica_group.stages import LARGE_BYTES, LARGE_WIDTH, NUM_LAYERS, make_large
from paramserver.tests.replica_group.test_refused import refused

STEPS, BATCH, MICROBATCHES = 50, 16, 8
LOCAL = {"localsgd": ("--local-steps", "5"), "diloco": ("--local-steps", "5")}
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    off = {key: float((found[key] - expected[key]).abs().max()) for key in expected}
    assert max(off.values()) <= most, off


def serve(run: Run, mode: str, name: str, num_workers: int = 1, *flags: str) -> str:
    """Start a server in a folder of its own; returns where it saves the weights."""
    run.processes.clear()
    run.folder = run.folder / name
    run.folder.mkdir()
    saved = str(run.folder / "w.safetensors")
    run.serve("--mode", mode, "--workers", str(num_workers), "--steps", str(STEPS), "--batch-size", str(BATCH),
              "--save", saved, *LOCAL.get(mode, ()), *flags)  # fmt: skip
    return saved


def start(run: Run, rank: int, size: int, *words: str, life: int = 0, **env: str) -> None:
    """One worker; `size` 1: without a group."""
    env |= {"RANK": str(rank), "WORLD_SIZE": "2"} if size == 1 and rank else {}
    more = {"PS_WORKER__MICROBATCHES": str(MICROBATCHES), "PS_WORKER__GROUP": str(size > 1).lower()} | env
    run.group(rank, size, str(run.folder), f"w{rank}", *words, of=STAGES, life=life, **more)


def train(run: Run, mode: str, size: int, *words: str, num_workers: int = 1, **env: str) -> dict[str, torch.Tensor]:
    """The final weights of the server."""
    saved = serve(run, mode, f"{mode}-{size}-{'-'.join(words)}", num_workers)
    for rank in range(num_workers):
        start(run, rank, size, *words, **env)
    run.end()
    return load_file(saved)


def test_in_sync_two_stages_are_one_process(run: Run) -> None:
    found = train(run, "sync", 2)
    assert [process.output.split("parameters ")[1].split()[0] for process in run.processes[1:]] == ["168", "168"]
    losses = [[line for line in item.output.splitlines() if line.startswith("step ")] for item in run.processes[1:]]
    assert losses[0] == losses[1]  # each process has the loss, which the last stage computes
    assert_same(found, train(run, "sync", 1, "plain"))


EXPECTED: dict[str, dict[str, torch.Tensor]] = {}  # of one process, by mode


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "localsgd", "diloco", "allreduce"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_one_process(run: Run, mode: str, size: int, schedule: str) -> None:
    """LoopedBFS adds the gradients in another order. In allreduce two workers average, stage by stage."""
    num_workers = 2 if mode == "allreduce" else 1
    found = train(run, mode, size, "clips", num_workers=num_workers, PS_WORKER__SCHEDULE=schedule)
    if mode not in EXPECTED:
        EXPECTED[mode] = train(run, mode, 1, "plain", "clips", num_workers=num_workers)
    assert_same(found, EXPECTED[mode], 1e-6 if schedule == "LoopedBFS" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_two_workers_of_two_stages_are_two_workers_of_one_process(run: Run, mode: str) -> None:
    """Of whole batches and of the last one of each epoch, which microbatches do not divide."""
    found = train(run, mode, 2, "uneven", "measured", num_workers=2)
    assert_same(found, train(run, mode, 1, "uneven", num_workers=2))


@pytest.mark.slow
def test_what_layers_draw_does_not_depend_on_who_computes_them(run: Run) -> None:
    found = train(run, "sync", 2, "dropout", "evaluates")
    assert_same(found, train(run, "sync", 1, "dropout", "evaluates"))


def kill_stage(run: Run) -> list[Forked]:
    """The second process of the worker that was started last is killed in the middle, and the other ends with it.
    Returns those of other workers."""
    _, *others, first, second = run.processes
    second.until(lambda: "step 15 " in second.output, "step 15")
    second.signal(signal.SIGKILL)
    assert [first.wait(), second.wait()] == [15, -9], first.output
    assert "group rank 1 of this worker's 2 processes has ended, and with it the worker" in first.output
    del run.processes[-2:]
    return others


@pytest.mark.slow
@pytest.mark.parametrize("again", [2, 4])
def test_a_stage_that_is_killed_costs_nothing(run: Run, again: int) -> None:
    """In sync; the worker may come back with another number of stages."""
    expected = train(run, "sync", 1)
    saved = serve(run, "sync", "killed", 1, "--set", "server.absent_s=60")
    start(run, 0, 2, PS_SLOWDOWN__BASE_S="0.02")
    kill_stage(run)
    start(run, 0, again, life=1)
    run.end()
    assert_same(load_file(saved), expected)


@pytest.mark.slow
def test_the_moments_of_a_stage_that_is_killed_begin_anew_and_a_line_says_so(run: Run) -> None:
    serve(run, "localsgd", "killed", 1, "--set", "server.absent_s=60")
    start(run, 0, 2, PS_SLOWDOWN__BASE_S="0.02")
    kill_stage(run)
    start(run, 0, 2, life=1)
    run.end()
    assert run.processes[1].output.count("moments begin anew") == 1


@pytest.mark.slow
def test_in_allreduce_others_go_on_without_a_stage_and_teach_the_next_one(run: Run) -> None:
    """Each stage gets weights and moments from the same stage of the other worker."""
    serve(run, "allreduce", "killed", 2, "--set", "server.absent_s=60", "--history", str(run.folder / "h.jsonl"))
    for rank in range(2):
        start(run, rank, 2, PS_SLOWDOWN__BASE_S="0.05")
    others = kill_stage(run)
    others[0].until(lambda: others[0].events("group")[-1]["members"] == 1, "a group without it")
    start(run, 1, 2, life=1)
    run.end()
    taught = [process.events("taught") for process in run.processes[3:]]
    assert [(event["rank"], event["by"]) for (event,) in taught] == [(1, 0), (1, 0)]
    committed = [json.loads(line) for line in (run.folder.parent / "h.jsonl").read_text().splitlines()]
    sizes = [len(line["contributions"]) for line in committed if line["op"] == "commit"]
    assert sizes[0] == sizes[-1] == 2
    assert 1 in sizes


@pytest.mark.slow
def test_in_allreduce_a_worker_with_another_cut_is_refused(run: Run) -> None:
    serve(run, "allreduce", "cuts", 2)
    start(run, 0, 2)
    start(run, 1, 2, PS_WORKER__CUT="[3,5]")
    _, *first, third, fourth = run.processes
    assert {third.wait(), fourth.wait()} <= {2, 15}
    message = "rank 1 has cut the layers into [3, 5], and rank 0, with which it averages stage by stage, in another way"
    assert any(message in process.output for process in (third, fourth)), third.output + fourth.output
    assert [process.wait() for process in first] == [0, 0], first[0].output


@pytest.mark.slow
@pytest.mark.parametrize("words", [("large", "meta"), ("large",)])
def test_stages_train_a_model_that_is_larger_than_the_memory_of_each_process(run: Run, words: tuple[str, ...]) -> None:
    """Each reads its own layers. A process that builds the whole model, not on the meta device, has no memory.

    A plain process with 2 of the 8 layers has at most these, their gradients, and one that is being added."""
    run.folder = run.folder / "large"
    run.folder.mkdir()
    run.serve("--mode", "sync", "--workers", "1", "--steps", "2", "--save", str(run.folder / "w.safetensors"))
    init = {f"{number}.weight": torch.full((LARGE_WIDTH, LARGE_WIDTH), 1e-4) for number in range(NUM_LAYERS)}
    save_file(init, run.folder / "init.safetensors")
    start(run, 0, 4, *words, PS_WORKER__TRANSPORTS="direct,grpc")  # shared memory has the whole model
    codes = [process.wait() for process in run.processes[1:]]
    if "meta" not in words:
        assert 0 not in codes
        return
    assert codes == [0] * 4, [process.output for process in run.processes]
    assert run.processes[0].wait() == 0
    peaks = [int(process.output.split("peak ")[1].split()[0]) for process in run.processes[1:]]
    assert max(peaks) <= 1.1 * (2 + 2 + 1) / NUM_LAYERS * LARGE_BYTES, peaks
    saved = load_file(run.folder / "w.safetensors")
    layers = make_large()
    layers.load_state_dict(init)
    for _ in range(2):
        layers.zero_grad()
        for part in torch.ones(4, LARGE_WIDTH).split(1):
            (F.mse_loss(layers(part), torch.zeros(1, LARGE_WIDTH)) / 4).backward()
        torch.optim.SGD(layers.parameters(), lr=0.1).step()
    assert_same(saved, layers.state_dict(), 1e-9)


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (("few",), {}, "the model has 1 layers, but 1F1B with 2 processes needs 2 stages"),
        (("tuple",), {}, "layer 3 of the pipeline (Pair) returns a tuple"),
        (("tied",), {}, "'7.linear.weight' is in layers 0 and 7 of the pipeline (tied weights)"),
        ((), {"PS_WORKER__SCHEDULE": "2F2B"}, "worker.schedule is '2F2B'"),
        ((), {"PS_WORKER__CUT": "[3,4]"}, f"worker.cut is [3, 4], but {NUM_LAYERS} layers"),
        (("measured",), {"PS_WORKER__MEMORY": "100"}, "no cut of the 8 layers fits each process into 100 bytes"),
        (("plain",), {"PS_WORKER__PIPELINE": "true"}, "worker.pipeline is set, and the model of this script is whole"),
        (("norm",), {"PS_WORKER__MICROBATCHES": "16"}, "has BatchNorm, and a microbatch has 1 sample"),
        (("late",), {}, "session.pipeline() was called after session.optimizer()"),
    ],
)
def test_what_cannot_be_a_pipeline_is_said(run: Run, words: tuple[str, ...], env: dict[str, str], message: str) -> None:
    serve(run, "sync", "refused")
    start(run, 0, 2, *words, **env)
    assert message in refused(run.processes[1:])


def test_a_batch_that_microbatches_do_not_divide_is_said_and_batch_norm_too(run: Run) -> None:
    train(run, "sync", 2, "norm", PS_WORKER__MICROBATCHES="5")
    output = run.processes[1].output
    assert output.count("5 microbatches (worker.microbatches) do not divide a batch of 16 samples: the batch is") == 1
    assert output.count("BatchNorm normalises with the statistics of each microbatch") == 1
