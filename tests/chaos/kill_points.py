"""Kills processes of real jobs at seeded moments, a thousand times, and proves after each job that nothing
durable was lost and nothing applied twice.

    python tests/chaos/kill_points.py --points 1000 --seed 1
    python tests/chaos/kill_points.py --points 300 --shards 3

Half of the moments are random, the others follow a line of the history at once: a contribution was sent,
accepted, committed or replied, a snapshot was written, a worker has joined. Snapshots are taken several times
a second, so many points fall into one. Before each kill the job must have gone on after the one before.
With shards any of them is killed, stands still, loses its connection to the coordinator for less or for more than
the lease, or cannot write for a while.

Jobs are short, their modes and transports take turns, and each begins with a seed of its own: what failed is
run again with `--seed SEED --jobs 1`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from paramserver.common.registry import MODES
from paramserver.drills.chaos.faults import Injector
from paramserver.drills.chaos.job import Chaos
from paramserver.drills.chaos.plan import OF_SHARDS as PLAN_OF_SHARDS
from paramserver.drills.chaos.plan import Fault
from paramserver.drills.chaos.trial import TRANSPORTS, judge, make_setup

NUM_WORKERS = 3
STEPS, STEPS_WITH_SHARDS = 700, 400  # shards go back together, which takes longer
LAST_STEPS = 200  # without a kill
MOMENTS = ("send", "accept", "commit", "reply", "replied", "snapshot", "join", "leave")
# How often each happens. A third of the kills are the server's: everybody waits for it.
OF_ONE = {"kill_worker": 65, "kill_server": 35}
OF_SHARDS = {
    "kill_worker": 35, "kill_server": 15, "kill_shard": 25,
    "freeze_server": 5, "freeze_shard": 5, "reset_link": 5, "part_link": 5, "full_disk": 5,
}  # fmt: skip
LEASE_S = 2.0
JOB_S = 1200.0  # it is done in about a minute on two quiet cores


class History:
    """The lines of a history file as they are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.num_commits = 0

    def news(self) -> list[str]:
        """Operations since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                found.append(json.loads(line)["op"])
            except ValueError:  # half a line, of a process that was killed
                continue
        self.num_commits += found.count("commit")
        return found


class KillPoints(Chaos):
    """Kills for as long as the job runs, instead of a plan."""

    num_shards = 1

    async def _inject(self, injector: Injector) -> None:
        await self._begun.wait()
        chance, num_shards = random.Random(self._setup.seed), self.num_shards
        shares = OF_SHARDS if num_shards > 1 else OF_ONE
        history = History(self._setup.folder / "history.jsonl")
        while self._fastest_step() < self._setup.last_step:
            await self._until_it_goes_on(history)
            await self._moment(chance, history)
            kind = chance.choices(list(shares), list(shares.values()))[0]
            fault = make_fault(kind, chance, num_shards)
            num_killed = len(injector.killed)
            injector.inject(fault)
            if not kind.startswith("kill") or len(injector.killed) > num_killed:
                self._ending.faults[kind] += 1

    async def _until_it_goes_on(self, history: History) -> None:
        history.news()
        before = history.num_commits
        while history.num_commits < before + 3:
            await asyncio.sleep(0.005)
            history.news()

    async def _moment(self, chance: random.Random, history: History) -> None:
        awaited = chance.choice(MOMENTS) if chance.random() < 0.5 else None
        if awaited is None:
            await asyncio.sleep(chance.uniform(0, 0.4))
            return
        end = time.monotonic() + 0.5
        while awaited not in history.news() and time.monotonic() < end:
            await asyncio.sleep(0.0005)
        await asyncio.sleep(chance.choice([0, chance.uniform(0, 0.005)]))


def make_fault(kind: str, chance: random.Random, num_shards: int) -> Fault:
    """To whom, and for how long."""
    if kind == "kill_worker":
        return Fault(0, kind, chance.randrange(NUM_WORKERS))
    shard = chance.randrange(1, num_shards) if kind in PLAN_OF_SHARDS else None
    lasts = not kind.startswith(("kill", "reset"))
    leases = chance.choice([chance.uniform(0.1, 0.6), chance.uniform(1.3, 2.0)])
    return Fault(0, kind, None, leases * LEASE_S if lasts else 0.0, shard)


def run_job(seed: int, num_shards: int, is_quiet: bool) -> tuple[Counter[str], list[str]]:
    """One job; the points it gave by kind, and what is wrong."""
    modes = MODES.names()
    mode, transport = modes[seed % len(modes)], list(TRANSPORTS)[seed // len(modes) % 3]
    steps = STEPS_WITH_SHARDS if num_shards > 1 else STEPS
    folder = Path(tempfile.mkdtemp(prefix="ps-kill-points-"))
    chosen = {
        "run.workers": NUM_WORKERS, "run.mode": mode, "run.steps": steps, "policy.local_steps": 2,
        "worker.transports": TRANSPORTS[transport], "task.args": "{padding_bytes: 1000000}",
        "slowdown.base_s": 0.01, "slowdown.jitter_s": 0.01, "checkpoint.every_s": 0.2, "launch.max_restarts": 10_000,
        "server.shards": num_shards, "server.lease_s": LEASE_S,
    }  # fmt: skip
    setup = make_setup(None, chosen, [], folder=folder, seconds=JOB_S, seed=seed, kinds=["kill_server"])
    setup = replace(setup, plan=[], last_step=steps - LAST_STEPS, most_cut_bytes=1, deadline_s=JOB_S)
    began = time.monotonic()

    def say(text: str) -> None:
        if not is_quiet:
            print(f"{time.monotonic() - began:7.2f} s  {text}", flush=True)

    async def run():
        job = KillPoints(setup, say)
        job.num_shards = num_shards
        return await job.run()

    ending = asyncio.run(run())
    if ending.signal_number:
        shutil.rmtree(folder)
        sys.exit(128 + ending.signal_number)
    failures = judge(ending, setup)
    points = sum(ending.faults.values())
    took_s = time.monotonic() - began
    of = f", {num_shards} shards" if num_shards > 1 else ""
    ending_word = "FAILED" if failures else "ok"
    print(f"seed {seed}: {mode}, {transport}{of}: {points} points in {took_s:.0f} s: {ending_word}", flush=True)
    for failure in failures:
        print(f"  {failure}\n  kept in {folder}")
    if not failures:
        shutil.rmtree(folder)
    return ending.faults, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--points", type=int, default=1000, help="kills in all")
    parser.add_argument("--jobs", type=int, help="stop after so many jobs")
    parser.add_argument("--seed", type=int, default=1, help="of the first job; the next has the next")
    parser.add_argument("--shards", type=int, default=1, help="server processes of each job")
    parser.add_argument("--quiet", action="store_true", help="only a line per job")
    options = parser.parse_args()
    began = time.monotonic()
    points: Counter[str] = Counter()
    failed: list[int] = []
    seed = options.seed
    while points.total() < options.points and (options.jobs is None or seed - options.seed < options.jobs):
        made, failures = run_job(seed, options.shards, options.quiet)
        points += made
        if failures:
            failed.append(seed)
        seed += 1
    parts = ", ".join(f"{count} {kind}" for kind, count in sorted(points.items()))
    took_s = time.monotonic() - began
    print(f"{points.total()} points ({parts}) in {seed - options.seed} jobs, {took_s / 60:.1f} min; ", end="")
    print(f"failed: seed {', '.join(map(str, failed))}" if failed else "nothing durable lost, nothing applied twice")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
