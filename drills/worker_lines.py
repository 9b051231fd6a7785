"""Checks the lines of workers against the history of their server. Pure.

- A worker sends its contributions one after another, each after the reply to the one before.
- It sent what the server took, and the server sent what it received: number, base version, samples, version, outcome.
- A contribution that it is told was applied was sent, and the server's history has its commit.
- The versions that it receives from one server never decrease.

The lines of a server and its workers may be in one file, in any order between them. A server that was killed may lack
its last lines, and a worker its last ones: a killed worker, or one whose disk is full, writes no more.
"""

from __future__ import annotations

from collections import Counter

from .history_lines import Follower, Line, Problem
from .seats import Seat, may_have
from .server_lines import Served, ServerLines

_COUNTED = ("applied", "repeated")
_AGAIN = ("REPEATED", "REJECTED")  # possible replies to a worker that asks again, which sends no contribution


def _work(line: Line) -> tuple[int | None, ...]:
    """Returns what the lines of a contribution, its worker's and the server's, must both have."""
    work = line["num_steps"], line["num_batches"]
    return line["seq"], line["base_version"], line.fields.get("samples"), line.fields.get("part", 0), *work


class _Worker(Follower):
    """One rank of one run, over all its processes."""

    def __init__(self, server: ServerLines) -> None:
        super().__init__()
        self.run: str | None = None  # from its start line on
        self._history = server
        self._seat: Seat = ("", 0, 0, 0)
        self._number: int | None = None  # contributions that count; None: unknown, as its first lines are missing
        self._waits = False  # it has sent a contribution, and received no reply
        self._num_received = 0  # replies on this seat
        self._sent: set[int] = set()
        self._sends: dict[Seat, Counter[tuple[int | None, ...]]] = {}
        self._bases: list[int] = []  # versions that it has weights of, the newest last
        self._highest: dict[int, int] = {}  # server incarnation to the highest version seen from it
        self._has_ended = False

    def feed(self, line: Line) -> None:
        self._line = line
        if line.op != "start":
            if self._number is None:
                self._report(f"rank {line['rank']}: {line.op} before its start")
                self._number = max(0, line["seq"] - 1)
            if self._has_ended:
                self._report(f"rank {line['rank']}: {line.op} after its end")
        super().feed(line)

    @property
    def _server(self) -> Served:
        return self._history.servers.get(self._seat[:2], Served())

    def _sits(self, line: Line, server: int) -> None:
        """Take a new incarnation, of a worker that starts or resumes."""
        seat = self.run or "", server, line["rank"], line["incarnation"]
        if seat != self._seat:
            self._seat, self._num_received, self._waits = seat, 0, False

    def _on_start(self, line: Line) -> None:
        rank, server = line["rank"], line["server_incarnation"]
        self.run, self._has_ended = line["run"], False
        if server < max(self._highest, default=0):
            self._report(f"rank {rank} joins server incarnation {server} after a later one")
        self._sits(line, server)
        self._received(line, "START")
        self._number, self._waits = line["seq"], False

    def _on_send(self, line: Line) -> None:
        number = line["seq"]
        self._sits(line, self._seat[1])
        if self._waits:
            self._report(f"rank {line['rank']} sends contribution {number} before a reply to the one before")
        elif self._number is not None and number != self._number + 1:
            self._report(f"rank {line['rank']} sends contribution {number}: it is at {self._number}")
        if line["base_version"] not in self._bases:
            had = ", ".join(map(str, self._bases))
            text = f"rank {line['rank']} sends contribution {number} computed on version {line['base_version']}"
            self._report(f"{text}: it had version {had}")
        self._sent.add(number)
        self._waits = True
        self._sends.setdefault(self._seat, Counter())[_work(line)] += 1

    def _on_replied(self, line: Line) -> None:
        rank, number, outcome = line["rank"], line["seq"], line["outcome"]
        self._sits(line, self._seat[1])
        if not self._waits and outcome not in _AGAIN:
            self._report(f"rank {rank} gets the reply {outcome} for contribution {number}, and has sent none")
        if outcome.lower() in _COUNTED:
            if number not in self._sent:
                self._report(f"rank {rank} is told that contribution {number} was applied, and never sent it")
            numbers = self._server.cut
            # A server that was killed, or whose disk was full, may not have written the line of this commit.
            may_be_cut = numbers is not None and number > numbers.get(rank, 0)
            if (self._seat[0], rank, number) not in self._history.ever_committed and not may_be_cut:
                message = f"rank {rank} is told that contribution {number} was applied: the server never committed it"
                self._report(message)
        self._received(line, outcome)
        self._number, self._waits = number, False

    def _on_end(self, line: Line) -> None:
        if self._waits or line["seq"] != self._number:
            due = ", and waits for a reply" if self._waits else ""
            self._report(f"rank {line['rank']} ends at contribution {line['seq']}: it is at {self._number}{due}")
        self._has_ended = True

    def _received(self, line: Line, outcome: str) -> None:
        """Compare a reply with the one that the server sent."""
        rank, version, server = line["rank"], line["version"], self._server
        sent = self._history.replies.get(self._seat, [])
        is_cut, has_weights = server.cut is not None, True
        text = f"rank {rank} received the reply {outcome} for contribution {line['seq']}, version {version}"
        if self._num_received < len(sent):
            was = sent[self._num_received]
            has_weights = was.fields.get("weights", True)
            is_version = may_have(was, version, version if is_cut else server.newest)
            if (line["seq"], outcome) != (was["seq"], was["outcome"]) or not is_version:
                theirs = f"{was['outcome']} for contribution {was['seq']}, version {was['version']}"
                self._report(f"{text}: the server sent {theirs}")
        elif not is_cut:
            self._report(f"{text}: the server never sent it")
        self._num_received += 1
        if outcome == "START":
            self._bases = [version]
        elif has_weights:
            self._bases = [*self._bases, version][-1 - server.num_late :]
        before = self._highest.get(self._seat[1], 0)
        if version < before:
            self._report(f"rank {rank} sees version {version} after version {before} of the same server")
        self._highest[self._seat[1]] = max(version, before)

    def finish(self) -> list[Problem]:
        """Returns the problems, with those of contributions that the server took and this worker did not send."""
        for seat, sends in self._sends.items():
            last = max(seq for seq, *_ in sends if seq is not None)
            for accept in self._history.accepts.get(seat, []):
                number, base, samples, _, num_steps, num_batches = work = _work(accept)
                if sends[work] > 0:
                    sends[work] -= 1
                elif accept["outcome"].lower() != "repeated" and accept["seq"] <= last:  # who asks again sends nothing
                    self._line = accept
                    text = f"of {samples} samples in {num_steps} steps and {num_batches} batches"
                    text = f"contribution {number} of rank {accept['rank']} {text}, computed on version {base}"
                    self._report(f"{text}: its worker sent no such one")
        return self.problems


def check_workers(lines: list[Line], server: ServerLines) -> list[Problem]:
    """Returns the problems of the workers' lines, given the server's."""
    workers: dict[int, _Worker] = {}
    problems: list[Problem] = []
    for line in lines:
        rank = line["rank"]
        worker = workers.get(rank)
        if worker is None or (line.op == "start" and worker.run not in (None, line["run"])):
            problems += worker.finish() if worker is not None else []
            worker = workers[rank] = _Worker(server)
        worker.feed(line)
    return problems + [problem for worker in workers.values() for problem in worker.finish()]
