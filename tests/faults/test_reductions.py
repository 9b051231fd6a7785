"""Workers of allreduce are killed in the middle of reductions, one after the other, and come back: the others take the
step once more without them, nothing is lost and nothing counts twice, which the weights prove."""

from __future__ import annotations

import json
import random
from statistics import median

import pytest
from safetensors.torch import load_file

from paramserver.tests.faults.scripts.reducing import LR, MOMENTUM, direction, slope

SEED = 13
RANKS = range(3)


def steps_of(folder, rank: int) -> list[tuple[float, float]]:
    """When each began and ended."""
    text = (folder / f"steps.{rank}").read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # what follows the last line's end is still being written
    return [(float(began), float(ended)) for began, ended in map(str.split, lines)]


def stalls(folder, dead_at: float, victim: int) -> list[float]:
    """Of the others: from the death to the end of the step that they were in, s."""
    steps = [item for rank in RANKS if rank != victim for item in steps_of(folder, rank)]
    return [ended - dead_at for began, ended in steps if began <= dead_at <= ended]


def have_gone_on(folder, dead_at: float, victim: int) -> bool:
    """All others have taken a step since."""
    last = [steps_of(folder, rank)[-1:] for rank in RANKS if rank != victim]
    return all(value and value[0][0] > dead_at for value in last)


@pytest.mark.timeout(1800)
@pytest.mark.campaign
@pytest.mark.parametrize("num_kills", [2, 50])
def test_who_is_killed_in_a_reduction_costs_the_others_the_reduction_and_nothing_else(cluster, metric, num_kills):
    chance, folder = random.Random(SEED), cluster.folder
    server = cluster.server(
        "--mode", "allreduce", "--workers", "3", "--save", "w.safetensors", "--history", "h.jsonl", "--steps", "1000000"
    )
    script = cluster.scripts.parents[1] / "faults" / "scripts" / "reducing.py"
    workers = [cluster.script(rank, script, str(folder)) for rank in RANKS]
    server.event("training_started")
    found = []
    for number in range(num_kills):
        # All are in one group: then whoever is killed has others that wait for it.
        workers[0].until(lambda: all(_members(worker) == 3 for worker in workers), "a group of all")
        victim = chance.choice(RANKS)
        dead = folder / f"dead.{number}"
        draft = folder / "draft"
        draft.write_text(f"{victim} {chance.random()}")
        draft.rename(folder / f"kill.{number}")
        server.until(dead.exists, f"death of rank {victim}")
        workers[victim].popen.wait()
        dead_at = float(dead.read_text())
        server.until(lambda victim=victim, at=dead_at: have_gone_on(folder, at, victim), "next step of the others")
        found += stalls(folder, dead_at, victim)
        workers[victim] = cluster.script(victim, script, str(folder))
    workers[0].until(lambda: all(_members(worker) == 3 for worker in workers), "a group of all")
    (folder / "enough").touch()
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, 0, 0], "\n".join(
        worker.output for worker in workers
    )
    check = cluster.command("launch", "check", "h.jsonl")
    assert check.returncode == 0, check.stdout + check.stderr
    lines = [json.loads(line) for line in (folder / "h.jsonl").read_text().splitlines()]
    at = speed = 0.0
    versions = [line["contributions"] for line in lines if line["op"] == "commit"]
    for contributions in versions:
        slopes = [slope(rank, number) for rank, _, number in contributions]
        mean = sum(item * weight for item, weight in slopes) / sum(weight for _, weight in slopes)
        speed = MOMENTUM * speed + mean
        at -= LR * speed
    (weights,) = load_file(folder / "w.safetensors").values()
    assert float((weights - at * direction()).abs().max()) <= 1e-9, f"seed {SEED}"
    metric("their stall, s: median, worst", (round(median(found or [0]), 3), round(max(found, default=0), 3)))
    assert max(found, default=0) < 10  # by an error, not by a timeout, which is 30 s


def _members(worker) -> int:
    groups = worker.events("group")
    return groups[-1]["members"] if groups and worker.popen.poll() is None else 0
