"""What the optimizer remembers is divided among all-reduce peers, as real processes: the weights are those of one
process, also where one is killed and comes back, and from a snapshot with another number of workers."""

from __future__ import annotations

import pytest

from paramserver.tests.cluster import Cluster, Process, end_well

from .test_allreduce import SNAPSHOTS, Start, of_all, prove, sizes_of, start, versions_of

pytestmark = pytest.mark.slow


def divided(
    cluster: Cluster, num_workers: int, steps: int, *words: str, zero: int = 1, copies: int = 2
) -> tuple[Process, Start]:
    settings = {"PS_WORKER__ZERO": str(zero), "PS_WORKER__ZERO_COPIES": str(copies)}
    return start(cluster, num_workers, steps, "adam", *words, flags=SNAPSHOTS, **settings)


@pytest.mark.timeout(300)
def test_it_equals_one_process_with_one_nth_of_the_state(cluster: Cluster) -> None:
    """And a snapshot goes on with another number of workers, and with none of it divided."""
    server, worker = divided(cluster, 3, 20, copies=1)
    workers = [worker(rank) for rank in range(3)]
    end_well(*workers, server)
    versions = of_all(3, 20)
    prove(cluster, versions)
    whole = 2 * 8 * (9 * 20 + 20 + 20 * 3 + 3)  # Adam's two moments, float64
    state_bytes = [worker.event("optimizer_state")["bytes"] for worker in workers]
    assert max(state_bytes) <= whole / 3 + 2 * 8 * 20 + 200  # cut between rows; and each tensor's count of steps
    assert sum(state_bytes) >= whole
    for steps, zero, num in ((30, 1, 2), (40, 0, 2)):
        server, worker = divided(cluster, num, steps, "steps", zero=zero)
        end_well(*(workers := [worker(rank) for rank in range(num)]), server)
        assert not any(worker.events("optimizer_state_anew") for worker in workers)
        versions += of_all(num, steps)[len(versions) :]
        prove(cluster, versions)


def test_who_dies_before_it_has_given_its_share_leaves_it_with_another_one(cluster: Cluster) -> None:
    """The round counts, and nobody has the weights of the newest version whole: those who are left have all of it."""
    server, worker = divided(cluster, 3, 20)
    workers = worker(0), worker(1), worker(2, "dies with its share")
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, -9, 0], workers[0].output
    versions = versions_of(cluster)
    assert sizes_of(versions) == [3] * 8 + [2] * 12
    prove(cluster, versions)
