"""Who may not average with the others, as real processes: it ends with a sentence, and they go on without it."""

from __future__ import annotations

import pytest

from paramserver.tests.cluster import Cluster, end_well

from .test_allreduce import sizes_of, start, versions_of

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.mark.parametrize("victim", [0, 2])  # to whom small sums come, and one that sends
@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        # The lowest is right where as many say one as the other; of three one is alone.
        ("rate", 2, "the optimizer of rank {} would step with other hyperparameters (lr 0.005) than that of rank"),
        ("nan", 16, "the gradient of '1.bias' of rank {} is not finite, so the mean would not be finite"),
    ],
    ids=["schedule", "not finite"],
)
def test_it_ends_in_its_step_and_the_others_go_on(
    cluster: Cluster, case: str, code: int, message: str, victim: int
) -> None:
    server, worker = start(cluster, 3, STEPS)
    workers = [worker(rank, *([case] if rank == victim else [])) for rank in range(3)]
    ended = workers.pop(victim)
    assert ended.wait() == code, ended.output
    assert message.format(victim) in ended.output
    assert "Traceback" not in ended.output
    end_well(*workers, server)
    assert sizes_of(versions_of(cluster)) == [3] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (
            {"ZERO": "1"}, {"ZERO": "0", "ZERO_COPIES": "2"},
            "worker.zero is 0 for rank 1, but worker.zero is 1 (worker.zero_copies 2) for rank 0, which",
        ),
        (
            {"ZERO": "1"}, {"ZERO": "1", "ZERO_COPIES": "1"},
            "worker.zero is 1 (worker.zero_copies 1) for rank 1, but worker.zero is 1 (worker.zero_copies 2) ",
        ),
        ({}, {"CODEC": "int8"}, "worker.codec is int8 for rank 1, but rank 0"),
    ],
)  # fmt: skip
def test_one_that_divides_or_encodes_otherwise_is_refused(
    cluster: Cluster, first: dict[str, str], other: dict[str, str], message: str
) -> None:
    server, worker = start(cluster, 2, STEPS)
    workers = [
        worker(rank, **{f"PS_WORKER__{name}": value for name, value in settings.items()})
        for rank, settings in enumerate((first, other))
    ]
    assert workers[1].wait() == 2, workers[1].output
    assert message in workers[1].output
    assert "Traceback" not in workers[1].output
    end_well(workers[0], server)


def test_a_share_that_nobody_has_ends_the_run_which_goes_on_from_its_snapshot(cluster: Cluster) -> None:
    kept = ("--checkpoint-dir", "kept", "--checkpoint-every", "2")
    settings = {"PS_WORKER__ZERO": "1", "PS_WORKER__ZERO_COPIES": "1"}
    server, worker = start(cluster, 2, STEPS, flags=kept, **settings)
    first, dying = worker(0), worker(1, "dies after a snapshot")
    assert dying.wait() == -9
    assert first.wait() == 15, first.output
    assert "Traceback" not in first.output
    server.event("snapshot")
    server.signal(15)
    assert server.wait() in (0, -15, 143), server.output
    newest = server.events("snapshot")[-1]["version"]  # one that is due while another is written is left out
    server, worker = start(cluster, 2, STEPS, flags=kept, **settings)
    assert server.event("resumed")["version"] == newest in (2, 4)
    workers = worker(0), worker(1)
    end_well(*workers, server)
    assert not any(worker.events("optimizer_state_anew") for worker in workers)


SPARSE = """
import sys, torch, paramserver
with paramserver.connect() as session:
    model = torch.nn.Sequential(torch.nn.Embedding(20, 3, sparse=True))
    optimizer = session.optimizer(model, getattr(torch.optim, sys.argv[1])(model.parameters(), lr=0.01))
    while not session.is_done:
        optimizer.zero_grad()
        model(torch.tensor([1, 2 + session.step])).sum().backward()
        session.record(num_samples=1, loss=0.0)
        optimizer.step()
    session.finish()
"""


@pytest.mark.parametrize(("optimizer", "code"), [("SparseAdam", 2), ("SGD", 0)])
def test_an_optimizer_of_sparse_gradients_alone_is_refused_before_the_first_step(
    cluster: Cluster, optimizer: str, code: int
) -> None:
    (cluster.folder / "sparse.py").write_text(SPARSE)
    server = cluster.server("--mode", "allreduce", "--workers", "1", "--steps", "3")
    worker = cluster.script(0, cluster.folder / "sparse.py", optimizer)
    assert worker.wait() == code, worker.output
    assert "Traceback" not in worker.output
    message = "SparseAdam steps along sparse gradients only, and workers of mode allreduce average"
    assert (message in worker.output) == bool(code)
    assert ("fix: use torch.optim.Adam; or --mode localsgd" in worker.output) == bool(code)
    server.signal(15)
