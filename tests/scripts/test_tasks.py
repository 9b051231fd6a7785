"""Tasks with a schedule, accumulation, loader processes, a precision, weights from a file: as a plain loop with torch's
own scheduler, by real processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from paramserver.tests.cluster import Cluster, end_well
from paramserver.tests.scripts.tasks.double import NUM_SAMPLES, Double, Weighted

FILE = Path(__file__).parent / "tasks" / "double.py"
STEPS, ACCUMULATE, WARMUP, LR, MIN_LR, SEED = 12, 3, 4, 0.03, 0.001, 3
SCHEDULE = ("--lr-schedule", "cosine", "--warmup", str(WARMUP), "--min-lr", str(MIN_LR))
RUN = ("--steps", str(STEPS), "--seed", str(SEED), "--optimizer", "adamw", "--lr", str(LR), *SCHEDULE)
TASK = ("--task", f"{FILE}:Double")


def order_of(name: str, epoch: int) -> torch.Tensor:
    """Of the samples: all three draw from torch's generator, seeded by the run's seed and the epoch."""
    torch.manual_seed(SEED + epoch)
    if name == "Weighted":
        return torch.tensor(list(Weighted().sampler(Weighted().train)))
    return torch.randperm(NUM_SAMPLES)


def plain(union: int, accumulate: int, name: str = "Double", clip: float = 1e9) -> dict[str, torch.Tensor]:
    """Steps over batches of `union` samples; the gradient of a step is that of the mean over all of its samples."""
    task, data = Double(), Double().train.tensors
    torch.manual_seed(SEED)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [
            LinearLR(optimizer, 1 / (WARMUP + 1), total_iters=WARMUP),
            CosineAnnealingLR(optimizer, STEPS - WARMUP, MIN_LR),
        ]
        scheduler = SequentialLR(optimizer, parts, [WARMUP])
    order = [order_of(name, epoch) for epoch in range(20)]
    batches = iter([rows for number in order for rows in number.split(union)])
    for _ in range(STEPS):
        rows = torch.cat([next(batches) for _ in range(accumulate)])
        optimizer.zero_grad()
        task.loss(model, [tensor[rows] for tensor in data]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def check(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(str(path))
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    "name", [pytest.param(item, marks=pytest.mark.slow) for item in ("Streamed", "Double", "Weighted")]
)
def test_two_workers_in_sync_killed_and_resumed(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """In the middle of an accumulating, scheduled run: the weights are those of a plain loop."""
    flags = ("--workers", "2", "--batch-size", "4", *RUN, "--accumulate", str(ACCUMULATE), "--save", "w.safetensors")
    kept = ("--checkpoint-dir", "snapshots", "--checkpoint-every", "1")
    task_flags = ("--task", f"{FILE}:{name}", "--set", "slowdown.base_s=0.1")
    server = cluster.server(*flags, *kept, "--set", "server.status_interval_s=0.02")
    workers = [cluster.worker(0, *task_flags), cluster.worker(1, *task_flags, "--loader-workers", "1")]
    server.until(lambda: any(5 <= event["step"] < STEPS for event in server.events("status")), "five steps")
    server.kill()
    again = cluster.server(*flags, *kept, "--listen", cluster.address)
    end_well(*workers, again)
    check(tmp_path / "w.safetensors", plain(8, ACCUMULATE, name))


@pytest.mark.slow
def test_a_worker_alone_and_one_that_averages_with_itself(cluster: Cluster, tmp_path: Path) -> None:
    accumulate = ("--set", f"train.accumulate={ACCUMULATE}")
    settings = [f"optimizer.lr={LR}", "optimizer.name=adamw", "train.lr_schedule=cosine", f"train.warmup={WARMUP}"]
    settings += [f"train.min_lr={MIN_LR}", f"run.seed={SEED}"]
    sets = [word for item in settings for word in ("--set", item)]
    alone = cluster.start(
        "alone", "-m", "paramserver.worker", "--server", "none", *TASK, "--steps", str(STEPS), "--batch-size", "8",
        "--save", "alone.safetensors", *sets, *accumulate,
    )  # fmt: skip
    flags = ("--mode", "localsgd", "--local-steps", "4", "--batch-size", "8", *RUN, *accumulate)
    server = cluster.server(*flags, "--workers", "1", "--save", "local.safetensors")
    worker = cluster.worker(0, *TASK)
    end_well(alone, worker, server)
    for name in ("alone", "local"):
        check(tmp_path / f"{name}.safetensors", plain(8, ACCUMULATE))


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_file(cluster: Cluster, tmp_path: Path) -> None:
    torch.manual_seed(99)
    weights = {f"module.{name}": tensor for name, tensor in Double().model().state_dict().items()}
    save_file(weights, tmp_path / "init.safetensors")
    server = cluster.server("--workers", "1", "--steps", "1", "--lr", "1e-30", "--save", "w.safetensors")
    worker = cluster.worker(0, *TASK, "--init", "init.safetensors")
    end_well(worker, server)
    found = load_file(str(tmp_path / "w.safetensors"))
    assert all(torch.equal(found[name.removeprefix("module.")], tensor) for name, tensor in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_another_rate_on_resume_takes_effect_and_the_log_says_so(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    kept = (
        "--mode", mode, "--workers", "1", "--batch-size", "8", "--optimizer", "sgd", "--checkpoint-dir", "snapshots",
    )  # fmt: skip
    kept += ("--local-steps", "3") if mode == "localsgd" else ()
    for steps, lr in (("6", "0.05"), ("9", "0.2")):
        server = cluster.server(*kept, "--steps", steps, "--lr", lr, "--save", "w.safetensors")
        worker = cluster.worker(0, *TASK)
        end_well(worker, server)
    changes = [(event["what"], event["now"], event["snapshot"]) for event in server.events("resumed_with_another")]
    assert changes == [("lr", 0.2, 0.05)]

    task, data = Double(), Double().train.tensors
    torch.manual_seed(0)
    model = task.model()
    order = [torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)) for epoch in range(2)]
    for step, rows in enumerate([rows for number in order for rows in number.split(8)][:9]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if step < 6 else 0.2)
        optimizer.zero_grad()
        task.loss(model, [tensor[rows] for tensor in data]).backward()
        optimizer.step()
    check(tmp_path / "w.safetensors", model.state_dict())
