"""Who may not average with the others, as real processes: it ends with a sentence, and they go on without it."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

STEPS = 8

SCRIPT = """
import sys, torch, paramserver
case = sys.argv[1] if len(sys.argv) > 1 else ""
with paramserver.connect() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = session.optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
    while not session.is_done:
        number = optimizer.progress.row.seq + 1
        for p in model.parameters():
            p.grad = torch.full_like(p, float(number))
        if number == 5 and case == "schedule":
            optimizer.param_groups[0]["lr"] = 0.005
        if number == 5 and case == "nan":
            model.bias.grad[1] = float("nan")
        if number == 5 and case == "dies":
            import os, pathlib, time
            while not list(pathlib.Path("kept").glob("snapshot-00000000000[24]-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        session.record(num_samples=1, loss=0.0)
        optimizer.step()
    session.finish()
"""


def start(cluster, num_workers, *flags):
    (cluster.folder / "script.py").write_text(SCRIPT)
    server = cluster.server(
        "--mode", "allreduce", "--workers", str(num_workers), "--steps", str(STEPS), "--history", "h.jsonl", *flags
    )
    return server, lambda rank, *case, **env: cluster.script(rank, cluster.folder / "script.py", *case, **env)


def members(cluster):
    """Of each version, how many workers' gradients it holds; in the history nothing is wrong."""
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    lines = [json.loads(line) for line in (cluster.folder / "h.jsonl").read_text().splitlines()]
    return [len(line["contributions"]) for line in lines if line["op"] == "commit"]


@pytest.mark.parametrize("victim", [0, 2])  # to whom small sums come, and one that sends
@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        # The lowest is right where as many say one as the other; of three one is alone.
        (
            "schedule",
            2,
            "the optimizer of rank {victim} would step with other hyperparameters (lr 0.005) than that of rank",
        ),
        ("nan", 16, "the gradient of 'bias' of rank {victim} is not finite, so the mean would not be finite"),
    ],
    ids=["schedule", "not finite"],
)
def test_it_ends_in_its_step_and_the_others_go_on(cluster, case, code, message, victim):
    server, worker = start(cluster, 3)
    workers = [worker(rank, *([case] if rank == victim else [])) for rank in range(3)]
    ended = workers.pop(victim)
    assert ended.wait() == code, ended.output
    assert message.format(victim=victim) in ended.output
    assert "Traceback" not in ended.output
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, 0], workers[0].output
    assert members(cluster) == [3] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("zero", "copies", "message"),
    [
        ("0", "2", "worker.zero is 0 for rank 1, but worker.zero is 1 (worker.zero_copies 2) for rank 0, which"),
        ("1", "1", "worker.zero is 1 (worker.zero_copies 1) for rank 1, but worker.zero is 1 (worker.zero_copies 2) "),
    ],
)
def test_one_that_divides_otherwise_is_refused(cluster, zero, copies, message):
    server, worker = start(cluster, 2)
    first = worker(0, PS_WORKER__ZERO="1")
    other = worker(1, PS_WORKER__ZERO=zero, PS_WORKER__ZERO_COPIES=copies)
    assert other.wait() == 2, other.output
    assert message in other.output
    assert "Traceback" not in other.output
    assert [first.wait(), server.wait()] == [0, 0]


def test_a_share_that_nobody_has_ends_the_run_which_goes_on_from_its_snapshot(cluster):
    kept = ("--checkpoint-dir", "kept", "--checkpoint-every", "2")
    settings = {"PS_WORKER__ZERO": "1", "PS_WORKER__ZERO_COPIES": "1"}
    server, worker = start(cluster, 2, *kept)
    first, dying = (worker(rank, *case, **settings) for rank, case in enumerate(([], ["dies"])))
    assert dying.wait() == -9
    assert first.wait() == 15, first.output
    assert "Traceback" not in first.output
    server.event("snapshot")
    server.signal(15)
    assert server.wait() in (0, -15, 143), server.output
    newest = server.events("snapshot")[-1]["version"]  # one that is due while another is written is left out
    server, worker = start(cluster, 2, *kept)
    assert server.event("resumed")["version"] == newest in (2, 4)
    workers = [worker(rank, **settings) for rank in range(2)]
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, 0], workers[0].output
    assert "optimizer_state_anew" not in "".join(worker.output for worker in workers)


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
def test_an_optimizer_of_sparse_gradients_alone_is_refused_before_the_first_step(cluster, optimizer, code):
    (cluster.folder / "sparse.py").write_text(SPARSE)
    server = cluster.server("--mode", "allreduce", "--workers", "1", "--steps", "3")
    worker = cluster.script(0, cluster.folder / "sparse.py", optimizer)
    assert worker.wait() == code, worker.output
    assert "Traceback" not in worker.output
    message = "SparseAdam steps along sparse gradients only, and workers of mode allreduce average"
    assert (message in worker.output) == bool(code)
    assert ("fix: use torch.optim.Adam; or --mode localsgd" in worker.output) == bool(code)
    server.signal(15)
