"""A process of a worker that stands still closes nothing: it is missed after a lease, unless all stood still."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.forks import Forked, Run
from paramserver.tests.replica_group.test_groups import alone, difference

pytestmark = pytest.mark.slow

LEASE_S = 2.0
STEPS = 60


def serve(run: Run) -> None:
    run.serve("--mode", "sync", "--workers", "1", "--steps", str(STEPS), "--batch-size", "15", "--set",
              "server.absent_s=60", "--set", f"server.lease_s={LEASE_S}",
              "--save", str(run.folder / "w.safetensors"))  # fmt: skip


def begun(run: Run) -> list[Forked]:
    group = run.group(0, 3, PS_SLOWDOWN__BASE_S="0.05")
    group[0].until(lambda: "step 10" in group[0].output, "step 10")
    return group


def signal_all(group: list[Forked], number: int) -> None:
    for forked in group:
        os.kill(forked.popen.pid, number)


def prove(run: Run) -> None:
    assert run.processes[0].wait() == 0
    assert difference(load_file(run.folder / "w.safetensors"), alone(STEPS, 15, "sgd")) <= 1e-9


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_that_stands_still_ends_the_worker_which_goes_on_as_a_whole(run: Run, frozen: int) -> None:
    serve(run)
    group = begun(run)
    os.kill(group[frozen].popen.pid, signal.SIGSTOP)
    others = [number for number in group if number is not group[frozen]]
    assert [other.wait() for other in others] == [15, 15], others[0].output
    message = f"group rank {frozen} of this worker's 3 processes was silent for "
    assert all(message in other.output and "(server.lease_s is 2)" in other.output for other in others), others[
        0
    ].output
    os.kill(group[frozen].popen.pid, signal.SIGCONT)  # whoever goes on finds that it is alone
    assert group[frozen].wait() == 15, group[frozen].output
    again = run.group(0, 3, life=1)
    assert [forked.wait() for forked in again] == [0, 0, 0], again[0].output
    prove(run)


def test_all_stand_still_together_and_go_on(run: Run) -> None:
    """As on a laptop that sleeps: nobody has missed anybody. The server has, and lets the worker in again."""
    serve(run)
    group = begun(run)
    for _ in range(2):
        signal_all(group, signal.SIGSTOP)
        time.sleep(LEASE_S * 2)
        signal_all(group, signal.SIGCONT)
        seen = group[0].output.count("step ")
        group[0].until(lambda seen=seen: group[0].output.count("step ") > seen + 3, "more steps")  # type: ignore[misc]
    assert [number.wait() for number in group] == [0, 0, 0], group[0].output
    prove(run)
    weights = [torch.load(run.folder / f"w0-{inner}.pt") for inner in range(3)]
    assert all(difference(weights[0], weight) == 0 for weight in weights[1:])
