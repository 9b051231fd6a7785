"""Histories of simulated runs: the real run goes through joins, departures, repeats, controls, snapshots and restarts,
and what a server and its workers would write is written."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings

from paramserver.common.registry import MODES
from paramserver.ps.core import effects, events
from paramserver.ps.observe.history import line_of
from paramserver.tests.drills.histories import Line
from paramserver.tests.records import contributed
from paramserver.tests.scenarios.telling import make_run
from paramserver.tests.simulate.histories import run_started

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
ALL_MODES = MODES.names()


@dataclass
class Worker:
    """What a rank's newest process knows."""

    incarnation: int = 0
    num_processes: int = 0  # of the rank
    state: str = "gone"  # joining, waiting (for a reply), computing
    has_started: bool = False
    counted: int = 0  # its contributions that count
    sent: int = 0  # number of the newest one
    base: int = 0  # its version
    version: int = 0  # of its weights
    generation: int = 0  # of its group


class Simulation:
    """A run of `mode` with up to `num_workers` ranks; `lines` is its history."""

    def __init__(self, mode: str, chance: random.Random, num_workers: int, staleness: int) -> None:
        self.chance = chance
        self.settings = {"mode": mode, "training_steps": 10_000, "staleness": staleness, "local_steps": 1}
        self.settings |= {"keeps_snapshots": True, "every_steps": 1}
        self.lines: list[Line] = []
        self.snapshots: list[effects.TakeSnapshot] = []
        self.workers = [Worker() for _ in range(num_workers)]
        self.start()

    def write(self, role: str, op: str, fields: dict[str, Any]) -> None:
        line = {"op": op, "role": role, "t": float(len(self.lines)), **fields}
        self.lines.append(json.loads(json.dumps(line)))  # no line shares a part with another

    def start(self) -> None:
        """The server starts, from its newest snapshot if there is one. A history lacks a mode's own state."""
        run = make_run(self.settings, "r")
        version, saved = 0, {}
        if self.snapshots:
            version, saved = self.snapshots[-1].version, self.snapshots[-1].saved
            before = {"server_incarnation": self.run.incarnation, "policy": {}}
            run.restore(version, ("model", "sgd"), {**saved, **before})
        self.run, self.being_written = run, list[effects.TakeSnapshot]()
        for worker in self.workers:
            worker.state = "gone"
        started = run_started(run, version, dict(run.policy.committed), "s" if saved else None)
        self.write("server", *line_of(started))

    def happens(self, event: events.Event) -> None:
        found = self.run.apply(event)
        for effect in found:
            if isinstance(effect, effects.Fact) and (line := line_of(effect))[0]:
                self.write("server", *line)
            match effect:
                case effects.Seated(_, rank, incarnation, is_resumed, counted):
                    worker = self.workers[rank]
                    worker.incarnation, worker.counted = incarnation, counted
                    worker.state = worker.state if is_resumed else "joining"
                case effects.SendReply():
                    self.replied(effect)
                case effects.TakeSnapshot():
                    self.being_written.append(effect)
        for effect in found:
            match effect:
                case effects.AskForWeights(rank, incarnation):
                    self.happens(events.Brought(rank, incarnation))
                case effects.Refuse(rank, incarnation) if incarnation == self.workers[rank].incarnation:
                    self.workers[rank].state = "gone"

    def replied(self, effect: effects.SendReply) -> None:
        worker, result, group = self.workers[effect.rank], effect.reply.result, effect.reply.group
        worker.state, worker.counted, worker.version = "computing", result.seq, result.version
        worker.generation = group.generation if group is not None else 0
        line = {"rank": effect.rank, "incarnation": effect.incarnation, "seq": result.seq, "version": result.version}
        if effect.is_start:
            worker.has_started = True
            self.write("worker", "start", {**line, "run": "r", "server_incarnation": self.run.incarnation})
        else:
            self.write("worker", "replied", {**line, "outcome": result.outcome.name})

    def join(self, rank: int) -> None:
        """A new process asks for the rank."""
        worker = self.workers[rank]
        worker.num_processes, worker.state = worker.num_processes + 1, "gone"  # until it is seated
        worker.has_started, worker.sent = False, 0
        self.happens(events.Joined(len(self.lines), rank, process=f"{rank}-{worker.num_processes}"))

    def offer(self, rank: int) -> None:
        """A worker that has joined says what it trains, and is a member from here on."""
        if self.workers[rank].state == "joining":
            self.workers[rank].state = "waiting"
        self.happens(events.Offered(rank, self.workers[rank].incarnation, "model", "sgd"))

    def leave(self, rank: int) -> None:
        self.workers[rank].state = "gone"
        self.happens(events.Left(rank, self.workers[rank].incarnation))

    def resume(self, rank: int) -> None:
        """The same process again after a lost connection; it asks for the reply it did not get."""
        worker = self.workers[rank]
        if not worker.has_started:  # it was never told where to start
            self.join(rank)
            return
        process, server = f"{rank}-{worker.num_processes}", self.run.incarnation
        self.happens(events.Joined(len(self.lines), rank, "r", worker.incarnation, server, process))
        self.offer(rank)
        was_lost = worker.state == "computing" and self.chance.random() < 0.5
        if worker.state == "waiting" and worker.sent > worker.counted:
            self.contribute(rank, worker.base)
        elif worker.sent == worker.counted > 0 and (was_lost or worker.state == "waiting"):
            worker.state = "waiting"
            self.happens(events.AskedAgain(rank, worker.incarnation, worker.counted))

    def contribute(self, rank: int, base: int) -> None:
        worker = self.workers[rank]
        worker.state, worker.sent, worker.base = "waiting", worker.counted + 1, base
        seat = {"rank": rank, "incarnation": worker.incarnation}
        line = {**seat, "seq": worker.sent, "base_version": base, "num_steps": 1, "num_batches": 1, "samples": 1}
        self.write("worker", "send", line)
        self.happens(contributed(*seat.values(), worker.sent, base, generation=worker.generation))

    def store(self) -> None:
        snapshot = self.being_written.pop(0)
        self.snapshots.append(snapshot)
        self.write("server", *line_of(effects.SnapshotTaken(snapshot.version, snapshot.saved["rows"], "s", "0")))
        self.happens(events.Stored(snapshot.attempt, snapshot.version))

    def act(self) -> None:
        chance, ranks = self.chance, range(len(self.workers))
        states = {state: [rank for rank in ranks if self.workers[rank].state == state] for state in _STATES}
        gone, joining, computing = states["gone"], states["joining"], states["computing"]
        live = sorted([*states["waiting"], *computing])
        roll = chance.random()
        if joining and roll > 0.7:
            self.offer(chance.choice(joining))
        elif gone and (roll < 0.15 or not live):
            self.join(chance.choice(gone))
        elif roll < 0.20 and [*live, *joining]:
            self.leave(chance.choice([*live, *joining]))
        elif roll < 0.25 and live:
            self.resume(chance.choice(live))
        elif roll < 0.40 and self.being_written:
            self.store()
        elif 0.40 <= roll < 0.43 and self.snapshots:
            self.start()
        elif 0.43 <= roll < 0.46:
            control, rank, change = chance.choice(_CONTROLS), chance.choice(ranks), chance.choice(_CHANGES)
            self.happens(events.Controlled(control, rank, *(change if control == "set" else ())))
        elif computing:
            rank = chance.choice(computing)
            self.contribute(rank, self.workers[rank].version)


_STATES = ("gone", "joining", "waiting", "computing")
_CONTROLS = ("pause", "resume", "evict", "set", "snapshot")
_CHANGES = [("lr_scale", 0.5), ("staleness", 2), ("buffer", 1), ("straggler_timeout_s", 0.5), ("backup_workers", 1)]


def simulate(mode: str, chance: random.Random, *, num_events: int = 80) -> list[Line]:
    simulation = Simulation(mode, chance, num_workers=chance.randint(1, 4), staleness=chance.randint(0, 2))
    for _ in range(num_events):
        simulation.act()
    if chance.random() < 0.5:
        policy = simulation.run.policy
        simulation.write("server", *line_of(effects.RunEnded(policy.version, dict(policy.committed))))
    return simulation.lines


def server_segments(lines: list[Line]) -> list[range]:
    """Positions of each server start and what follows it."""
    starts = [i for i, line in enumerate(lines) if line["op"] == "start" and line["role"] == "server"]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
