"""Follows the workers of a server in its history: who joins, contributes, gets a reply and leaves. Pure.

- A rank's incarnation grows at every join. An older incarnation does not count once a newer one has joined (I1, I4).
- A worker that has joined is a member, for which others wait, once it enters. A new rank starts at the number of the
  slowest member, so that it does not repeat what the others have done.
- Each reply is the only one to a contribution or a join, has its outcome, and the newest version.
- A contribution that counts is the rank's next one, after the reply to the one before. The rank had the weights that it
  was computed on.
- A worker leaves in good order once it has had every reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..ps.policies.base import Policy
from ..ps.policies.rules import Rule
from .history_lines import Follower, Line
from .lineage import Lineage, Tally

# Outcomes with which a contribution counts, and outcomes that the tally counts here.
_COUNTING = frozenset({"accepted", "skipped"})
_COUNTED = frozenset({"skipped", "repeated", "dropped", "rejected", "refused"})
# The reply that an accept line leads to. The reply to a skipped contribution, and to its repeats, is REJECTED.
_REPLY = {
    "accepted": "APPLIED", "skipped": "APPLIED", "repeated": "REPEATED", "dropped": "DROPPED", "rejected": "REJECTED",
}  # fmt: skip
_SENT_AGAIN = ("DROPPED", "REJECTED")  # a worker that lost such a reply sends the contribution again
Seat = tuple[str, int, int, int]  # run, server incarnation, rank, incarnation


def may_have(reply: Line, version: int, newest: int) -> bool:
    """Whether the weights of a reply may be of this version, where `newest` is the newest.

    With a reply codec they may be of an older one, its `reference`, and those of a large model of a `newer` one.
    """
    if (reference := reply.fields.get("reference")) is not None:
        return bool(version == reference)
    is_newer = reply.fields.get("newer", False) and reply["version"] < version <= newest
    return bool(version == reply["version"] or is_newer)


@dataclass
class Member:
    """A worker that has joined. `number` counts its accepted contributions, committed or not."""

    incarnation: int
    number: int
    is_member: bool = False  # it has entered, and has not finished
    pending: str | None = "START"  # outcome of the reply that is due; None: it computes
    is_back: bool = False  # has resumed since it contributed
    is_through: bool = False  # its newest reply grants no steps
    bases: list[Line] | None = field(default_factory=list)  # replies with weights, the newest last; None: unknown


class Seats(Follower):
    """The workers of the server that is followed. A subclass follows the versions."""

    def __init__(self, modes: Iterable[str] = ()) -> None:
        super().__init__(modes)
        self.run: str | None = None
        self.server_incarnation = 0
        self.version = 0
        self.tally = Tally()
        self.lineage = Lineage({})
        self.samples: dict[tuple[int, int], int] = {}  # in accepted contributions; repeated: the newest
        self.set_aside: dict[int, int] = {}  # by rank, samples in contributions that no version has or will have
        self.accepts: dict[Seat, list[Line]] = {}
        self.replies: dict[Seat, list[Line]] = {}
        self._rules: list[Rule] = []
        self._policy: Policy | None = None  # a fresh one of the run's mode; None: it is not known here
        self._finished: set[int] = set()  # ranks that rounds go on without; after a restart: perhaps
        self._once_finished: set[int] = set()  # in this run; a snapshot may be of a time when they had
        self._starts({})

    def _starts(self, steps: dict[int, int]) -> None:
        """Begin with the empty state of a server that starts."""
        self._members: dict[int, Member] = {}
        self._steps = steps  # by rank: training steps that count; absent: not known yet
        self._steps_of_round: dict[int, int] = {}  # by rank, of what counts with the open round
        self._newest: dict[int, int] = {}  # incarnation per rank
        self._open: dict[tuple[int, int], int] = {}  # accepted, not committed: (rank, number) to incarnation
        self._skipped: set[tuple[int, int]] = set()  # accepted (rank, number) without a fold
        self._empty: set[int] = set()  # ranks whose newest contribution was skipped

    # ---- joins and departures ------------------------------------------------------------

    def _on_join(self, line: Line) -> None:
        rank, incarnation, number = line["rank"], line["incarnation"], line["seq"]
        newest = self._newest.get(rank)
        if newest is not None:
            self.tally.rejoins += 1
            if incarnation <= newest:
                self._report(f"rank {rank} joins as incarnation {incarnation} after {newest}: it must grow")
        self._newest[rank] = max(incarnation, newest or 0)
        before = self._members.get(rank)
        known = self._known_number(rank)
        if number != known:
            self._report(f"rank {rank} joins at number {number}: it is at {known}")
        if not line.fields.get("resumed"):
            if before is not None:
                self._report(f"rank {rank} joins anew, but incarnation {before.incarnation} has not left")
            self._members[rank] = Member(incarnation, number)
        elif before is None:
            self._report(f"rank {rank} resumes, but was no member")
            self._members[rank] = self._unknown(incarnation, number)
        else:
            before.incarnation, before.number, before.is_back = incarnation, number, True
            if not before.bases:  # its START was lost: it goes on with weights that it had as an earlier member
                before.bases = None

    @staticmethod
    def _unknown(incarnation: int, number: int) -> Member:
        """A member after a problem: nothing else of it is reported that follows from that problem."""
        return Member(incarnation, number, is_member=True, pending=None, bases=None)

    def _known_number(self, rank: int) -> int:
        """Returns the last accepted number of a rank."""
        return max((number for of, number in self._open if of == rank), default=self.lineage.number(rank))

    def _on_enter(self, line: Line) -> None:
        rank, number = line["rank"], line["seq"]
        member = self._current(line, "enters")
        if member.is_member:
            self._report(f"rank {rank} enters, and is a member already")
        if number != (known := self._known_number(rank)):
            self._report(f"rank {rank} enters at number {number}: it is at {known}")
        if rank in self._steps:
            self._finished.discard(rank)
        elif rank not in self._finished and (steps := self._steps_of_members()):
            self._steps[rank] = min(steps)
        self.lineage.begin(rank)
        member.number, member.is_member = number, True

    def _on_leave(self, line: Line) -> None:
        rank, incarnation, how = line["rank"], line["incarnation"], line["how"]
        member = self._members.get(rank)
        if member is None or member.incarnation != incarnation:
            now = "it is no member" if member is None else f"incarnation {member.incarnation} has joined since"
            self._report(f"rank {rank} leaves as incarnation {incarnation}: {now}")
            return
        has_finished = line.fields.get("finished") and how != "finished"
        if member.pending is not None and has_finished:
            due = f"its reply to {member.number} ({member.pending})"
            self._report(f"rank {rank} has finished, and {due} was never sent")
        if how == "finished":
            member.is_member = False
            self._finished.add(rank)
            self._once_finished.add(rank)
        else:
            del self._members[rank]

    # ---- contributions --------------------------------------------------------------------

    def _on_accept(self, line: Line) -> None:
        rank, number, outcome = line["rank"], line["seq"], line["outcome"].lower()
        if outcome in _COUNTED:
            setattr(self.tally, outcome, getattr(self.tally, outcome) + 1)
        base, version = line["base_version"], line["version"]
        if version != self.version:
            self._report(f"contribution {number} of rank {rank} is taken at version {version}: it is {self.version}")
        if outcome == "refused":
            return
        if outcome not in _REPLY:
            self._report(f"contribution {number} of rank {rank} has the outcome '{outcome}', which does not exist")
            return
        member = self._current(line, f"{outcome} contribution {number}")
        samples = line.fields.get("samples")
        self.accepts.setdefault(self._seat(line), []).append(line)
        self._check_number(rank, number, outcome, member)
        self._check_base(rank, number, base, outcome, member)
        if outcome in _COUNTING:
            self._count(line, member, number, outcome)
        member.pending, member.is_back = _REPLY[outcome], False
        if outcome == "accepted" and samples is not None:
            self.samples[rank, number] = samples
        if outcome == "skipped":
            self._skipped.add((rank, number))
        # A worker that steps by itself has the steps of a dropped contribution in its next one.
        is_dropped = outcome == "dropped" and self._policy is not None and not self._policy.kind.worker_steps
        if is_dropped or outcome in ("skipped", "rejected"):
            self.set_aside[rank] = self.set_aside.get(rank, 0) + (samples or 0)

    def _count(self, line: Line, member: Member, number: int, outcome: str) -> None:
        rank, base = line["rank"], line["base_version"]
        if member.is_through and not line.fields.get("part"):  # a later part of a step may follow
            self._report(f"contribution {number} of rank {rank} comes after a reply that grants it no steps")
        self._report(*(rule.counted(rank, number, base, self.version) for rule in self._rules))
        member.number, member.is_member = number, True
        if self._policy is not None and self._policy.has_rounds:
            self._steps_of_round[rank] = line["num_steps"]
        elif rank in self._steps:
            self._steps[rank] += line["num_steps"]
        self._open[rank, number] = line["incarnation"]
        (self._empty.add if outcome == "skipped" else self._empty.discard)(rank)

    def _check_number(self, rank: int, number: int, outcome: str, member: Member) -> None:
        """Check the number of a contribution: the rank's next one, or one that counts already."""
        text = f"contribution {number} of rank {rank}"
        if outcome == "repeated":
            if number != member.number:
                self._report(f"{text} is called repeated, but rank {rank} is at {member.number}")
            return
        if outcome == "rejected" and number == member.number:
            return  # it counts already, and has come again
        if number != member.number + 1:
            how = "again" if number <= member.number else "with a gap"
            self._report(f"{text} is {outcome} {how}: rank {rank} is at {member.number}")
        comes_again = member.is_back and member.pending in _SENT_AGAIN
        if member.pending is not None and not comes_again:
            self._report(f"{text} is {outcome} before the reply to {member.number} was sent ({member.pending})")

    def _check_base(self, rank: int, number: int, base: int, outcome: str, member: Member) -> None:
        """Check that the worker had the version that it computed on. A worker that asks again names the newest."""
        if member.bases is None or (outcome == "repeated" and base == self.version):
            return
        if self._policy is not None and self._policy.num_in_flight and not self._policy.kind.has_payload:
            return  # it goes on without the newest means
        if not any(may_have(reply, base, self.version) for reply in member.bases):
            had = ", ".join(str(reply["version"]) for reply in member.bases)
            had = f"had version {had}" if had else "had no weights"
            self._report(f"contribution {number} of rank {rank} was computed on version {base}: rank {rank} {had}")

    # ---- replies --------------------------------------------------------------------------

    def _on_reply(self, line: Line) -> None:
        rank, number, version, outcome = line["rank"], line["seq"], line["version"], line["outcome"]
        member = self._current(line, f"replied for contribution {number}")
        self.replies.setdefault(self._seat(line), []).append(line)
        if outcome == "START" and not member.is_member:
            self._report(f"rank {rank} gets its START, and has not entered")
            member.is_member = True
        # A new rank begins at the steps of the slowest member, so that it does not repeat what the others have done.
        steps, known = line["training_steps"], self._steps.get(rank)
        self._steps[rank] = steps
        self._finished.discard(rank)
        if self._policy is not None and known not in (None, steps):
            self._report(f"rank {rank} goes on at training step {steps}: its contributions have {known}")
        if number != member.number:
            self._report(f"rank {rank} gets its reply for contribution {number}: it is at {member.number}")
        self._check_reply(rank, number, outcome, member)
        if version != self.version:
            self._report(f"rank {rank} is given version {version}: the newest is {self.version}")
        if (reference := line.fields.get("reference")) is not None and reference >= version:
            self._report(f"rank {rank} is given version {version} with older weights, of version {reference}")
        ahead = steps - min(self._steps_of_members(), default=steps)
        if not line.fields.get("last"):  # a worker without further steps does not block the others
            self._report(*(rule.replied(rank, ahead) for rule in self._rules))
        member.pending, member.is_through = None, bool(line.fields.get("last"))
        if self._policy is None:
            member.bases = None
        elif outcome == "START" or member.bases is None:
            member.bases = [line]
        elif line.fields.get("weights", True):
            member.bases = [*member.bases, line][-1 - self._policy.num_in_flight :]

    def _check_reply(self, rank: int, number: int, outcome: str, member: Member) -> None:
        due = member.pending
        if rank in self._empty and due in ("APPLIED", "REPEATED"):
            due = "REJECTED"
        if outcome != due and member.bases is not None:
            expected = "no reply is due" if due is None else f"{due} is due"
            self._report(f"rank {rank} gets the reply {outcome} for contribution {number}: {expected}")
        may_be_open = self._policy is None or self._policy.replies_before_commit
        if not may_be_open and any(of == rank for of, _ in self._open):
            self._report(f"rank {rank} gets its reply for contribution {number}, which is not committed")

    def _steps_of_members(self) -> list[int]:
        return [self._steps[rank] for rank, it in self._members.items() if it.is_member and rank in self._steps]

    def _close_round(self) -> None:
        """Count the steps of a round. A rank that missed it goes on where the others are."""
        steps, found = self._steps, self._steps_of_round
        for rank in found.keys() & steps.keys():
            steps[rank] += found[rank]
        newest = max((steps[rank] for rank in found.keys() & steps.keys()), default=0)
        for rank in steps.keys() - found.keys() - self._finished:
            steps[rank] = max(steps[rank], newest)
        found.clear()

    def _seat(self, line: Line) -> Seat:
        return self.run or "", self.server_incarnation, line["rank"], line["incarnation"]

    def _current(self, line: Line, text: str) -> Member:
        """Returns the live worker of a line. Reports a worker that is no member or has an older incarnation."""
        rank, incarnation = line["rank"], line["incarnation"]
        member = self._members.get(rank)
        if member is None:
            self._report(f"rank {rank} {text}, but is no member")
            member = self._members[rank] = self._unknown(incarnation, self._known_number(rank))
        elif incarnation != member.incarnation:
            since = f"incarnation {member.incarnation} has joined since"
            self._report(f"rank {rank} {text} as incarnation {incarnation}; {since}")
        return member
