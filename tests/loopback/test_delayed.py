"""Means that are outstanding among all-reduce peers, as real processes: the weights are those of delayed SGD, from a
reference of a few lines, whoever is killed meanwhile; and the history says how late each gradient was."""

from __future__ import annotations

import pytest

from paramserver.tests.cluster import Cluster, Process, at_gates, end_well

from .test_allreduce import SNAPSHOTS, Start, killed_and_back, prove, sizes_of, start, versions_of

pytestmark = pytest.mark.slow

K = 2


def late(cluster: Cluster, num_workers: int, steps: int, *words: str) -> tuple[Process, Start]:
    return start(cluster, num_workers, steps, *words, flags=("--staleness", str(K), *SNAPSHOTS))


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("sgd", "momentum")), "adam"]
)
def test_it_is_delayed_sgd(cluster: Cluster, kind: str) -> None:
    has_schedule = kind == "momentum"
    server, worker = late(cluster, 2, 40, kind, "schedule" if has_schedule else "evaluates")
    end_well(worker(0), worker(1), server)
    versions = versions_of(cluster)
    assert versions == [[(rank, t, max(0, t - 1 - K)) for rank in range(2)] for t in range(1, 41)]
    prove(cluster, versions, kind=kind, has_schedule=has_schedule)
    assert cluster.summary()["staleness_bound"] == K
    assert {worker["staleness_max"] for worker in cluster.summary()["workers"]} == {K}


def test_one_is_killed_with_means_outstanding_and_comes_back(cluster: Cluster) -> None:
    """The others average again what they hold; who comes is given the weights, and the means that are outstanding."""
    server, worker = late(cluster, 3, 40, "adam", "leaves")
    killed_and_back(cluster, server, worker)  # the others have handed over K more each
    versions = versions_of(cluster)
    sizes = sizes_of(versions)
    assert len(sizes) == 40 and set(sizes) == {2, 3}
    assert 11 - K <= sizes.index(2) + 1 <= 11
    prove(cluster, versions)
    numbers = [[t for version in versions for r, t, _ in version if r == rank] for rank in range(3)]
    assert numbers == [[*range(1, 1 + len(found))] for found in numbers]  # nothing lost, nothing twice
    assert [len(found) for found in numbers[:2]] == [40, 40]


def test_a_run_goes_on_from_its_snapshot(cluster: Cluster) -> None:
    """A snapshot has all means up to its version: nothing is outstanding in it."""
    server, worker = late(cluster, 2, 40, "adam", "leaves")  # all wait in step 21 for what does not come
    workers = worker(0), worker(1)
    at_gates(*workers)
    server.event("snapshot")
    for item in (*workers, server):
        item.kill()
    server, worker = late(cluster, 2, 30, "adam")
    workers = worker(0), worker(1)
    end_well(*workers, server)
    assert not workers[0].events("optimizer_state_anew")
    begun = [line["version"] for line in cluster.history() if line["op"] == "start"][-1]
    assert begun >= 5
    bases = [max(0, t - 1 - K) for t in range(1, begun + 1)] + [max(begun, t - 1 - K) for t in range(begun + 1, 31)]
    prove(cluster, [[(rank, t, base) for rank in range(2)] for t, base in enumerate(bases, 1)])
