"""What the optimizer remembers is divided among all-reduce peers, as real processes: the weights are those of one
process, also where one is killed and comes back, and from a snapshot with another number of workers."""

from __future__ import annotations

import pytest

from .test_allreduce import SCRIPT, difference, versions_of

pytestmark = pytest.mark.slow


def start(cluster, num_workers, steps, *arguments, zero=1, copies=2):
    script = cluster.folder / "script.py"
    script.write_text(SCRIPT)
    server = cluster.server(
        "--mode", "allreduce", "--workers", str(num_workers), "--steps", str(steps), "--save", "w.safetensors",
        "--history", "h.jsonl", "--checkpoint-dir", "kept", "--checkpoint-every", "5",
    )  # fmt: skip
    settings = {"PS_WORKER__ZERO": str(zero), "PS_WORKER__ZERO_COPIES": str(copies)}
    return server, lambda rank: cluster.script(rank, script, str(cluster.folder), *arguments, **settings)


DYING = """
    if session.rank == 2:
        transfer = optimizer._steps.strategy._transfer
        def dying(spread=transfer.spread):
            if optimizer.progress.row.seq == 8:  # the eighth counts, and others wait for what has been stepped here
                os.kill(os.getpid(), 9)
            spread()
        transfer.spread = dying
    while not session.is_done:
"""


def finished(server, workers):
    assert [worker.wait() for worker in workers] == [0] * len(workers), "".join(worker.output for worker in workers)
    assert server.wait() == 0


@pytest.mark.timeout(300)
def test_it_equals_one_process_with_one_nth_of_the_state(cluster):
    """And a snapshot goes on with another number of workers, and with none of it divided."""
    server, worker = start(cluster, 3, 20, copies=1)
    workers = [worker(rank) for rank in range(3)]
    finished(server, workers)
    versions = [[(rank, number) for rank in range(3)] for number in range(1, 21)]
    assert difference(cluster, versions) <= 1e-9
    whole = 2 * 8 * (9 * 20 + 20 + 20 * 3 + 3)  # Adam's two moments, float64
    state_bytes = [worker.event("optimizer_state")["bytes"] for worker in workers]
    assert max(state_bytes) <= whole / 3 + 2 * 8 * 20 + 200  # cut between rows; and each tensor's count of steps
    assert sum(state_bytes) >= whole
    for steps, zero, num in ((30, 1, 2), (40, 0, 2)):
        server, worker = start(cluster, num, steps, "steps", zero=zero)
        finished(server, workers := [worker(rank) for rank in range(num)])
        assert "optimizer_state_anew" not in "".join(worker.output for worker in workers)
        versions += [[(rank, number) for rank in range(num)] for number in range(len(versions) + 1, steps + 1)]
        assert difference(cluster, versions) <= 1e-9


def test_who_dies_before_it_has_given_its_share_leaves_it_with_another_one(cluster):
    """The round counts, and nobody has the weights of the newest version whole: those who are left have all of it."""
    server, worker = start(cluster, 3, 20)
    path = cluster.folder / "script.py"
    path.write_text(path.read_text().replace("    while not session.is_done:\n", DYING[1:]))
    workers = [worker(rank) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, -9], workers[0].output
    assert server.wait() == 0
    versions = versions_of(cluster)
    assert [len(version) for version in versions] == [3] * 8 + [2] * 12
    assert difference(cluster, versions) <= 1e-9
