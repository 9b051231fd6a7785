"""Replays a server's history and reports each broken guarantee. Pure.

The rules (I1 to I9 are the invariants of docs/robustness.md):

- Each contribution of a rank is committed once, in order, without gaps. A restart voids the commits after its snapshot.
  Workers send these contributions again, and the server commits them again (I2).
- The server's incarnation grows at every start, a rank's incarnation at every join. Contributions of an older
  incarnation do not count once a newer incarnation has joined (I1, I4).
- A snapshot has the sequence numbers committed at its version. A restart continues from the newest snapshot (I3, I5).
- Versions grow by one per commit, and no worker gets older weights than it has (I9).
- The mode's own rules (`Policy.rules`), e.g. that a round contains the live workers (I7).

A server that was killed, or whose disk was full, may lack its last lines (`_is_cut`). The replay then
trusts the snapshot of the next start, and reports no problem that only the workers' lines could prove.

After a problem the replay continues from the state in the history, so that each problem is reported once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..common.registry import MODES
from ..ps.policies.rules import Rule
from .history_lines import Follower, Line
from .lineage import Lineage, Tally

# Outcomes with which a contribution counts, and outcomes that the tally counts here.
_COUNTING = frozenset({"accepted", "skipped"})
_COUNTED = frozenset({"skipped", "repeated", "dropped", "rejected", "refused"})


@dataclass
class Member:
    """A worker that has joined. `number` counts its accepted contributions, committed or not.

    It becomes a member, for which others wait, when it has offered its model.
    """

    incarnation: int
    number: int
    joined_at: int = 0  # the newest version when it joined
    is_member: bool = False  # certainly
    is_replied: bool = False  # and so may contribute
    version: int = 0  # version of its last reply
    started_at: int | None = None  # the newest version when it got its START; None: it has none yet


class Replay(Follower):
    """Checks the server's lines: `feed` them in order, then `finish`."""

    def __init__(self, modes: Iterable[str] = (), is_relay: bool = False) -> None:
        """`is_relay`: the run above keeps the server's state, and may itself go back."""
        super().__init__(modes)
        self._is_relay = is_relay
        self.set_aside: dict[int, int] = {}  # by rank, samples in contributions that no version has or will have
        self.has_gaps = False  # lines of commits are missing
        self.unchecked_modes: dict[str, None] = {}  # modes without installed rules
        self.deleted: list[str] = []  # snapshots that somebody deleted, as sentences
        self.tally = Tally()
        self.samples: dict[tuple[int, int], int] = {}  # in accepted contributions; repeated: the newest
        self.ever_committed: set[tuple[str, int, int]] = set()  # (run, rank, number), void or not
        self.run: str | None = None
        self.server_incarnation = 0
        self.lineage = Lineage({})
        self.cut: dict[tuple[str, int], dict[int, int]] = {}  # (run, server incarnation) cut short: its numbers
        self.version = 0
        self._rules: list[Rule] = []
        self._members: dict[int, Member] = {}
        self._shifts: dict[int, int] = {}  # added to a rank's number when it is compared with another rank's
        self._ranks: set[int] = set()  # ranks that ever joined the run
        self._newest: dict[int, int] = {}  # incarnation per rank, since this start
        self._open: dict[int, dict[int, int]] = {}  # accepted, not committed: by rank, number to incarnation
        self._skipped: set[tuple[int, int]] = set()  # accepted (rank, number) without a fold
        self._may_be_open = False  # a contribution may be replied before it is committed
        self._given_up: frozenset[str] = frozenset()  # outcomes after which a contribution is in no version
        self._durable: int | None = None  # version of the newest snapshot
        self._unseen: dict[int, int] = {}  # its numbers for ranks that no line has mentioned
        self._voided: set[tuple[int, int]] = set()
        self._is_cut = False  # this server has not ended

    def feed(self, line: Line) -> None:
        if line.op == "end" and line.fields.get("begun") is False:
            return  # it was stopped while it waited for its other shards
        if self.run is None and line.op != "start":
            self._line = line
            self._report(f"{line.op} before any start")
            self.run = ""
        super().feed(line)

    def finish(self) -> Tally:
        """The counts; the run in progress is counted as it stands."""
        self._note_cut()
        if self.run is not None:
            self._close_run()
        return self.tally

    # ---- starts, snapshots, ends ----------------------------------------------------------

    def _on_start(self, line: Line) -> None:
        version, numbers = line["version"], line.seqs
        has_source = line.fields.get("source") is not None
        self._note_cut()
        if line["run"] == self.run:
            self._restarted(line, version, numbers, has_source)
        else:
            if self.run is not None:
                self._close_run()
            if not has_source and (version or any(numbers.values())):
                self._report(f"a run that begins from nothing is at version {version}, numbers {numbers}")
            self.run, self.lineage, self._voided, self._ranks = line["run"], Lineage(numbers), set(), set()
        self._durable = version if has_source and not self._is_relay else None
        self.version, self.server_incarnation = version, line["server_incarnation"]
        self._rules = self._rules_of(line.fields)
        self._members, self._newest, self._open, self._skipped = {}, {}, {}, set()
        self._shifts = line.shifts
        self._is_cut = True

    def _rules_of(self, started: dict[str, Any]) -> list[Rule]:
        """Returns the rules of the run's mode, none of a mode that is not known here."""
        mode = self._mode_of(started)
        if mode is None:
            self.unchecked_modes[started["mode"]] = None
            self._may_be_open = True
            self._given_up = frozenset({"skipped", "rejected"})
            return []
        policy = MODES.load(mode)
        self._may_be_open = policy.replies_before_commit
        # A worker that steps by itself has the steps of a dropped contribution in its next one.
        self._given_up = frozenset({"skipped", "rejected", *(() if policy.kind.worker_steps else ("dropped",))})
        return [rule(started) for rule in policy.rules]

    def _note_cut(self) -> None:
        if self._is_cut:
            self.cut[self.run or "", self.server_incarnation] = self.lineage.numbers()

    def _restarted(self, line: Line, version: int, numbers: dict[int, int], has_source: bool) -> None:
        self.tally.restarts += 1
        incarnation, newcomers = line["server_incarnation"], self._ranks
        if incarnation <= self.server_incarnation:
            self._report(f"server incarnation {incarnation} after {self.server_incarnation}: it must grow")
        if self._is_cut and has_source:
            newcomers = newcomers | set(numbers)
            self._believe(line, version, numbers)
        if version > self.version:
            self._report(f"the server starts at version {version}, but only {self.version} versions were committed")
        elif self._durable is not None and version < self._durable:
            found = line.fields.get("found")
            if isinstance(found, list) and self._durable not in found:
                self.deleted.append(
                    f"{line.file}:{line.number}: the server starts at version {version}: the newer snapshot of version "
                    f"{self._durable} was deleted, or its disk is gone, and the contributions only in it are lost"
                )
            elif not line.fields.get("skipped"):
                lost = len(self.lineage.contributions(self._durable)) - len(self.lineage.contributions(version))
                self._report(
                    f"the server starts at version {version}, but version {self._durable} was in a snapshot: "
                    f"{lost} durable contributions are lost"
                )
        differences = self.lineage.differences(version, numbers, newcomers)
        self._report(*(f"the server starts at version {version} with {text}" for text in differences))
        if version == self._durable and has_source:
            for rank in numbers.keys() & self._unseen.keys():
                self._begins(rank, numbers[rank])
        self._unseen = {}
        voided = self.lineage.roll_back(version, numbers)
        self.tally.rolled_back += len(voided)
        self._voided.update(voided)

    def _believe(self, line: Line, version: int, numbers: dict[int, int]) -> None:
        """Add the commits whose lines are missing, up to the snapshot of `version`: single contributions, or rounds."""
        if version <= self.version:
            return
        self.has_gaps = True
        known = self.lineage.numbers()
        missing = [(rank, number) for rank in known for number in range(known[rank] + 1, numbers.get(rank, 0) + 1)]
        are_single = len(missing) == version - self.version
        for index, (rank, number) in enumerate(missing, 1):
            made = self.version + (index if are_single else number - known[rank])
            self.lineage.add(rank, number, min(made, version), line.number)
            self.ever_committed.add((self.run or "", rank, number))
        self.version = version

    def _on_snapshot(self, line: Line) -> None:
        version = line["version"]
        if version > self.version:
            self._report(f"a snapshot of version {version}, but the newest version is {self.version}")
        if self._durable is not None and version < self._durable:
            self._report(f"a snapshot of version {version} after one of version {self._durable}")
        differences = self.lineage.differences(version, line.seqs, self._ranks)
        self._report(*(f"the snapshot of version {version} has {text}" for text in differences))
        self._unseen = {rank: number for rank, number in line.seqs.items() if rank not in self.lineage}
        self._durable = max(version, self._durable or 0)

    def _begins(self, rank: int, number: int) -> None:
        """A new rank begins. The newest snapshot may have its number before any line has."""
        saved = self._unseen.pop(rank, number)
        if saved != number:
            self._report(f"rank {rank} begins at number {number}, but the newest snapshot has it at {saved}")
        self.lineage.begin(rank, number)

    def _on_control(self, line: Line) -> None:
        if line["do"] != "set" or not line.fields.get("done"):
            return
        for rule in self._rules:
            rule.changed(line.fields.get("name", ""), line.fields.get("value"))

    def _on_end(self, line: Line) -> None:
        # Modes that reply before they commit may have replied to contributions that are in no version yet.
        self._is_cut = self._may_be_open and bool(self._open)
        if line["version"] != self.version:
            self._report(f"the run ends at version {line['version']}, but version {self.version} was committed last")
        differences = self.lineage.differences(self.version, line.seqs, self._ranks)
        self._report(*(f"the run ends with {text}" for text in differences))

    def _close_run(self) -> None:
        applied = self.lineage.contributions()
        self.tally.applied += len(applied)
        self.tally.lost += len(self._voided - applied)
        if self._durable is not None:
            self.tally.durable += len(self.lineage.contributions(self._durable))

    # ---- members -------------------------------------------------------------------------

    def _on_join(self, line: Line) -> None:
        rank, incarnation, number = line["rank"], line["incarnation"], line["seq"]
        newest = self._newest.get(rank)
        if newest is not None:
            self.tally.rejoins += 1
            if incarnation <= newest:
                self._report(f"rank {rank} joins as incarnation {incarnation} after {newest}: it must grow")
        self._newest[rank] = max(incarnation, newest or 0)
        self._ranks.add(rank)
        before = self._members.get(rank)
        known = self._known_number(rank)
        if known is not None and number != known:
            self._report(f"rank {rank} joins at number {number}: it is at {known}")
        if known is None and number:
            self._begins(rank, number)  # it was seated before, and died before its reply
        if not line.fields.get("resumed"):
            self._members[rank] = Member(incarnation, number, self.version)
        elif before is None:
            self._report(f"rank {rank} resumes, but was no member")
            self._members[rank] = Member(incarnation, number, is_member=True, is_replied=True, started_at=-1)
        else:
            before.incarnation, before.number = incarnation, number

    def _known_number(self, rank: int) -> int | None:
        """Returns the last accepted number of a rank, or None for a new rank."""
        if rank in self._open:
            return max(self._open[rank])
        return self.lineage.number(rank) if rank in self.lineage else None

    def _on_leave(self, line: Line) -> None:
        rank, incarnation = line["rank"], line["incarnation"]
        member = self._members.get(rank)
        if member is not None and member.incarnation == incarnation:
            if line["how"] == "finished":
                member.is_member = False
            else:
                del self._members[rank]
        elif incarnation > self._newest.get(rank, 0):
            self._report(f"rank {rank} leaves as incarnation {incarnation}, which never joined")

    # ---- contributions --------------------------------------------------------------------

    def _on_accept(self, line: Line) -> None:
        rank, number, outcome = line["rank"], line["seq"], line["outcome"].lower()
        if outcome in _COUNTED:
            setattr(self.tally, outcome, getattr(self.tally, outcome) + 1)
        if outcome == "refused":
            return
        member = self._current(line, f"{outcome} contribution {number}")
        if line["base_version"] > line["version"]:
            self._report(
                f"contribution {number} of rank {rank} has a negative staleness: computed on version "
                f"{line['base_version']}, applied at {line['version']}"
            )
        if outcome == "repeated" and number > member.number:
            self._report(
                f"contribution {number} of rank {rank} is called repeated, but rank {rank} is at {member.number}"
            )
        if outcome in _COUNTING:
            if number != member.number + 1:
                again = "again" if number <= member.number else "with a gap"
                self._report(
                    f"contribution {number} of rank {rank} is accepted {again}: rank {rank} is at {member.number}"
                )
            if not member.is_replied:
                self._report(
                    f"contribution {number} of rank {rank} is accepted before the reply to {member.number} was sent"
                )
            self._report(*(rule.counted(rank, number, line["base_version"], self.version) for rule in self._rules))
            member.number, member.is_member, member.is_replied = number, True, False
            self._open.setdefault(rank, {})[number] = line["incarnation"]
        if outcome == "accepted":
            self.samples[rank, number] = line.fields.get("samples") or 0
        elif outcome == "skipped":
            self._skipped.add((rank, number))
        if outcome in self._given_up:
            self.set_aside[rank] = self.set_aside.get(rank, 0) + (line.fields.get("samples") or 0)

    def _on_commit(self, line: Line) -> None:
        version, members = line["version"], set(line["members"])
        if version != self.version + 1:
            self._report(f"version {version} is committed after version {self.version}")
        self.version = version
        certain = {rank for rank, member in self._members.items() if member.is_member}
        if not certain <= members <= set(self._members):
            self._report(f"version {version} names the members {sorted(members)}, but live are {sorted(certain)}")
        for rank in members & set(self._members):
            self._members[rank].is_member = True
        for rank, incarnation, number in line["contributions"]:
            if self._close(rank, number) != incarnation:
                self._report(
                    f"version {version} holds rank {rank} incarnation {incarnation} contribution {number}, which was "
                    "not accepted before"
                )
            self.ever_committed.add((self.run or "", rank, number))
        folded = {(rank, number) for rank, _, number in line["contributions"]}
        skipped = {item for item in self._skipped if self._close(*item) is not None}
        self._skipped.clear()
        for rank, number in sorted(folded | skipped):
            problem = self.lineage.add(rank, number, version, line.number, is_skipped=(rank, number) in skipped)
            if problem and (rank, number) in folded:
                self._report(problem)
        if self._open:
            left = [
                f"contribution {number} of rank {rank}" for rank in sorted(self._open) for number in self._open[rank]
            ]
            self._report(f"version {version} leaves out contributions that were accepted before: {', '.join(left)}")
            self._open.clear()
        waiting = {rank for rank, member in self._members.items() if member.started_at is None}
        missing = sorted(members - waiting - {rank for rank, _ in folded | skipped})
        num_contributions = len(line["contributions"]) + len(skipped)
        self._report(*(rule.committed(version, num_contributions, missing) for rule in self._rules))

    def _close(self, rank: int, number: int) -> int | None:
        """Returns the incarnation of an accepted contribution that is in a version now, None if it was not accepted."""
        numbers = self._open.get(rank, {})
        incarnation = numbers.pop(number, None)
        if not numbers:
            self._open.pop(rank, None)
        return incarnation

    def _on_reply(self, line: Line) -> None:
        rank, number, version = line["rank"], line["seq"], line["version"]
        member = self._current(line, f"replied for contribution {number}")
        if self._known_number(rank) is None:
            self._begin_rank(rank, number, member.joined_at)
            member.number = number
        member.is_member = True
        if number != member.number:
            self._report(f"rank {rank} gets its reply for contribution {number}: it is at {member.number}")
        if rank in self._open and not self._may_be_open:
            self._report(f"rank {rank} gets its reply for contribution {number}, which is not committed")
        least = max(member.version, self.lineage.version(rank))
        if not least <= version <= self.version:
            self._report(
                f"rank {rank} is given version {version}: it has seen or made {least}, the newest is {self.version}"
            )
        ahead = self._compared(rank) - min(self._compared(other) for other, it in self._members.items() if it.is_member)
        if not line.fields.get("last"):  # a worker without further steps does not block the others
            self._report(*(rule.replied(rank, ahead) for rule in self._rules))
        if member.started_at is None:
            member.started_at = self.version
        member.version, member.is_replied = version, True

    def _compared(self, rank: int) -> int:
        return self._members[rank].number + self._shifts.get(rank, 0)

    def _begin_rank(self, rank: int, number: int, joined_at: int) -> None:
        """A new rank starts at the slowest member's number, so that it does not repeat what the others have done."""
        # The number is that of the moment when the rank offered its model, which the history does not have. Slower ones
        # may have entered between that moment and its START, so those that got their START since its join are left out.
        since = [
            self._compared(other) for other, member in self._members.items()
            if member.is_member and other != rank and (member.started_at is None or member.started_at < joined_at)
        ]  # fmt: skip
        slowest = min(since, default=None)
        begins_late = any(rule.begins_late for rule in self._rules)
        if slowest is not None and number > slowest and not begins_late:
            self._report(f"rank {rank} is new and begins at number {number}; the slowest is at {slowest}")
        self._begins(rank, number)

    def _current(self, line: Line, text: str) -> Member:
        """Returns the live worker of a line. Reports a worker that is no member or has an older incarnation."""
        rank, incarnation = line["rank"], line["incarnation"]
        member = self._members.get(rank)
        if member is None:
            self._report(f"rank {rank} {text}, but is no member")
            member = self._members[rank] = Member(
                incarnation, self._known_number(rank) or 0, is_replied=True, started_at=-1
            )
        elif incarnation != member.incarnation:
            self._report(
                f"rank {rank} {text} as incarnation {incarnation}; incarnation {member.incarnation} has joined since"
            )
        return member
