"""Histories of simulated runs: the real policies are driven through joins, departures, repeats, snapshots and
restarts, and what a server and its workers would write is written."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings

from paramserver.common.registry import MODES
from paramserver.common.wire.records import Row
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Commit, Discard, Fold, Refuse, Reply
from paramserver.ps.policies.shared.decisions import Wait
from paramserver.tests.drills.histories import Line

from ..records import contribution_of

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
ALL_MODES = MODES.names()
ROUND_MODES = ("sync", "localsgd")


class Simulation:
    """A run of `mode` with up to `num_workers` ranks; `lines` is its history."""

    def __init__(self, mode: str, chance: random.Random, num_workers: int, staleness: int) -> None:
        self.mode, self.chance, self.num_workers = mode, chance, num_workers
        self.options = {"training_steps": 10_000, "staleness": staleness, "local_steps": 1}
        self.lines: list[Line] = []
        self.snapshots: list[tuple[int, dict[int, Row]]] = []
        self.being_written: list[tuple[int, dict[int, Row]]] = []
        self.incarnations: dict[int, int] = {}
        self.seated: set[int] = set()  # have joined, and have not said what they train
        self.contributed: set[int] = set()  # have contributed since they were let in
        self.computing: dict[int, int] = {}  # live ranks that compute, and the version they compute on
        self.unanswered: set[int] = set()
        self.undecided: dict[int, Line] = {}  # by rank: what is noted of a report when it is decided
        self.server_incarnation = 0
        self.start()

    def write(self, op: str, role: str = "server", **fields: Any) -> None:
        self.lines.append({"op": op, "role": role, "t": float(len(self.lines)), **fields})

    def start(self) -> None:
        self.server_incarnation += 1
        self.policy = policy_of(self.mode, self.options)
        version, rows = self.snapshots[-1] if self.snapshots else (0, {})
        if self.snapshots:
            self.policy.restore(version, rows, {})
        self.computing, self.unanswered, self.being_written, self.seated, self.undecided = {}, set(), [], set(), {}
        self.written: set[int] = set()  # versions of the snapshots since this start
        self.open: list[list[int]] = []  # accepted, and in no version: rank, incarnation, number
        self.write(
            "start", run="r", server_incarnation=self.server_incarnation, mode=self.mode,
            staleness=self.policy.staleness_bound, workers=None, version=version,
            rows={str(rank): list(row) for rank, row in rows.items()}, source="s" if self.snapshots else None,
            options=self.policy.options.model_dump(mode="json"),
            common={"training_steps": 10_000, "num_workers": None},
        )  # fmt: skip

    def sender(self, rank: int) -> Line:
        return {"rank": rank, "incarnation": self.incarnations[rank], "seq": self.policy.seq(rank)}

    def join(self, rank: int) -> None:
        self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        self.write("join", **self.sender(rank), resumed=False)
        self.seated.add(rank)

    def enter(self, rank: int) -> None:
        """A worker that has joined says what it trains, and is a member from here on."""
        self.seated.remove(rank)
        self.contributed.discard(rank)
        decisions = self.policy.joined(rank, 0.0)
        self.write("enter", **self.sender(rank))
        self.unanswered.add(rank)
        self.perform(decisions)

    def leave(self, rank: int, how: str = "closed") -> None:
        self.write("leave", rank=rank, incarnation=self.incarnations[rank], how=how)
        self.computing.pop(rank, None)
        self.undecided.pop(rank, None)
        self.unanswered.discard(rank)
        self.seated.discard(rank)
        self.perform(self.policy.left(rank, 0.0))

    def resume(self, rank: int) -> None:
        """The same process again after a lost connection; it asks for the reply it did not get."""
        self.incarnations[rank] += 1
        self.write("join", **self.sender(rank), resumed=True)
        self.policy.disconnected(rank)
        self.write("back", **self.sender(rank))
        was_lost = rank in self.computing and self.chance.random() < 0.5
        if (undecided := self.undecided.pop(rank, None)) is not None:
            self.contribute(rank, undecided["seq"], undecided["base_version"])
        elif rank in self.contributed and (was_lost or rank in self.unanswered):
            self.contribute(rank, self.policy.seq(rank), self.policy.version)
        elif rank in self.unanswered:  # it was never told where to start
            self.leave(rank, "replaced")

    def contribute(self, rank: int, seq: int, base_version: int) -> None:
        counted, version = self.policy.seq(rank), self.policy.version
        if seq != counted:  # else it asks again
            sent = {"rank": rank, "incarnation": self.incarnations[rank], "seq": seq, "base_version": base_version}
            sent |= {"num_steps": 1, "num_batches": 1}
            self.write("send", "worker", **sent)
        decisions = self.policy.contributed(rank, contribution_of(seq, base_version), 0.0)
        discarded = any(isinstance(decision, Discard) for decision in decisions)
        refused = any(isinstance(decision, Refuse) for decision in decisions)
        noted = {
            "rank": rank, "incarnation": self.incarnations[rank], "seq": seq, "base_version": base_version,
            "version": version, "num_steps": 1, "num_batches": 1,
        }  # fmt: skip
        outcome = "refused" if refused else "accepted" if not discarded else "repeated" if seq == counted else "dropped"
        if Wait(rank) in decisions:
            self.undecided[rank] = noted
        else:
            self.write("accept", **noted, outcome=outcome)
        if outcome == "accepted" and Wait(rank) not in decisions:
            self.open.append([rank, self.incarnations[rank], seq])
        if not refused:
            self.computing.pop(rank, None)
            self.unanswered.add(rank)
            if rank not in self.undecided:
                self.contributed.add(rank)
        self.perform(decisions)

    def perform(self, decisions: list[Any]) -> None:
        for decision in decisions:
            match decision:
                case Fold(rank) if rank in self.undecided:
                    noted = self.undecided.pop(rank)
                    self.write("accept", **noted, outcome="accepted")
                    self.contributed.add(rank)
                    self.open.append([rank, noted["incarnation"], noted["seq"]])
                case Discard(rank) if rank in self.undecided:
                    self.write("accept", **self.undecided.pop(rank), outcome="dropped")
                case Commit(ranks):
                    members = sorted(self.policy.committed_by or self.policy.members)
                    taken = [self.taken(rank) for rank in ranks]
                    self.write("commit", version=self.policy.version, members=members, contributions=taken)
                case Reply(rank, outcome):
                    identity = {"rank": rank, "incarnation": self.incarnations[rank]}
                    settings: Line = {
                        "seq": self.policy.seq(rank),
                        "version": self.policy.version,
                        "outcome": outcome.name,
                    }
                    self.write("reply", **identity, **settings, training_steps=self.policy.steps_done(rank))
                    if outcome.name == "START":
                        server = {"run": "r", "server_incarnation": self.server_incarnation}
                        settings = {"seq": settings["seq"], "version": settings["version"]}
                        self.write("start", "worker", **identity, **server, **settings)
                    else:
                        self.write("replied", "worker", **identity, **settings)
                    self.unanswered.discard(rank)
                    self.computing[rank] = self.policy.version

    def taken(self, rank: int) -> list[int]:
        """The rank's first contribution that is in no version yet; it is now."""
        found = next(transport for transport in self.open if transport[0] == rank)
        self.open.remove(found)
        return found

    def act(self) -> None:
        chance, live = self.chance, sorted(self.policy.members)
        computing, seated = sorted(self.computing), sorted(self.seated)
        absent = [rank for rank in range(self.num_workers) if rank not in {*live, *seated}]
        roll = chance.random()
        if seated and roll > 0.7:
            self.enter(chance.choice(seated))
        elif absent and (roll < 0.15 or not live):
            self.join(chance.choice(absent))
        elif roll < 0.20 and [*live, *seated]:
            self.leave(chance.choice([*live, *seated]))
        elif roll < 0.25 and live:
            self.resume(chance.choice(live))
        elif roll < 0.32 and self.policy.version not in [version for version, _ in self.being_written]:
            self.being_written.append((self.policy.version, dict(self.policy.committed)))
        elif roll < 0.40 and self.being_written:
            version, rows = self.being_written.pop(0)
            if version in self.written:
                return
            self.written.add(version)
            self.snapshots.append((version, rows))
            settings = {str(rank): list(row) for rank, row in rows.items()}
            self.write("snapshot", version=version, rows=settings, path="s", sha256="0")
        elif roll < 0.43 and self.snapshots:
            self.start()
        elif computing:
            rank = chance.choice(computing)
            seq, base_version = self.policy.seq(rank) + 1, self.computing[rank]
            self.contribute(rank, seq, base_version)


def simulate(mode: str, chance: random.Random, *, num_events: int = 80) -> list[Line]:
    run = Simulation(mode, chance, num_workers=chance.randint(1, 4), staleness=chance.randint(0, 2))
    for _ in range(num_events):
        run.act()
    if chance.random() < 0.5:
        rows = {str(rank): list(row) for rank, row in run.policy.committed.items()}
        run.write("end", version=run.policy.version, rows=rows)
    return run.lines


def server_segments(lines: list[Line]) -> list[range]:
    """Positions of each server start and what follows it."""
    starts = [i for i, line in enumerate(lines) if line["op"] == "start" and line["role"] == "server"]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
