"""Stages of a task's model, as ps-launch starts them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paramserver.tests.engines.conftest import EngineRun
from paramserver.tests.replica_group.test_pipeline import assert_same
from paramserver.tests.replica_group.test_started import kill_inner
from paramserver.worker.tasks.gpt import Transformer

SIZES = {"num_layers": 4, "num_heads": 2, "width": 16}
TASK = (*(f"--set=task.args.{key}={value}" for key, value in SIZES.items()), "--set=task.args.max_bytes=60000",
        "--set=task.args.context=16", "--set=task.args.eval_bytes=2048", "--set=output.store=false", "--task=gpt",
        "--lr=0.01", "--log-format=json")  # fmt: skip
STAGES = ("--pipeline", "--set=worker.microbatches=4", "--batch-size=8")

WAIT_S = 280  # several programs start, each of which loads torch


@pytest.fixture
def run(tmp_path: Path) -> Iterator[EngineRun]:
    run = EngineRun(tmp_path)
    yield run
    run.stop()


def trained(run: EngineRun, name: str, *flags: str) -> dict[str, torch.Tensor]:
    process = run.program(
        name, "ps-launch", "-n", "1", "--mode", "sync", "--save", f"{name}.safetensors", *TASK, *flags
    )
    assert process.popen.wait(WAIT_S) == 0, process.output
    return load_file(run.folder / f"{name}.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stages_of_a_task_are_one_process_that_accumulates(run: EngineRun) -> None:
    """Weights to the bit, metrics too; from weights of a file that each stage reads its own part of."""
    torch.manual_seed(1)
    save_file(Transformer(**SIZES).state_dict(), run.folder / "init.safetensors")
    flags = ("--steps=20", "--eval-every=10", "--set=task.init=init.safetensors")
    found = trained(run, "staged", *STAGES, "--group=2", "--summary=staged.json", *flags)
    expected = trained(run, "one", "--set=train.accumulate=4", "--batch-size=2", "--summary=one.json", *flags)
    assert_same(found, expected)
    finals = [json.loads((run.folder / f"{name}.json").read_text())["final"] for name in ("staged", "one")]
    assert finals[0]["loss"] == pytest.approx(finals[1]["loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_goes_on_without_the_stage_that_was_killed(run: EngineRun) -> None:
    expected = trained(run, "whole", *STAGES, "--group=3", "--steps=30")
    flags = ("--group=3", "--steps=30", "--set=launch.group_min=2", "--set=slowdown.base_s=0.3")
    process = run.program("killed", "ps-launch", "-n", "1", "--mode", "sync", "--save", "k.safetensors", *TASK, *STAGES,
                          *flags)  # fmt: skip
    process.until(lambda: re.search(r'"version": (?:[5-9]|1[0-9]),', process.output) is not None, "version 5 or later")
    kill_inner(process, 0, 1)
    assert process.popen.wait(WAIT_S) == 0, process.output
    # The cut follows measured times, which differ from start to start.
    assert [event["stages"].count("+") + 1 for event in process.events("pipeline")] == [3, 2]
    assert_same(load_file(run.folder / "k.safetensors"), expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_doctor_measures_stages(run: EngineRun) -> None:
    flags = (flag for flag in TASK if flag.startswith("--set"))
    (run.folder / "c.yaml").write_text("task: {name: gpt}\n")
    process = run.program("doctor", "ps-launch", "doctor", "c.yaml", "--pipeline", "--set=launch.group=2", *flags)
    assert process.popen.wait(WAIT_S) == 0, process.output
    for words in ("The layers are cut into", "Between two stages", "(the bubble)", "ms in one process"):
        assert words in process.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--pipeline",), "each worker is one process (no --group): the stages of a pipeline are"),
        (("--pipeline", "--group=2", "--set=worker.zero=3"), "worker.zero is 3: both divide the model"),
        (("--group=2", "--set=launch.group_min=1"), "launch.group_min without worker.pipeline"),
        (("--pipeline", "--group=2", "--set=launch.group_min=3"), "launch.group_min is 3, and launch.group 2"),
    ],
)
def test_what_does_not_go_together_is_said(run: EngineRun, flags: tuple[str, ...], message: str) -> None:
    process = run.program("refused", "ps-launch", "-n", "1", "--mode", "sync", *TASK, *flags)
    assert process.wait() == 2, process.output
    assert message in " ".join(process.output.split())
    assert "Traceback" not in process.output
