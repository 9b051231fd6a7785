"""A process of a worker that stands still closes nothing: it is missed after a lease, unless all stood still."""

from __future__ import annotations

import signal
import time

import pytest
from safetensors.torch import load_file

from paramserver.tests.cluster import Forked, end_well
from paramserver.tests.forks import Run
from paramserver.tests.replica_group.test_groups import alone, difference, saved_by_all, serve

pytestmark = pytest.mark.slow

LEASE_S = 2.0
STEPS = 60


def begun(run: Run) -> list[Forked]:
    serve(run, "sync", 1, STEPS, 15, "--set", "server.absent_s=60", "--set", f"server.lease_s={LEASE_S}")
    group = run.group(0, 3, PS_SLOWDOWN__BASE_S="0.05")
    group[0].until(lambda: "step 10" in group[0].output, "step 10")
    return group


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_that_stands_still_ends_the_worker_which_goes_on_as_a_whole(run: Run, frozen: int) -> None:
    group = begun(run)
    group[frozen].signal(signal.SIGSTOP)
    others = [number for number in group if number is not group[frozen]]
    assert [other.wait() for other in others] == [15, 15], others[0].output
    message = f"group rank {frozen} of this worker's 3 processes was silent for "
    for other in others:
        assert message in other.output and "(server.lease_s is 2)" in other.output, other.output
    group[frozen].signal(signal.SIGCONT)  # whoever goes on finds that it is alone
    assert group[frozen].wait() == 15, group[frozen].output
    end_well(*run.group(0, 3, life=1), run.processes[0])
    assert difference(load_file(run.folder / "w.safetensors"), alone(STEPS, 15, "sgd")) <= 1e-9


def test_all_stand_still_together_and_go_on(run: Run) -> None:
    """As on a laptop that sleeps: nobody has missed anybody. The server has, and lets the worker in again."""
    group = begun(run)
    for _ in range(2):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for forked in group:
                forked.signal(number)
            time.sleep(LEASE_S * 2 if number == signal.SIGSTOP else 0)
        seen = group[0].output.count("step ")
        group[0].until(lambda seen=seen: group[0].output.count("step ") > seen + 3, "more steps")  # type: ignore[misc]
    assert difference(saved_by_all(run, 1, 3), alone(STEPS, 15, "sgd")) <= 1e-9
