"""Workers that average among themselves, as real processes with a script of their own: equal to one process to the last
digits, also where one is killed while the others wait for it, and comes back. The history says whose gradients each
version holds, and the weights prove it."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = """
import os, pathlib, sys, time, torch, paramserver
import paramserver.worker.strategies.group
from paramserver.tests.loopback.test_allreduce import gradients, make
folder, leaves, counts_steps = pathlib.Path(sys.argv[1]), "leaves" in sys.argv, "steps" in sys.argv
if "patient" in sys.argv:
    group = paramserver.worker.strategies.group.Group
    group.__init__.__defaults__ = *group.__init__.__defaults__[:-2], 1000.0, 1000.0
model, inner = make()
with paramserver.connect() as session:
    optimizer = session.optimizer(model, inner)
    if "dies" in sys.argv and session.rank == 2:
        contribute = session._exchange.contribute
        def dying(*told):
            if optimizer.progress.row.seq == 9:  # it has the mean of the tenth, and so have the others
                os.kill(os.getpid(), 9)
            return contribute(*told)
        session._exchange.contribute = dying
    while not session.is_done:
        number = (session.step if counts_steps else optimizer.progress.row.seq) + 1
        at = {11: "one", 21: "two"}.get(number) if leaves else None
        if at == "one" and session.rank == 2 or at == "two" and session.rank != 2:
            print("at the gate", at, flush=True)
            while not (folder / at).exists():
                time.sleep(0.01)
        found, weight = gradients(session.rank, number)
        for p, gradient in zip(model.parameters(), found, strict=True):
            p.grad = gradient
        session.record(num_samples=weight, loss=0.0)
        optimizer.step()
    session.finish()
"""


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Linear(20, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def gradients(rank, number):
    """Of a rank's contribution, and from how many samples."""
    chance = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(p.shape, generator=chance, dtype=torch.float64) for p in make()[0].parameters()], 3 + rank


def alone(versions):
    """The weights that come of these contributions, (rank, number), of each version."""
    model, optimizer = make()
    for contributions in versions:
        found = [gradients(rank, number) for rank, number in contributions]
        total = sum(weight for _, weight in found)
        for index, p in enumerate(model.parameters()):
            p.grad = sum(item[index] * weight for item, weight in found) / total
        optimizer.step()
    return model.state_dict()


def difference(cluster, versions):
    got, expected = load_file(cluster.folder / "w.safetensors"), alone(versions)
    return max(float((got[key] - expected[key]).abs().max()) for key in expected)


def start(cluster, num_workers, steps, *arguments, checkpoints=False, flags=(), **env):
    (cluster.folder / "script.py").write_text(SCRIPT)
    kept = ["--checkpoint-dir", "kept", "--checkpoint-every", "5"] if checkpoints else []
    server = cluster.server(
        "--mode", "allreduce", "--workers", str(num_workers), "--steps", str(steps), "--save", "w.safetensors",
        "--history", "h.jsonl", *kept, *flags,
    )  # fmt: skip
    script = cluster.folder / "script.py"
    return server, lambda rank, **more: cluster.script(rank, script, str(cluster.folder), *arguments, **env, **more)


def versions_of(cluster):
    """(rank, number) of the contributions of each, as the history has them, in which nothing is wrong."""
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    lines = [json.loads(line) for line in (cluster.folder / "h.jsonl").read_text().splitlines()]
    return [[(rank, number) for rank, _, number in line["contributions"]] for line in lines if line["op"] == "commit"]


def killed_and_back(cluster, server, worker):
    """Of three that run SCRIPT with "leaves", rank 2 dies in step 11, while others average with it, and is back when
    they have come to step 21; to the end."""
    workers = [worker(rank) for rank in range(3)]
    workers[2].until(lambda: "at the gate one" in workers[2].output, "the step in which it is killed")
    workers[2].signal(signal.SIGKILL)
    for item in workers[:2]:
        item.until(lambda process=item: "at the gate two" in process.output, "ten steps without it")
    (cluster.folder / "one").touch()
    again = worker(2)
    server.until(lambda: [e["rank"] for e in server.events("admitted")].count(2) == 2, "its return")
    (cluster.folder / "two").touch()
    assert [worker.wait() for worker in (*workers[:2], again)] == [0, 0, 0], workers[0].output + again.output
    assert server.wait() == 0


def test_it_equals_one_process(cluster):
    server, worker = start(cluster, 3, 100, flags=("--summary", "s.json"))
    workers = [worker(rank) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0], workers[0].output
    assert server.wait() == 0
    versions = [[(rank, number) for rank in range(3)] for number in range(1, 101)]
    assert difference(cluster, versions) <= 1e-9
    model_bytes = 8 * sum(p.numel() for p in make()[0].parameters())
    summary = json.loads((cluster.folder / "s.json").read_text())
    for item in summary["workers"]:  # by way of the lowest, and what members tell each other
        num_others = 1 if item["rank"] else 2
        assert 0 < item["peer_bytes"] / num_others - 100 * model_bytes < 100 * 250


def test_one_is_killed_in_the_middle_of_a_reduction_and_comes_back(cluster):
    server, worker = start(cluster, 3, 40, "leaves")
    killed_and_back(cluster, server, worker)
    versions = versions_of(cluster)
    assert [len(version) for version in versions] == [3] * 10 + [2] * 11 + [3] * 19
    assert difference(cluster, versions) <= 1e-9


@pytest.mark.parametrize("victim", ["highest", "lowest"])
def test_one_stands_still_in_the_middle_of_a_reduction_and_goes_on(cluster, victim):
    """It closes nothing: the others hear of it from the server, whatever the timeout of a reduction is."""
    server, worker = start(cluster, 3, 40, "leaves", "patient", flags=("--set", "server.lease_s=2"))
    workers = [worker(rank) for rank in range(3)]
    workers[2].until(lambda: "at the gate one" in workers[2].output, "the step in which one stands still")
    frozen = workers[2 if victim == "highest" else 0]
    others = [worker for worker in workers if worker is not frozen]
    frozen.signal(signal.SIGSTOP)
    if victim == "lowest":
        (cluster.folder / "one").touch()
    for other in others:
        other.until(lambda item=other: item.events("group")[-1]["members"] == 2, "a group of those that are left")
    frozen.signal(signal.SIGCONT)
    (cluster.folder / "one").touch()
    server.until(lambda: len(server.events("admitted")) == 4, "its return")
    (cluster.folder / "two").touch()
    assert [worker.wait() for worker in (*workers, server)] == [0] * 4, "".join(worker.output for worker in workers)
    versions = versions_of(cluster)
    assert 2 in [len(version) for version in versions] and len(versions[-1]) == 3
    assert difference(cluster, versions) <= 1e-9


def test_who_dies_with_the_mean_of_a_step_that_a_snapshot_is_of_is_in_no_weights(cluster):
    """The lowest rank has stepped already, to bring weights: it goes back to its own gradient too."""
    server, worker = start(cluster, 3, 20, "dies", checkpoints=True)
    workers = [worker(rank) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, -9], workers[0].output
    assert server.wait() == 0
    versions = versions_of(cluster)
    assert [len(version) for version in versions] == [3] * 9 + [2] * 11
    assert difference(cluster, versions) <= 1e-9


@pytest.mark.timeout(300)
def test_the_job_survives_the_death_of_all_and_a_snapshot_of_sync_goes_on_in_allreduce_and_back(cluster):
    (cluster.folder / "script.py").write_text(SCRIPT)

    def begin(mode, steps, *arguments):
        server = cluster.server(
            "--mode", mode, "--workers", "2", "--steps", str(steps), "--save", "w.safetensors",
            "--checkpoint-dir", "kept", "--checkpoint-every", "5",
        )  # fmt: skip
        script = cluster.folder / "script.py"
        workers = [cluster.script(rank, script, str(cluster.folder), "steps", *arguments) for rank in range(2)]
        return [*workers, server]

    def through(mode, steps):
        processes = begin(mode, steps)
        assert [process.wait() for process in processes] == [0, 0, 0], "".join(process.output for process in processes)
        assert "optimizer_state_anew" not in "".join(process.output for process in processes)
        versions = [[(rank, number) for rank in range(2)] for number in range(1, steps + 1)]
        assert difference(cluster, versions) <= 1e-9

    through("sync", 8)
    processes = begin("allreduce", 40, "leaves")  # all but rank 2 wait in step 21 for what does not come
    for item in processes[:2]:
        item.until(lambda process=item: "at the gate two" in process.output, "the step in which all are killed")
    processes[2].until(lambda: processes[2].events("snapshot")[-1:] != [], "a snapshot")
    for item in processes:
        item.kill()
    through("sync", 30)


OTHERS = """
import sys, torch, paramserver
width, changes = int(sys.argv[1]), len(sys.argv) > 2
with paramserver.connect() as session:
    torch.manual_seed(session.rank)  # the run's weights are those of its first worker
    model = torch.nn.Linear(3, width).double()
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while not session.is_done:
        number = optimizer.progress.row.seq + 1
        if changes and number == 5:
            with torch.no_grad():
                model.weight.mul_(2)
        for p in model.parameters():
            p.grad = torch.full_like(p, session.rank + number)
        session.record(num_samples=1, loss=0.0)
        optimizer.step()
    session.finish()
"""


LOADS = """
import torch, paramserver
with paramserver.connect() as session:
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.Adam(model.parameters())
    rank = int(session.rank)
    if rank:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        inner.step()
    optimizer = session.optimizer(model, inner)
    while not session.is_done:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        session.record(num_samples=1, loss=0.0)
        optimizer.step()
"""


@pytest.mark.parametrize("flags", [[], ["--zero", "1"], ["--staleness", "1"]], ids=["plain", "zero", "staleness"])
def test_an_optimizer_that_begins_with_another_state_is_refused(cluster, flags):
    (cluster.folder / "script.py").write_text(LOADS)
    settings = {"PS_WORKER__ZERO": "1"} if "--zero" in flags else {}
    extra = flags if "--staleness" in flags else []
    server = cluster.server("--mode", "allreduce", "--workers", "2", "--steps", "5", *extra)
    first, other = (cluster.script(rank, cluster.folder / "script.py", **settings) for rank in range(2))
    assert other.wait() == 2, other.output
    assert "the optimizer of rank 1 begins with another state than that of rank 0" in other.output
    assert "Traceback" not in other.output
    assert [first.wait(), server.wait()] == [0, 0]


def test_models_that_differ_are_refused_those_that_begin_with_other_weights_have_the_first_ones(cluster):
    (cluster.folder / "script.py").write_text(OTHERS)
    script = cluster.folder / "script.py"
    server = cluster.server("--mode", "allreduce", "--workers", "2", "--steps", "8", "--save", "w.safetensors",
                            "--history", "h.jsonl")  # fmt: skip
    first = cluster.script(0, script, "2")
    first.event("tensors")  # its model is offered
    wider = cluster.script(1, script, "3")
    assert wider.wait() == 12
    assert "expected bias float64[2], got bias float64[3]" in wider.output
    changing = cluster.script(1, script, "2", "changes")
    assert changing.wait() == 2
    assert "weights of rank 1 were changed between two steps, not by its optimizer" in changing.output
    assert "Traceback" not in wider.output + changing.output
    assert [first.wait(), server.wait()] == [0, 0]
    lines = [json.loads(line) for line in (cluster.folder / "h.jsonl").read_text().splitlines()]
    versions = [line["contributions"] for line in lines if line["op"] == "commit"]
    assert [len(version) for version in versions] == [2] * 4 + [1] * 4
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    step = sum(sum(rank + number for rank, _, number in version) / len(version) for version in versions)
    expected = {name: item - 0.1 * step for name, item in model.state_dict().items()}
    got = load_file(cluster.folder / "w.safetensors")
    assert max(float((got[name] - expected[name]).abs().max()) for name in expected) <= 1e-9


UNTIL_ITS_END = """
import sys, torch, paramserver
from paramserver.tests.loopback.test_allreduce import gradients, make
model, inner = make()
with paramserver.connect() as session:
    optimizer = session.optimizer(model, inner)
    for number in range(1, 1 + int(sys.argv[1])):
        for p, gradient in zip(model.parameters(), gradients(session.rank, number)[0], strict=True):
            p.grad = gradient
        session.record(num_samples=3 + session.rank, loss=0.0)
        optimizer.step()
    session.finish()
"""


def test_a_run_of_unknown_length_uploads_its_weights_once_at_the_end(cluster):
    script = cluster.folder / "script.py"
    script.write_text(UNTIL_ITS_END)
    server = cluster.server("--mode", "allreduce", "--workers", "2", "--save", "w.safetensors", "--summary", "s.json")
    workers = [cluster.script(rank, script, "30") for rank in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0], workers[0].output
    assert server.wait() == 0
    assert difference(cluster, [[(rank, number) for rank in range(2)] for number in range(1, 31)]) <= 1e-9
    passed = json.loads((cluster.folder / "s.json").read_text())["num_bytes"]
    assert passed < 10 * sum(p.numel() * 8 for p in make()[0].parameters()), "of 30 uploads, one for each step"
