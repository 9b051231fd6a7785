"""`ps-launch --backend slurm` on a real cluster of three nodes: it trains, mends, ends, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paramserver.common.errors import UsageError
from paramserver.launch.plan.hosts import SERVER, Allocation, Child, ProcessSpec, Task, parse_counts, place_on_nodes
from paramserver.tests.cluster import Process
from paramserver.tests.engines.conftest import EngineRun
from paramserver.tests.engines.slurm import SlurmCluster
from paramserver.tests.marks import marked_processes
from paramserver.worker.trainer import choose_device

PS_LAUNCH = str(Path(sys.executable).with_name("ps-launch"))
WORKERS = [Child("worker", rank) for rank in range(5)]


def spec(child: Child) -> ProcessSpec:
    return ProcessSpec(child, ("python",), {})


# ---- who goes where, pure ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"), [("2", (2,)), ("4,1(x2)", (4, 1, 1)), ("1(x3),8", (1, 1, 1, 8)), ("2(x10)", (2,) * 10)]
)
def test_counts_of_nodes(text: str, counts: tuple[int, ...]) -> None:
    assert parse_counts(text) == counts


def test_workers_fill_node_after_node_and_leave_the_server_a_task() -> None:
    allocation = Allocation("7", ("a", "b"), tasks=(3, 3), cores=(8, 4))
    places = place_on_nodes([spec(SERVER), *map(spec, WORKERS)], allocation)
    assert places == {
        SERVER: Task("a", 0, 2), WORKERS[0]: Task("a", 0, 2), WORKERS[1]: Task("a", 1, 2),
        WORKERS[2]: Task("b", 0, 1), WORKERS[3]: Task("b", 1, 1), WORKERS[4]: Task("b", 2, 1),
    }  # fmt: skip


def test_a_job_with_a_task_for_each_worker_is_enough() -> None:
    """`#SBATCH -n 3` and three workers: the server shares a node with them. Shards go to the nodes in turn."""
    allocation = Allocation("7", ("a", "b", "c"), tasks=(1, 1, 1), cores=(2, 2, 2))
    servers = [SERVER, Child("server", 1)]
    places = place_on_nodes([spec(child) for child in (*servers, *WORKERS[:3])], allocation)
    assert [places[child].node for child in (*servers, *WORKERS[:3])] == ["a", "b", "a", "b", "c"]


def test_too_few_tasks_is_the_users_mistake() -> None:
    allocation = Allocation("7", ("a", "b"), tasks=(1, 1), cores=(2, 2))
    with pytest.raises(UsageError, match="3 workers need a task each, but job 7 has 2 tasks"):
        place_on_nodes([spec(SERVER), *map(spec, WORKERS[:3])], allocation)


@pytest.mark.parametrize(
    ("name", "local_rank", "num_devices", "device"),
    [
        ("auto", 1, 4, "cuda:1"),
        ("auto", 5, 4, "cuda:1"),  # more workers than devices share them
        ("auto", 3, 1, "cuda"),  # Slurm's --gpus-per-task shows each task one device, its number 0
        ("auto", 1, 0, "cpu"),
        ("auto", None, 4, "cuda"),
        ("cpu", 1, 4, "cpu"),
        ("cuda:0", 1, 4, "cuda:0"),
    ],
)
def test_the_rank_on_the_host_chooses_the_device(
    name: str, local_rank: int | None, num_devices: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_devices)
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_devices > 0)
    assert str(choose_device(name, local_rank)) == device


# ---- on the cluster --------------------------------------------------------------------------------------


class Launched:
    """ps-launch with the ledger task; every process of it, wherever it runs, carries a mark."""

    def __init__(self, run: EngineRun, cluster: SlurmCluster) -> None:
        self.run, self.cluster = run, cluster
        self.mark = uuid.uuid4().hex
        self.env = {**cluster.env, "PS_TEST_MARK": self.mark}

    def start(self, num_workers: int, steps: int, *flags: str, pause_s: float = 0.0, before: tuple = ()) -> Process:
        self.run.steps, self.run.num_workers = steps, num_workers
        return self.run.program(
            "launch", *before, PS_LAUNCH, "--backend", "slurm", "--mode", "async",
            *self.run.task_flags(num_workers, steps), "--set", "server.insecure=true", "--history", self.run.history,
            "--summary", "s.json", *flags, PS_SLOWDOWN__BASE_S=str(pause_s), **self.env,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Processes with the mark; srun hands a task its environment."""
        return list(marked_processes(self.mark).values())

    def nothing_is_left(self) -> None:
        self.cluster.until(lambda: self.left() == [] and self.cluster.jobs() == [], "nothing is left")

    def trains(self, process: Process) -> None:
        process.until(lambda: self.run.num_commits() > 5, "commits")


@pytest.fixture
def launched(run: EngineRun, slurm_cluster: SlurmCluster) -> Iterator[Launched]:
    launched = Launched(run, slurm_cluster)
    yield launched
    run.stop()
    launched.nothing_is_left()


@pytest.mark.slow
def test_it_allocates_trains_and_gives_back(launched: Launched) -> None:
    process = launched.start(3, 20)
    assert process.wait() == 0, process.output
    launched.nothing_is_left()
    launched.run.prove()


@pytest.mark.slow
def test_within_a_job_it_takes_the_jobs_nodes(launched: Launched) -> None:
    """`salloc -N3 -n3 ps-launch ...`: one worker on each node, the server beside the first."""
    process = launched.start(3, 20, before=("salloc", "-N3", "-n3"))
    assert process.wait() == 0, process.output
    launched.nothing_is_left()
    launched.run.prove()


@pytest.mark.slow
def test_a_killed_worker_is_started_again_on_its_node(launched: Launched) -> None:
    process = launched.start(2, 60, pause_s=0.03)
    launched.trains(process)
    joined = [event for event in process.events("joined") if event["rank"] == 1]
    os.kill(joined[0]["pid"], signal.SIGKILL)
    assert process.wait() == 0, process.output
    launched.nothing_is_left()
    launched.run.prove(restarts=None)
    assert [worker["restarts"] for worker in launched.run.summary()["workers"]] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_however_it_ends_nothing_is_left(launched: Launched, number: int, code: int) -> None:
    process = launched.start(3, 5000, pause_s=0.05)
    launched.trains(process)
    process.signal(number)
    assert process.wait() == code, process.output
    launched.nothing_is_left()


def test_what_slurm_refuses_is_told(launched: Launched) -> None:
    process = launched.run.program(
        "launch", "ps-launch", "--backend", "slurm", "-n", "2", "--set", "server.insecure=true",
        **launched.env, SALLOC_PARTITION="nowhere",
    )  # fmt: skip
    assert process.wait() == 2, process.output
    assert "invalid partition specified: nowhere" in process.output
    launched.nothing_is_left()


def test_an_interrupt_while_it_waits_for_nodes_withdraws_the_request(launched: Launched) -> None:
    cluster = launched.cluster
    busy = launched.run.program("busy", "srun", "-N3", "-n12", "sleep", "1000", **launched.env)
    cluster.until(lambda: any("RUNNING" in job for job in cluster.jobs()), "the cluster is busy")
    process = launched.start(2, 20)
    process.until(lambda: "queued and waiting for resources" in process.output, "notice")
    process.signal(signal.SIGINT)
    assert process.wait() == 130, process.output
    assert len(cluster.jobs()) == 1
    busy.signal(signal.SIGTERM)
    busy.wait()


@pytest.mark.slow
def test_a_killed_srun_is_a_lost_worker_that_is_started_again(launched: Launched) -> None:
    """Slurm lets the step of a killed srun go on: the backend cancels it before the worker's next life."""
    process = launched.start(2, 60, pause_s=0.03)
    launched.trains(process)
    sruns = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "srun"]
    mine = [
        each for each in sruns if "--job-name=ps-worker-1" in each.cmdline() and launched.mark in str(each.environ())
    ]
    for each in mine:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    assert process.wait() == 0, process.output
    assert "was lost: srun ended with -9" in process.output
    launched.nothing_is_left()
    launched.run.prove(restarts=None)
