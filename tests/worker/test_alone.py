"""A script without a server: how long it trains, and what it is told of that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import TensorDataset

from paramserver.common.config.schema import Config, RunConfig
from paramserver.common.errors import DivergedError, UsageError
from paramserver.common.reporting.summary import Summary
from paramserver.common.runstore.reading import RunStore
from paramserver.worker.training.alone import AloneSession
from paramserver.worker.training.evaluation import untouched


def alone(**run: int) -> AloneSession:
    return AloneSession(Config(run=RunConfig(**run)))


def trained(session: AloneSession) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(2, 1)
    return model, session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def epochs(session: AloneSession, accumulate: int = 1, **shard: int) -> list[int]:
    """Batches of three loops over 8 samples in batches of 2."""
    model, optimizer = trained(session)
    counts = []
    for _ in range(3):
        counts.append(0)
        for (x,) in session.shard(TensorDataset(torch.ones(8, 2)), batch_size=2, accumulate=accumulate, **shard):
            model(x).sum().backward()
            counts[-1] += 1
            if counts[-1] % accumulate == 0:
                optimizer.step()
    return counts


@pytest.mark.parametrize("accumulate", [1, 2])
def test_where_nobody_has_set_a_length_the_script_s_loop_decides(accumulate: int) -> None:
    """A loop over session.shard() is an epoch, as one over a DataLoader."""
    session = alone()
    with capture_logs() as logs:
        assert epochs(session, accumulate=accumulate) == [4, 4, 4]
    assert (logs, session.step, session.is_done) == ([], 12 // accumulate, False)


def test_one_loop_may_be_several_epochs() -> None:
    assert epochs(alone(), epochs=3) == [12, 12, 12]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_epochs_of_the_run_count_batches_and_its_length_training_steps(accumulate: int) -> None:
    session = alone(epochs=2)
    with capture_logs() as logs:
        assert epochs(session, accumulate=accumulate) == [4, 4, 0]
    assert session.is_done and session.alone.status().steps == session.step == 8 // accumulate
    assert [line["event"] for line in logs] == ["no_batches"]


def test_steps_of_the_run_are_training_steps() -> None:
    assert epochs(alone(steps=3), accumulate=2) == [4, 2, 0]


def test_a_run_that_cuts_a_script_short_says_so_at_the_start() -> None:
    with capture_logs() as logs:
        assert epochs(alone(steps=5), epochs=3) == [5, 0, 0]
    assert logs[0]["event"] == "cut_short"
    assert "ends after 5 training steps (run.steps); this script's loop has 12" in logs[0]["reason"]


def test_loops_that_end_before_the_run_say_what_to_write() -> None:
    session = alone(steps=14)
    with capture_logs() as logs:
        assert epochs(session) == [4, 4, 4]
        session.finish()
    [line] = logs
    assert (line["event"], line["log_level"]) == ("finished_early", "warning")
    assert "ended after 12 training steps, and the run has 14" in line["reason"]
    assert "epochs=None" in line["fix"] and "--steps 12" in line["fix"]


def test_epochs_of_a_script_s_own_loader_are_refused() -> None:
    model, optimizer = trained(alone(epochs=2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match=r"run\.epochs is 2"):
        optimizer.step()


def test_a_step_after_the_end_and_a_second_optimizer_are_refused_as_with_a_server() -> None:
    session = alone(steps=2)
    model, optimizer = trained(session)
    with pytest.raises(UsageError, match="a second session"):
        session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()  # as for a scheduler
    with pytest.raises(UsageError, match="after a step\\(\\) without it: it would skip a batch for each such step"):
        session.shard(TensorDataset(torch.ones(8, 2)), batch_size=2)
    optimizer.step()
    with pytest.raises(UsageError, match="step\\(\\) after the end of the run, which has 2 training steps"):
        optimizer.step()


def test_its_rates_are_of_the_union_batch_after_the_first_step_and_its_mode_is_single(tmp_path: Path) -> None:
    """From the model to the last training step, as a server counts: what the first step loads is in `wall_s` alone."""
    store = tmp_path / "runs" / "paramserver.db"
    config = Config.model_validate({
        "run": {"mode": "ssp", "steps": 21, "batch_size": 16},
        "output": {"summary": str(tmp_path / "s.json"), "track_dir": str(store.parent)},
    })  # fmt: skip
    session = AloneSession(config)
    model, optimizer = trained(session)
    ended = []
    with session.alone.recorded({}):
        for (x,) in session.shard(TensorDataset(torch.ones(21 * 16, 2)), batch_size=16):
            time.sleep(0.01 if ended else 0.5)
            model(x).sum().backward()
            optimizer.step()
            ended.append(time.perf_counter())
        time.sleep(0.5)  # an evaluation
    found = Summary.model_validate_json((tmp_path / "s.json").read_text())
    steps_per_s = 20 / (ended[-1] - ended[0])
    assert found.union_steps_per_s == pytest.approx(steps_per_s, rel=0.05)
    assert found.samples_per_s == pytest.approx(16 * steps_per_s, rel=0.05)
    assert 0.5 < found.wall_s < 0.5 + ended[-1] - ended[0] + 0.4
    assert [(worker.training_steps, worker.contributions, worker.samples) for worker in found.workers] == [
        (21, 21, 336)
    ]
    with RunStore(store) as runs:
        [kept] = runs.runs()
        assert (kept.mode, runs.config(kept)["run"]["mode"]) == ("single", "single")


def test_weights_that_have_overflowed_are_not_saved(tmp_path: Path) -> None:
    config = Config.model_validate({"output": {"save": str(tmp_path / "w.safetensors"), "store": False}})
    session, model = AloneSession(config), torch.nn.Linear(2, 1)
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e9))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (model(torch.ones(1, 2)).sum() * 1e30).backward()
    with pytest.raises(DivergedError, match="overflowed"), session.alone.recorded({}):
        optimizer.step()
    assert not (tmp_path / "w.safetensors").exists()


def test_clipping_counts_the_rows_of_tables_too() -> None:
    """As torch's over all that one process has; a row that is asked for twice has one gradient."""
    session = alone(steps=3)
    table = session.rows("items", 6, 2, optimizer="sgd", lr=1.0, dtype=torch.float64)
    dense = torch.nn.Linear(2, 1, bias=False).double()
    optimizer = session.optimizer(dense, torch.optim.SGD(dense.parameters(), lr=1.0))
    here, rows = (
        torch.nn.Parameter(dense.weight.detach().clone()),
        torch.nn.Parameter(session.alone.pull_rows(0, torch.arange(6))),
    )
    ids = torch.tensor([1, 4, 4])
    for max_norm in (0.01, float("inf"), 0.5):
        optimizer.zero_grad()
        (dense(table(ids)).sum() + table(torch.tensor([4])).sum()).backward()
        optimizer.clip_grad_norm(max_norm)
        optimizer.step()
        here.grad = rows.grad = None
        ((rows[ids] @ here.T).sum() + rows[4].sum()).backward()
        torch.nn.utils.clip_grad_norm_([here, rows], max_norm)
        with torch.no_grad():
            here -= here.grad
            rows -= rows.grad
        assert torch.allclose(dense.weight, here, rtol=1e-12)
        assert torch.allclose(session.alone.pull_rows(0, torch.arange(6)), rows, rtol=1e-12)


def test_an_evaluation_may_assign_its_buffers() -> None:
    """A module that makes a new tensor instead of changing the old one."""

    class Counting(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counting()
    with untouched(model):
        model(torch.ones(1))
    assert model.calls.item() == 0.0
