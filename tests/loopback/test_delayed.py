"""Means that are outstanding among all-reduce peers, as real processes: the weights are those of delayed SGD, from a
reference of a few lines, whoever is killed meanwhile; and the history says how late each gradient was."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from .test_allreduce import killed_and_back

pytestmark = pytest.mark.slow

K = 2
SCRIPT = """
import pathlib, sys, time, torch, paramserver
from paramserver.tests.loopback.test_delayed import gradients, make
folder, kind, gates = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
model, inner = make(kind)
with paramserver.connect() as session:
    optimizer = session.optimizer(model, inner)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 7, 0.9) if "schedule" in gates else None
    if "evaluates" in gates:
        session.evaluate(lambda model: {"norm": sum(float(p.norm()) for p in model.parameters())}, every=5)
    while not session.is_done:
        number = optimizer.progress.next_number
        at = {11: "one", 21: "two"}.get(number) if "leaves" in gates else None
        if at == "one" and session.rank == 2 or at == "two" and session.rank != 2:
            print("at the gate", at, flush=True)
            while not (folder / at).exists():
                time.sleep(0.01)
        for p, gradient in zip(model.parameters(), gradients(session.rank, number, model), strict=True):
            p.grad = gradient
        session.record(num_samples=3 + session.rank, loss=0.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    session.finish()
"""


def make(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Linear(20, 3)).double()
    settings = {"sgd": {}, "momentum": {"momentum": 0.9}, "adam": {}}[kind]
    return model, (torch.optim.Adam if kind == "adam" else torch.optim.SGD)(model.parameters(), lr=0.01, **settings)


def gradients(rank, number, model):
    """Of a rank's contribution; they hang on the weights that it is computed on."""
    chance = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(p.shape, generator=chance, dtype=p.dtype) + 0.3 * p.detach() for p in model.parameters()]


def alone(kind, versions, has_schedule=False):
    """Delayed SGD: version v + 1 is made of these contributions, (rank, number, base), each of which is a gradient on
    the weights of version `base`."""
    model, optimizer = make(kind)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9) if has_schedule else None
    kept = [[p.detach().clone() for p in model.parameters()]]
    for contributions in versions:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank, number, base in contributions:
            then = make(kind)[0]
            for p, weight in zip(then.parameters(), kept[base], strict=True):
                p.data.copy_(weight)
            for item, gradient in zip(sums, gradients(rank, number, then), strict=True):
                item.add_(gradient, alpha=(3 + rank) / sum(3 + other for other, _, _ in contributions))
        for p, mean in zip(model.parameters(), sums, strict=True):
            p.grad = mean
        optimizer.step()
        if schedule is not None:
            schedule.step()
        kept.append([p.detach().clone() for p in model.parameters()])
    return model.state_dict()


def start(cluster, num_workers, steps, *arguments):
    (cluster.folder / "script.py").write_text(SCRIPT)
    server = cluster.server(
        "--mode", "allreduce", "--staleness", str(K), "--workers", str(num_workers), "--steps", str(steps),
        "--save", "w.safetensors", "--history", "h.jsonl", "--summary", "s.json",
        "--checkpoint-dir", "kept", "--checkpoint-every", "5",
    )  # fmt: skip
    script = cluster.folder / "script.py"
    return server, lambda rank: cluster.script(rank, script, str(cluster.folder), *arguments)


def versions_of(cluster):
    """As the history has them; `ps-launch check` finds nothing wrong with it."""
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    lines = [json.loads(line) for line in (cluster.folder / "h.jsonl").read_text().splitlines()]
    accepted = [line for line in lines if line["op"] == "accept" and line["outcome"] == "accepted"]
    bases = {(line["rank"], line["seq"]): line["base_version"] for line in accepted}
    commits = [line["contributions"] for line in lines if line["op"] == "commit"]
    return [[(rank, number, bases[rank, number]) for rank, _, number in commit] for commit in commits]


def difference(cluster, expected):
    got = load_file(cluster.folder / "w.safetensors")
    return max(float((got[key] - expected[key]).abs().max()) for key in expected)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("sgd", "momentum")), "adam"]
)
def test_it_is_delayed_sgd(cluster, kind):
    has_schedule = kind == "momentum"
    more = ["schedule"] if has_schedule else ["evaluates"]
    server, worker = start(cluster, 2, 40, kind, *more)
    workers = [worker(rank) for rank in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0], workers[0].output + workers[1].output
    assert server.wait() == 0
    versions = versions_of(cluster)
    assert versions == [[(rank, t, max(0, t - 1 - K)) for rank in range(2)] for t in range(1, 41)]
    assert difference(cluster, alone(kind, versions, has_schedule)) <= 1e-9
    result = json.loads((cluster.folder / "s.json").read_text())
    assert result["staleness_bound"] == K
    assert {worker["staleness_max"] for worker in result["workers"]} == {K}


def test_one_is_killed_with_means_outstanding_and_comes_back(cluster):
    """The others average again what they hold; who comes is given the weights, and the means that are outstanding."""
    server, worker = start(cluster, 3, 40, "adam", "leaves")
    killed_and_back(cluster, server, worker)  # the others have handed over K more each
    versions = versions_of(cluster)
    assert len(versions) == 40
    assert {len(version) for version in versions} == {2, 3}
    first = next(index for index, version in enumerate(versions, 1) if len(version) == 2)
    assert 11 - K <= first <= 11
    assert difference(cluster, alone("adam", versions)) <= 1e-9
    number = {rank: [t for version in versions for r, t, _ in version if r == rank] for rank in range(3)}
    assert all(
        found == list(range(1, 41)) for rank, found in number.items() if rank != 2
    )  # nothing lost, nothing twice
    assert number[2] == list(range(1, len(number[2]) + 1))


def test_a_run_goes_on_from_its_snapshot(cluster):
    """A snapshot has all means up to its version: nothing is outstanding in it."""
    server, worker = start(cluster, 2, 40, "adam", "leaves")  # all wait in step 21 for what does not come
    workers = [worker(rank) for rank in range(2)]
    for item in workers:
        item.until(lambda process=item: "at the gate two" in process.output, "the step in which all are killed")
    server.until(lambda: server.events("snapshot")[-1:] != [], "a snapshot")
    for item in (*workers, server):
        item.kill()
    server, worker = start(cluster, 2, 30, "adam")
    workers = [worker(rank) for rank in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0], workers[0].output
    assert server.wait() == 0
    assert "optimizer_state_anew" not in workers[0].output
    lines = [json.loads(line) for line in (cluster.folder / "h.jsonl").read_text().splitlines()]
    begun = [line["version"] for line in lines if line["op"] == "start"][-1]
    assert begun >= 5
    bases = [max(0, t - 1 - K) for t in range(1, begun + 1)] + [max(begun, t - 1 - K) for t in range(begun + 1, 31)]
    versions = [[(rank, t, base) for rank in range(2)] for t, base in enumerate(bases, 1)]
    assert difference(cluster, alone("adam", versions)) <= 1e-9
