"""Groups as ps-launch and torchrun start them: one process is killed in the middle, nothing is lost or repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paramserver.tests.cluster import Process
from paramserver.tests.engines.conftest import BATCH, EngineRun

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture
def run(tmp_path: Path) -> Iterator[EngineRun]:
    run = EngineRun(tmp_path)
    yield run
    run.stop()


def kill_inner(process: Process, rank: int, inner: int, number: int = signal.SIGKILL) -> None:
    """A signal to the inner process of this worker, below what was started."""
    for module in psutil.Process(process.popen.pid).children(recursive=True):
        environ = module.environ()
        is_worker = str(rank) in (environ.get("PS_WORKER__RANK"), module.cmdline()[-1])
        if environ.get("RANK") == str(inner) and is_worker and "paramserver.worker" in module.cmdline():
            os.kill(module.pid, number)
            return
    pytest.fail(f"no group rank {inner} of worker {rank}\n{process.output}")


def prove(run: EngineRun, restarts: list[int]) -> None:
    """As `run.prove`. The ledger adds up over a batch, and a group takes the mean of two parts of one: half of each."""
    final, is_sync = run.summary()["final"], run.summary()["mode"] == "sync"
    assert (final["missing"], final["repeated"], final["torn"]) == (0, 0, 0), final
    num_folded = STEPS if is_sync else STEPS * run.num_workers
    assert final["applied"] == pytest.approx(num_folded * BATCH / 2, rel=1e-5)
    assert final["clock"] == num_folded
    assert [worker["training_steps"] for worker in run.summary()["workers"]] == [STEPS] * run.num_workers
    assert [worker["restarts"] for worker in run.summary()["workers"]] == restarts
    run.check_history()


@pytest.mark.parametrize(
    ("mode", "inner", "number", "message"),
    [
        ("sync", 1, signal.SIGKILL, "has ended, and with it the worker"),
        # The others miss it after a lease; the starter kills it.
        ("sync", 0, signal.SIGSTOP, "was silent for "),
        pytest.param("async", 1, signal.SIGKILL, "has ended, and with it the worker", marks=pytest.mark.campaign),
        pytest.param("sync", 1, signal.SIGSTOP, "was silent for ", marks=pytest.mark.campaign),
    ],
)
def test_ps_launch_starts_a_worker_again_of_which_a_process_is_killed_or_stands_still(
    run: EngineRun, mode: str, inner: int, number: int, message: str
) -> None:
    run.steps, run.num_workers = STEPS, 2
    launched = run.start(
        "launch", "-m", "paramserver.launch", "-n", "2", "--group", "2", "--mode", mode, *run.task_flags(2, STEPS),
        "--set", "policy.min_workers=2", "--history", run.history, "--summary", "s.json",
        "--set", "slowdown.base_s=0.05", "--set", "server.lease_s=2",
    )  # fmt: skip
    launched.until(lambda: run.num_commits() >= 10, "ten commits")
    kill_inner(launched, rank=1, inner=inner, number=number)
    assert launched.wait() == 0, launched.output
    assert f"group rank {inner} of this worker's 2 processes {message}" in launched.output
    prove(run, [0, 1])


@pytest.mark.parametrize(
    ("inner", "number"),
    [
        pytest.param(1, signal.SIGKILL, id="killed"),
        # torchrun gives the others 30 s after its SIGTERM, which one that stands still does not hear.
        pytest.param(0, signal.SIGSTOP, id="stands still", marks=pytest.mark.campaign),
    ],
)
def test_torchrun_starts_a_group_again(run: EngineRun, inner: int, number: int) -> None:
    run.serve("sync", 1, STEPS, "--set", "policy.min_workers=1", "--set", "server.lease_s=2")
    torchrun = run.program(
        "torchrun", "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=2", "-m", "paramserver.worker",
        "--group", "--history", run.history, "--rank", "0", PS_SERVER=run.address, PS_SLOWDOWN__BASE_S="0.05",
    )  # fmt: skip
    torchrun.until(lambda: run.num_commits() >= 10, "ten commits")
    kill_inner(torchrun, rank=0, inner=inner, number=number)
    assert torchrun.wait() == 0, torchrun.output
    assert run.processes[0].wait() == 0
    prove(run, [1])


def exit_code(folder: Path, code: str) -> int:
    """Returns the exit code of the starter of two processes that run this code."""
    started = subprocess.run(
        [sys.executable, "-m", "paramserver.worker.replica_group", "2", "-c", code],
        cwd=folder, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return started.returncode


def test_one_that_fails_ends_those_that_stand_still(tmp_path: Path) -> None:
    """Whichever they are: the starter looks at each of them."""
    stands_still = (
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP) if os.environ['RANK'] == '0' else os._exit(15)"
    )
    assert exit_code(tmp_path, stands_still) == 15


def test_the_exit_code_is_that_of_the_process_that_was_killed(tmp_path: Path) -> None:
    """The process with group rank 0 notices the loss at once and ends with 15, before the starter looks."""
    one_is_killed = (
        "import os, pathlib, signal\nalive = pathlib.Path('alive')\n"
        "if os.environ['RANK'] == '1':\n    alive.write_text(str(os.getpid())); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not alive.exists() or not alive.read_text():\n    pass\n"
        "os.kill(int(alive.read_text()), signal.SIGKILL); os._exit(15)"
    )
    assert exit_code(tmp_path, one_is_killed) == 128 + signal.SIGKILL


def test_a_process_that_is_killed_counts_before_one_that_was_seen_to_lose_it(tmp_path: Path) -> None:
    """Group rank 1 is killed once the starter has seen the end of group rank 0."""
    last_is_killed = (
        "import os, pathlib, signal\nother = pathlib.Path('other')\n"
        "if os.environ['RANK'] == '0':\n    other.write_text(str(os.getpid())); os._exit(15)\n"
        "while not other.exists() or not other.read_text() or pathlib.Path('/proc', other.read_text()).exists():\n"
        "    pass\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert exit_code(tmp_path, last_is_killed) == 128 + signal.SIGKILL
