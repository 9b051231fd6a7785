"""Where the union batch is more than a mean over samples: summed losses, clipped gradients, BatchNorm.

Each is right beside one plain process of torch with the union batch, or said, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from paramserver.tests.cluster import end_well
from paramserver.tests.forks import SERVER, Forked, Programs, Run
from paramserver.tests.scripts.union.loop import BATCH, NUM, data, make

LOOP = "paramserver.tests.scripts.union.loop"
STEPS, NEAR = 30, 1e-9
slow = pytest.mark.slow


@pytest.fixture
def run(forks: Programs, tmp_path: Path) -> Iterator[Scripts]:
    run = Scripts(forks, tmp_path)
    yield run
    run.stop()


class Scripts(Run):
    def shards(self, num: int) -> None:
        for number in range(1, num):
            flags = ("--shard", str(number), "--shards", str(num), "--coordinator", self.address)
            self.processes.append(
                self.forks[SERVER].fork(f"shard{number}", self.folder, *flags, "--listen", "127.0.0.1:0")
            )

    def script(self, rank: int, **env: str) -> Forked:
        environ = {"OUT": str(self.folder / "w"), "PS_SERVER": self.address, "RANK": str(rank)} | env
        found = self.forks[LOOP].fork(f"script{rank}", self.folder, **environ)
        self.processes.append(found)
        return found

    def train(self, num: int, *flags: str, shards: int = 1, group: int = 1, **env: str) -> dict[str, torch.Tensor]:
        """What all scripts end with."""
        self.serve("--workers", str(num), "--steps", str(STEPS), "--shards", str(shards), *flags)
        self.shards(shards)
        for rank in range(num):
            if group == 1:
                self.script(rank, **env)
            else:
                self.group(rank, group, of=LOOP, OUT=str(self.folder / "w"), **env)
        self.end()
        found = [torch.load(path) for path in sorted(self.folder.glob("w-*.pt"))]
        assert len(found) == num * group
        assert all(
            torch.equal(found[0][name], other[name]) for other in found for name in other if "running" not in name
        )
        return found[0]


def plain(
    num_workers: int, *, loss: str = "mean", clip: float = 0.0, lr: float = 0.02, norm: str = "",
    optimizer: str = "sgd", num: int = NUM,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """One process of torch with the union batch, which does not divide: the last one of an epoch is smaller."""
    model, (inputs, wanted) = make(norm), [tensor[:num] for tensor in data(num).tensors]
    kinds = {"sgd": lambda: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
             "adam": lambda: torch.optim.Adam(model.parameters(), lr=lr)}  # fmt: skip
    local_optimizer = kinds[optimizer]()
    batches: list[torch.Tensor] = []
    for epoch in range(STEPS):
        batches += torch.randperm(num, generator=torch.Generator().manual_seed(epoch)).split(num_workers * BATCH)
    for rows in batches[:STEPS]:
        local_optimizer.zero_grad()
        F.mse_loss(model(inputs[rows]), wanted[rows], reduction=loss).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        local_optimizer.step()
    return model.state_dict()


def difference(item: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((item[name] - other[name]).abs().max()) for name in other if "num_batches" not in name)


# ---- a loss that is a sum ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        pytest.param(("--mode", "sync"), {}, id="sync"),
        pytest.param(("--mode", "allreduce"), {}, id="allreduce", marks=slow),
        pytest.param(("--mode", "allreduce", "--zero", "1"), {}, id="zero", marks=slow),
        pytest.param(("--mode", "sync", "--set", "policy.weighting=equal"), {}, id="weighted equally", marks=slow),
        pytest.param(("--mode", "sync"), {"shards": 2}, id="shards", marks=slow),
        pytest.param(("--mode", "sync"), {"group": 2}, id="groups", marks=slow),
        pytest.param(("--mode", "sync"), {"group": 2, "WRAP": "ddp"}, id="groups in DDP", marks=slow),
    ],
)
def test_a_summed_loss_is_one_process_with_the_union_batch(run: Scripts, flags: tuple[str, ...], more: dict) -> None:
    if "--zero" in flags:
        flags, more = flags[:2], {"PS_WORKER__ZERO": "1", "OPTIMIZER": "adam"}
    wanted = plain(2, loss="sum", lr=0.002, optimizer="adam" if "OPTIMIZER" in more else "sgd")
    found = run.train(2, *flags, LOSS="sum", REDUCTION="sum", LR="0.002", **more)
    assert difference(found, wanted) <= NEAR
    assert difference(wanted, plain(2, lr=0.002)) > 1e-3, "it matters"


SUMMED = {"LOSS": "sum", "REDUCTION": "sum"}


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        pytest.param(("--mode", "localsgd"), SUMMED, "mode localsgd, whose workers step by themselves", id="localsgd"),
        pytest.param(("--mode", "diloco"), SUMMED, "mode diloco, whose workers", marks=slow),
        pytest.param(("--mode", "async_diloco"), SUMMED, "mode async_diloco, whose workers", marks=slow),
        pytest.param(("--mode", "buffered"), SUMMED, "mode buffered, whose steps use a w", marks=slow),
        pytest.param(("--set", "policy.aggregation=median"), SUMMED, "aggregation median, which", marks=slow),
        ((), {"REDUCTION": "max"}, "reduction='max'): use 'mean' or 'sum'"),
        ((), {"CLIP": "-1"}, "clip_grad_norm(-1.0): the norm must be above 0"),
        ((), {"CLIP": "early"}, "optimizer.clip_grad_norm() before the first backward()"),
    ],
)
def test_what_makes_no_sum_or_clips_nothing_is_refused(
    run: Scripts, flags: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    run.serve("--mode", "sync", "--workers", "1", "--steps", "5", *flags)
    script = run.script(0, **env)
    assert script.wait() == 2, script.output
    assert words in script.output and "Traceback" not in script.output


def test_workers_that_disagree_on_the_reduction_are_refused_by_name(run: Scripts) -> None:
    run.serve("--mode", "sync", "--workers", "2", "--steps", "5")
    first = run.script(0, LOSS="sum", REDUCTION="sum")
    run.processes[0].event("model")
    second = run.script(1)
    assert second.wait() == 12, second.output
    assert (
        "the optimizer of rank 1 differs from the run's: different reduction: expected sum, got mean" in second.output
    )
    first.signal(9)


# ---- clipping ------------------------------------------------------------------------------------------

CLIP = 0.05  # of gradients of 0.1 to 2


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        pytest.param(("--mode", "sync"), {}, id="sync"),
        pytest.param(("--mode", "allreduce"), {}, id="allreduce", marks=slow),
        pytest.param(("--mode", "allreduce"), {"PS_WORKER__ZERO": "1"}, id="zero", marks=slow),
        pytest.param(("--mode", "sync"), {"shards": 2}, id="shards", marks=slow),
        pytest.param(("--mode", "sync"), {"group": 2}, id="groups", marks=slow),
        pytest.param(("--mode", "allreduce"), {"group": 2}, id="groups in allreduce", marks=slow),
        pytest.param(("--mode", "sync", "--clip-norm", "0.2"), {}, id="below the server's", marks=slow),
    ],
)
def test_the_mean_of_all_is_clipped_as_one_process_clips_the_union_batch(
    run: Scripts, flags: tuple[str, ...], more: dict
) -> None:
    wanted = plain(2, clip=CLIP)
    assert difference(run.train(2, *flags, CLIP=str(CLIP), **more), wanted) <= NEAR
    assert difference(wanted, plain(2)) > 1e-3, "it clips"


def test_workers_that_clip_to_different_norms_are_named_once(run: Scripts) -> None:
    """One of them never has its way: the rule of learning rates, by which the lowest of equal ranks counts."""
    run.serve("--mode", "sync", "--workers", "2", "--steps", str(STEPS))
    scripts = run.script(0), run.script(1, CLIP=str(CLIP))
    end_well(*scripts, run.processes[0])
    (event,) = run.processes[0].events("clip_norms_differ")
    assert (event["level"], event["norms"], event["used"]) == ("warning", "none (rank 0), 0.05 (rank 1)", "none")


@slow
@pytest.mark.parametrize(
    ("flags", "group"),
    [
        (("--mode", "async"), 1), (("--mode", "ssp"), 1), (("--mode", "buffered", "--buffer", "1"), 1),
        (("--mode", "localsgd", "--local-steps", "3"), 1), (("--mode", "localsgd", "--local-steps", "3"), 2),
        (("--mode", "single"), 0),
    ],
)  # fmt: skip
def test_one_worker_clips_as_plain_torch_does_in_every_mode(run: Scripts, flags: tuple[str, ...], group: int) -> None:
    """What a step is along: its contribution, or the local gradient. With 0 there is no server."""
    if group:
        found = run.train(1, *flags, group=group, CLIP=str(CLIP))
    else:
        script = run.script(0, CLIP=str(CLIP), PS_SERVER="", PS_RUN__STEPS=str(STEPS))
        assert script.wait() == 0, script.output
        found = torch.load(run.folder / "w-0-0.pt")
    assert difference(found, plain(1, clip=CLIP)) <= NEAR


# ---- BatchNorm -----------------------------------------------------------------------------------------

ROUND = 32  # samples of batches that are all of one size


@pytest.mark.parametrize(
    ("flags", "norm", "num", "is_said"),
    [
        pytest.param(("--mode", "sync"), "batch", 2, True, id="sync"),
        pytest.param(("--mode", "sync"), "layer", 2, False, id="LayerNorm"),
        pytest.param(("--mode", "allreduce"), "batch", 2, True, id="allreduce", marks=slow),
        pytest.param(("--mode", "sync"), "sync", 2, True, id="SyncBatchNorm that nobody synchronises", marks=slow),
        pytest.param(("--mode", "sync"), "group", 2, False, id="GroupNorm", marks=slow),
        pytest.param(("--mode", "sync"), "frozen", 2, False, id="frozen", marks=slow),
        pytest.param(("--mode", "sync"), "batch", 1, False, id="one worker", marks=slow),
        pytest.param(("--mode", "async"), "batch", 2, False, id="async", marks=slow),
    ],
)
def test_batch_norm_is_said_once_where_it_keeps_workers_from_being_one_process(
    run: Scripts, flags: tuple[str, ...], norm: str, num: int, is_said: bool
) -> None:
    found = run.train(num, *flags, NORM=norm, NUM=str(ROUND))
    events = [event for process in run.processes for event in process.events("batch_norm")]
    assert len(events) == is_said
    if is_said:
        assert events[0]["level"] == "warning" and events[0]["layers"] == "1"
        assert all(words in str(events[0]["meaning"]) for words in ("SyncBatchNorm", "GroupNorm", "--group"))
    elif num == 2 and flags[1] == "sync":
        assert difference(found, plain(num, norm=norm, num=ROUND)) <= NEAR


@pytest.mark.parametrize(
    ("mode", "num"),
    [
        pytest.param("sync", 32, id="sync"),
        pytest.param("sync", 35, id="unequal", marks=slow),  # a batch of two samples and one of one
        pytest.param("async", 32, id="async", marks=slow),
    ],
)
def test_sync_batch_norm_in_a_group_of_processes_is_one_process(run: Scripts, mode: str, num: int) -> None:
    found = run.train(1, "--mode", mode, group=2, NORM="sync", NUM=str(num))
    assert not [event for process in run.processes for event in process.events("batch_norm")]
    wanted = plain(1, norm="batch", num=num)
    assert difference(found, wanted) <= NEAR
