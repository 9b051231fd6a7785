"""The server is killed when it is idle, in the middle of a commit or of a snapshot, and started again; or frozen."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch

PADDING = 1_000_000  # floats: a snapshot of 4 MB, which takes longer to write than a step to make
STEPS = 100


class Killer:
    """Kills the server of a job at chosen moments, starts it again on the same port, and looks at what it did."""

    def __init__(self, job, mode: str, num_workers: int, steps: int, padding: int, seed: int, pause_s: float) -> None:
        self.job = job
        self.random = random.Random(seed)
        self.snapshots: Path = job.folder / "snapshots"
        self.arguments = (mode, num_workers, steps, "--checkpoint-dir", "snapshots", "--checkpoint-every", "2")
        self.arguments += ("--set", "checkpoint.keep=1000")  # what was loaded is looked at later
        self.server = job.serve(*self.arguments)
        self.workers = [job.work(rank, pause_s, padding) for rank in range(num_workers)]
        self.back: list[float] = []  # seconds from listening to the first worker that is let in

    def kill(self, moment: str) -> None:
        """Kill at an "idle", "commit", "snapshot" or "random" moment, and start again."""
        history = self.job.history
        snapshots = len(history.lines("snapshot"))
        self.job.until(lambda: len(history.lines("snapshot")) > snapshots, "snapshot")
        getattr(self, f"_{moment}")()
        self.server.signal(signal.SIGKILL)
        self.server.popen.wait()
        newest, num_starts = history.lines("snapshot")[-1], len(history.lines("start"))
        self.server = self.job.serve(*self.arguments, "--listen", self.job.address)
        self.job.until(lambda: len(history.lines("start")) > num_starts, "start")
        start = history.lines("start")[-1]
        assert start["version"] >= newest["version"], "something durable is lost"
        self._check_files(Path(start["source"]), newest)
        self.job.until(lambda: self._let_in(start["t"]), "worker that is let in")
        self.back.append(self._let_in(start["t"])[0]["t"] - start["t"])

    def _let_in(self, since: float) -> list[dict]:
        return [line for line in self.job.history.lines("reply", outcome="START") if line["t"] > since]

    def _check_files(self, path: Path, newest: dict) -> None:
        """What was loaded has the hash that its manifest, and where it got that far the history, says."""
        path = self.job.folder / path
        found = hashlib.sha256((path / "weights.safetensors").read_bytes()).hexdigest()
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["files"]["weights.safetensors"]["sha256"] == found
        if Path(newest["path"]).name == path.name:
            assert newest["sha256"] == found

    # ---- moments ----------------------------------------------------------------------------

    def _idle(self) -> None:
        for worker in self.workers:
            worker.signal(signal.SIGSTOP)
        time.sleep(0.3)
        for worker in self.workers:
            worker.signal(signal.SIGCONT)

    def _commit(self) -> None:
        """Right after a commit was decided: its tensor work is under way."""
        commits = len(self.job.history.lines("commit"))
        deadline = time.monotonic() + 10
        while len(self.job.history.lines("commit")) == commits:
            assert time.monotonic() < deadline

    def _snapshot(self) -> None:
        """While its files are being written."""
        deadline = time.monotonic() + 10
        while not any(self.snapshots.glob(".writing-*")):
            assert time.monotonic() < deadline

    def _random(self) -> None:
        time.sleep(self.random.uniform(0.0, 0.3))

    def end(self, metric) -> None:
        """The run ends well, with everything applied once."""
        self.job.end(*self.workers, self.server)
        metric("listening to first worker let in, median and max s", (statistics.median(self.back), max(self.back)))
        starts = self.job.history.lines("start")
        assert [line["server_incarnation"] for line in starts] == list(range(1, len(starts) + 1))
        self.job.check()


def test_a_server_killed_in_the_middle_of_things_loses_nothing_durable(job, metric):
    killer = Killer(job, "async", 1, STEPS, PADDING, seed=0, pause_s=0.05)
    killer.kill("idle")
    killer.kill("commit")
    killer.kill("snapshot")
    killer.end(metric)
    assert torch.equal(job.applied(), torch.ones(1, STEPS))
    assert max(killer.back) <= 3.0


@pytest.mark.parametrize(("mode", "seed"), [("async", 11), ("sync", 12), ("ssp", 13)])
@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_many_kills_at_random_moments(job, metric, mode, seed):
    steps, kinds = 400, ["commit", "snapshot", "random", "random", "idle", "random", "snapshot"]
    killer = Killer(job, mode, 2, steps, PADDING, seed, pause_s=0.05)
    for number in range(7):
        killer.kill(kinds[number])
    killer.end(metric)
    share = 0.5 if mode == "sync" else 1.0
    assert torch.equal(job.applied(), torch.full((2, steps), share)), f"seed {seed}"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.campaign
def test_a_server_frozen_for_two_leases_lets_nobody_go(job, mode):
    server = job.serve(mode, 2, 200)
    workers = [job.work(rank, 0.03) for rank in range(2)]
    job.until(lambda: all(job.history.last_step(rank) >= 5 for rank in range(2)), "first steps")
    server.signal(signal.SIGSTOP)
    stopped = time.time()
    time.sleep(10.0)  # two default leases
    server.signal(signal.SIGCONT)
    continued = time.monotonic()
    for worker in workers:
        assert worker.event("connection_lost")["timestamp"] - stopped <= 6.0
    job.until(lambda: job.history.commits_of({0, 1})[-1] > continued, "commit")
    job.end(*workers, server)
    assert job.history.ends_of(0) == job.history.ends_of(1) == ["goodbye"]
    job.check()
    assert torch.equal(job.applied(), torch.full((2, 200), 0.5 if mode == "sync" else 1.0))
