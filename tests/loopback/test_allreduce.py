"""Workers that average among themselves, as real processes with a script of their own: equal to one process to the last
digits, also where one is killed while the others wait for it, and comes back. The history says whose gradients each
version holds, and the weights prove it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, Process, at_gates, end_well
from paramserver.tests.loopback.scripts.peers import Versions, make, reference

pytestmark = pytest.mark.slow

Start = Callable[..., Process]  # of a worker, by its rank, with words and variables of its own
SNAPSHOTS = ("--checkpoint-dir", "kept", "--checkpoint-every", "5")


def starter(cluster: Cluster, *words: str, **env: str) -> Start:
    return lambda rank, *more, **settings: cluster.script(rank, "peers.py", *words, *more, **env, **settings)


def start(
    cluster: Cluster, num_workers: int, steps: int, *words: str, flags: tuple[str, ...] = (), mode: str = "allreduce",
    **env: str,
) -> tuple[Process, Start]:  # fmt: skip
    server = cluster.server(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(steps), "--save", "w.safetensors",
        "--history", "h.jsonl", "--summary", "s.json", *flags,
    )  # fmt: skip
    return server, starter(cluster, *(words or ("adam",)), **env)


def versions_of(cluster: Cluster) -> Versions:
    """As the history has them, in which nothing is wrong."""
    lines = cluster.history(is_checked=True)
    accepted = [line for line in lines if line["op"] == "accept" and line["outcome"] == "accepted"]
    bases = {(line["rank"], line["seq"]): line["base_version"] for line in accepted}
    commits = [line["contributions"] for line in lines if line["op"] == "commit"]
    return [[(rank, number, bases[rank, number]) for rank, _, number in commit] for commit in commits]


def sizes_of(versions: Versions) -> list[int]:
    return list(map(len, versions))


def of_all(num_workers: int, num_versions: int) -> Versions:
    return [[(rank, number) for rank in range(num_workers)] for number in range(1, num_versions + 1)]


def prove(cluster: Cluster, versions: Versions, **options: Any) -> None:
    """The final weights are those of one process that takes these contributions."""
    found, expected = load_file(cluster.folder / "w.safetensors"), reference(versions, **options)
    assert max(float((found[key] - expected[key]).abs().max()) for key in expected) <= 1e-9


def killed_and_back(cluster: Cluster, server: Process, worker: Start) -> None:
    """Of three that run peers.py with "leaves", rank 2 dies in step 11, while others average with it, and is back when
    they have come to step 21; to the end."""
    workers = [worker(rank) for rank in range(3)]
    at_gates(workers[2])
    workers[2].signal(signal.SIGKILL)
    at_gates(*workers[:2])
    (cluster.folder / "one").touch()
    again = worker(2)
    server.until(lambda: [e["rank"] for e in server.events("admitted")].count(2) == 2, "its return")
    (cluster.folder / "two").touch()
    end_well(*workers[:2], again, server)


def test_it_equals_one_process(cluster: Cluster) -> None:
    server, worker = start(cluster, 3, 100)
    end_well(*(worker(rank) for rank in range(3)), server)
    prove(cluster, of_all(3, 100))
    model_bytes = 8 * sum(p.numel() for p in make()[0].parameters())
    for item in cluster.summary()["workers"]:  # by way of the lowest, and what members tell each other
        num_others = 1 if item["rank"] else 2
        assert 0 < item["peer_bytes"] / num_others - 100 * model_bytes < 100 * 250


def test_one_is_killed_in_the_middle_of_a_reduction_and_comes_back(cluster: Cluster) -> None:
    server, worker = start(cluster, 3, 40, "adam", "leaves")
    killed_and_back(cluster, server, worker)
    versions = versions_of(cluster)
    assert sizes_of(versions) == [3] * 10 + [2] * 11 + [3] * 19
    prove(cluster, versions)


@pytest.mark.parametrize("victim", ["highest", "lowest"])
def test_one_stands_still_in_the_middle_of_a_reduction_and_goes_on(cluster: Cluster, victim: str) -> None:
    """It closes nothing: the others hear of it from the server, whatever the timeout of a reduction is."""
    server, worker = start(cluster, 3, 40, "adam", "leaves", "patient", flags=("--set", "server.lease_s=2"))
    workers = [worker(rank) for rank in range(3)]
    at_gates(workers[2])
    frozen = workers[2 if victim == "highest" else 0]
    frozen.signal(signal.SIGSTOP)
    if victim == "lowest":
        (cluster.folder / "one").touch()
    for other in workers:
        if other is not frozen:
            other.until(lambda item=other: item.events("group")[-1]["members"] == 2, "a group of those that are left")
    frozen.signal(signal.SIGCONT)
    (cluster.folder / "one").touch()
    server.until(lambda: len(server.events("admitted")) == 4, "its return")
    (cluster.folder / "two").touch()
    end_well(*workers, server)
    versions = versions_of(cluster)
    assert 2 in sizes_of(versions) and len(versions[-1]) == 3
    prove(cluster, versions)


def test_who_dies_with_the_mean_of_a_step_that_a_snapshot_is_of_is_in_no_weights(cluster: Cluster) -> None:
    """The lowest rank has stepped already, to bring weights: it goes back to its own gradient too."""
    server, worker = start(cluster, 3, 20, flags=SNAPSHOTS)
    workers = worker(0), worker(1), worker(2, "dies with the mean")
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, -9, 0], workers[0].output
    versions = versions_of(cluster)
    assert sizes_of(versions) == [3] * 9 + [2] * 11
    prove(cluster, versions)


@pytest.mark.timeout(300)
def test_the_job_survives_the_death_of_all_and_a_snapshot_of_sync_goes_on_in_allreduce_and_back(
    cluster: Cluster,
) -> None:
    def through(steps: int) -> None:
        server, worker = start(cluster, 2, steps, "adam", "steps", flags=SNAPSHOTS, mode="sync")
        workers = [worker(rank) for rank in range(2)]
        end_well(*workers, server)
        assert not any(process.events("optimizer_state_anew") for process in (*workers, server))
        prove(cluster, of_all(2, steps))

    through(8)
    # All but rank 2 wait in step 21 for what does not come.
    server, worker = start(cluster, 2, 40, "adam", "steps", "leaves", flags=SNAPSHOTS)
    workers = [worker(rank) for rank in range(2)]
    at_gates(*workers)
    server.event("snapshot")
    for item in (*workers, server):
        item.kill()
    through(30)


@pytest.mark.parametrize("flags", [[], ["--zero", "1"], ["--staleness", "1"]], ids=["plain", "zero", "staleness"])
def test_an_optimizer_that_begins_with_another_state_is_refused(cluster: Cluster, flags: list[str]) -> None:
    settings = {"PS_WORKER__ZERO": "1"} if "--zero" in flags else {}
    server, worker = start(cluster, 2, 5, flags=tuple(flags) if "--staleness" in flags else (), **settings)
    first, other = worker(0), worker(1, "begun")
    assert other.wait() == 2, other.output
    assert "the optimizer of rank 1 begins with another state than that of rank 0" in other.output
    assert "Traceback" not in other.output
    end_well(first, server)


def test_models_that_differ_are_refused_those_that_begin_with_other_weights_have_the_first_ones(
    cluster: Cluster,
) -> None:
    server, worker = start(cluster, 2, 8, "sgd", "other")
    first = worker(0)
    first.event("tensors")  # its model is offered
    wider = worker(1, "wider")
    assert wider.wait() == 12
    assert "expected 1.bias float64[3], got 1.bias float64[4]" in wider.output
    changing = worker(1, "changes")
    assert changing.wait() == 2
    assert "weights of rank 1 were changed between two steps, not by its optimizer" in changing.output
    assert "Traceback" not in wider.output + changing.output
    end_well(first, server)
    versions = versions_of(cluster)
    assert sizes_of(versions) == [2] * 4 + [1] * 4
    prove(cluster, versions, kind="sgd")


def test_a_run_of_unknown_length_uploads_its_weights_once_at_the_end(cluster: Cluster) -> None:
    server = cluster.server("--mode", "allreduce", "--workers", "2", "--save", "w.safetensors", "--summary", "s.json")
    worker = starter(cluster, "adam", "thirty")
    end_well(worker(0), worker(1), server)
    prove(cluster, of_all(2, 30))
    model_bytes = 8 * sum(p.numel() for p in make()[0].parameters())
    assert cluster.summary()["num_bytes"] < 10 * model_bytes, "of 30 uploads, one for each step"
