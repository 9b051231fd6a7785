"""Follows a server's history and reports each broken guarantee. Pure.

The rules (I1 to I9 are the invariants of docs/robustness.md):

- Each contribution of a rank is committed once, in order, without gaps. A restart voids the commits after its snapshot.
  Workers send these contributions again, and the server commits them again (I2).
- The server's incarnation grows at every start, a rank's incarnation at every join. Contributions of an older
  incarnation do not count once a newer incarnation has joined (I1, I4).
- A snapshot has the sequence numbers committed at its version. A restart continues from the newest snapshot (I3, I5).
- Versions grow by one per commit, and no worker gets older weights than it has (I9).
- The mode's own rules (`Policy.rules`), e.g. that a round contains the live workers (I7).

A server that was killed, or whose disk was full, may lack its last lines (`_is_cut`). The check then
trusts the snapshot of the next start, and reports no problem that only the workers' lines could prove.

After a problem the check continues from the state in the history, so that each problem is reported once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from operator import itemgetter
from typing import Any, NamedTuple

from ..common.registry import MODES
from ..ps.policies.base import Common
from ..ps.policies.rules import Rule
from .history_lines import Line, shown
from .lineage import Lineage
from .seats import Seats

_MAX_TEXT = 200
_MAX_MISSING = 1_000_000  # contributions whose lines a killed server may lack


class Served(NamedTuple):
    """A start of the server that is over, as the lines of its workers are compared with it."""

    newest: int = 0  # version
    num_late: int = 0  # replies that may come while a worker computes
    cut: dict[int, int] | None = None  # numbers by rank, where its last lines may be missing


class ServerLines(Seats):
    """Checks the server's lines: `feed` them in order, then `finish`."""

    def __init__(self, modes: Iterable[str] = (), keeps_state: bool = True) -> None:
        """`keeps_state`: otherwise another run keeps the server's state, and may itself go back."""
        super().__init__(modes)
        self._keeps_state = keeps_state
        self.has_gaps = False  # lines of commits are missing
        self.unchecked_modes: dict[str, None] = {}  # modes without installed rules
        self.deleted: list[str] = []  # snapshots that somebody deleted, as sentences
        self.ever_committed: set[tuple[str, int, int]] = set()  # (run, rank, number), void or not
        self.servers: dict[tuple[str, int], Served] = {}  # by run and server incarnation
        self._durable: int | None = None  # version of the newest snapshot
        self._snapshots: set[int] = set()  # versions of the snapshots since this start
        self._voided: set[tuple[int, int]] = set()
        self._is_cut = False  # this server has not ended
        self._has_ended = False

    def feed(self, line: Line) -> None:
        if line.op == "end" and line.fields.get("begun") is False:
            return  # it was stopped while it waited for its other shards
        self._line = line
        if self.run is None and line.op != "start":
            self._report(f"{line.op} before any start")
            self.run = ""
        if self._has_ended and line.op != "start":
            self._report(f"{line.op} after the run's end")
        super().feed(line)

    def finish(self) -> None:
        """Count the run in progress as it stands."""
        self._note()
        self._close_run()

    # ---- starts, snapshots, ends ----------------------------------------------------------

    def _on_start(self, line: Line) -> None:
        version, numbers = line["version"], line.seqs
        has_source = line.fields.get("source") is not None
        self._note()
        if line["run"] == self.run:
            self._restarted(line, version, numbers, has_source)
        else:
            self._close_run()
            if not has_source and (version or any(numbers.values())):
                self._report(f"a run that begins from nothing is at version {version}, numbers {numbers}")
            self.run, self.lineage, self._voided = line["run"], Lineage(numbers), set()
            self.samples, self.set_aside, self._once_finished = {}, {}, set()
        self._durable = version if has_source and self._keeps_state else None
        self.version, self.server_incarnation = version, line["server_incarnation"]
        self._finished = set(self._once_finished)
        self._starts({rank: row.steps for rank, row in line.rows.items() if has_source and rank not in self._finished})
        self._rules = self._rules_of(line.fields)
        self._snapshots, self._has_ended, self._is_cut = set(), False, True

    def _rules_of(self, started: dict[str, Any]) -> list[Rule]:
        """Returns the rules of the run's mode, none of a mode that is not known here."""
        mode, self._policy = self._mode_of(started), None
        if mode is None:
            self.unchecked_modes[started["mode"]] = None
            return []
        kind = MODES.load(mode)
        known, common = {field.name for field in fields(Common)}, started.get("common", {})
        try:
            options = kind.Options.model_validate({**started["options"]})
            self._policy = kind(Common(**{name: value for name, value in common.items() if name in known}), options)
        except (ValueError, TypeError) as error:  # also pydantic's
            text = " ".join(str(error).split())[:_MAX_TEXT]
            self._report(f"mode {mode} cannot have these options, so its rules are not checked: {text}")
            return []
        options_now, bound = options.model_dump(mode="json"), self._policy.staleness_bound
        if started["options"] != options_now:
            missing = sorted({*options_now} - {*started["options"]})
            self._report(f"mode {mode} has other options than these: {', '.join(missing) or 'another form of a value'}")
        elif "staleness" in started and started["staleness"] != bound:
            self._report(f"mode {mode} with these options bounds the staleness to {bound}, not {started['staleness']}")
        if "num_workers" in common and common["num_workers"] != started.get("workers"):
            self._report(f"a run of {started.get('workers')} workers, whose mode has {common['num_workers']}")
        return [rule({**started, "options": {**options_now, **started["options"]}}) for rule in kind.rules]

    def _note(self) -> None:
        """Keep what is compared with the workers' lines, of a server that writes no more."""
        numbers = self.lineage.numbers() if self._is_cut else None
        num_late = 0 if self._policy is None else self._policy.num_in_flight
        self.servers[self.run or "", self.server_incarnation] = Served(self.version, num_late, numbers)

    def _restarted(self, line: Line, version: int, numbers: dict[int, int], has_source: bool) -> None:
        self.tally.restarts += 1
        incarnation = line["server_incarnation"]
        if incarnation <= self.server_incarnation:
            self._report(f"server incarnation {incarnation} after {self.server_incarnation}: it must grow")
        if self._is_cut and has_source:
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
                text = f"version {self._durable} was in a snapshot: {lost} durable contributions are lost"
                self._report(f"the server starts at version {version}, but {text}")
        self._compare(f"the server starts at version {version} with", version, numbers)
        voided = self.lineage.roll_back(version, numbers)
        self.tally.rolled_back += len(voided)
        self._voided.update(voided)

    def _believe(self, line: Line, version: int, numbers: dict[int, int]) -> None:
        """Add the ranks and the commits whose lines are missing, up to the snapshot of `version`.

        The commits are of single contributions, or of rounds.
        """
        for rank in numbers:
            self.lineage.begin(rank)
        if version <= self.version:
            return
        self.has_gaps = True
        known = {rank: self.lineage.number(rank) for rank in numbers}
        num_missing = sum(max(0, numbers.get(rank, 0) - number) for rank, number in known.items())
        if num_missing > _MAX_MISSING:
            self._report(f"the server starts with {num_missing:,} contributions that no line has")
            return
        missing = [(rank, number) for rank in known for number in range(known[rank] + 1, numbers.get(rank, 0) + 1)]
        are_single = len(missing) == version - self.version
        for index, (rank, number) in enumerate(missing, 1):
            made = self.version + (index if are_single else number - known[rank])
            self.lineage.add(rank, number, min(made, version), line.number)
            self.ever_committed.add((line["run"], rank, number))
        self.version = version

    def _on_snapshot(self, line: Line) -> None:
        version = line["version"]
        if version > self.version:
            self._report(f"a snapshot of version {version}, but the newest version is {self.version}")
        if self._durable is not None and version < self._durable:
            self._report(f"a snapshot of version {version} after one of version {self._durable}")
        if version in self._snapshots:
            self._report(f"a second snapshot of version {version}")
        self._snapshots.add(version)
        self._compare(f"the snapshot of version {version} has", version, line.seqs)
        self._durable = max(version, self._durable or 0)

    def _on_control(self, line: Line) -> None:
        if line["do"] != "set" or not line.fields.get("done"):
            return
        name, value = line.fields.get("name"), line.fields.get("value")
        if self._policy is None or name not in self._policy.changeable:
            return
        try:
            self._policy.options.model_validate({**self._policy.options.model_dump(), name: value})
        except ValueError:
            self._report(f"{name} was set to {shown(value)}, which it cannot be")
            return
        for rule in self._rules:
            rule.changed(name, value)

    def _on_end(self, line: Line) -> None:
        # Modes that reply before they commit may have replied to contributions that are in no version yet.
        may_be_open = self._policy is None or self._policy.replies_before_commit
        self._is_cut, self._has_ended = may_be_open and bool(self._open), True
        if line["version"] != self.version:
            self._report(f"the run ends at version {line['version']}, but version {self.version} was committed last")
        self._compare("the run ends with", self.version, line.seqs)
        if line.fields.get("over"):
            self._report(*(f"the run is over, and rank {rank} has not left" for rank in sorted(self._members)))

    def _compare(self, text: str, version: int, numbers: dict[int, int]) -> None:
        """Report how the numbers of a line differ from the commits up to a version."""
        self._report(*(f"{text} {difference}" for difference in self.lineage.differences(version, numbers)))

    def _close_run(self) -> None:
        """Count the contributions of the run that is followed."""
        applied = self.lineage.contributions()
        self.tally.applied += len(applied)
        self.tally.lost += len(self._voided - applied)
        if self._durable is not None:
            self.tally.durable += len(self.lineage.contributions(self._durable))

    # ---- versions -----------------------------------------------------------------------

    def _on_commit(self, line: Line) -> None:
        version, members = line["version"], set(line["members"])
        if version != self.version + 1:
            self._report(f"version {version} is committed after version {self.version}")
        self.version = version
        live = {rank for rank, member in self._members.items() if member.is_member}
        waiting = {rank for rank, member in self._members.items() if member.pending == "START"}
        if not live - waiting <= members <= live:  # a mode may let a worker wait that enters during a round
            self._report(f"version {version} names the members {sorted(members)}, but live are {sorted(live)}")
        for rank, incarnation, number in line["contributions"]:
            if self._open.pop((rank, number), None) != incarnation:
                text = f"rank {rank} incarnation {incarnation} contribution {number}"
                self._report(f"version {version} holds {text}, which was not accepted before")
            self.ever_committed.add((self.run or "", rank, number))
        folded = {(rank, number) for rank, _, number in line["contributions"]}
        skipped = {item for item in self._skipped if self._open.pop(item, None) is not None}
        self._skipped.clear()
        self._close_round()
        for rank, number in sorted(folded | skipped):
            problem = self.lineage.add(rank, number, version, line.number, is_skipped=(rank, number) in skipped)
            if problem and (rank, number) in folded:
                self._report(problem)
        if self._open:
            left = [f"contribution {number} of rank {rank}" for rank, number in sorted(self._open, key=itemgetter(0))]
            self._report(f"version {version} leaves out contributions that were accepted before: {', '.join(left)}")
            self._open.clear()
        missing = sorted(members - waiting - {rank for rank, _ in folded | skipped})
        num_contributions = len(line["contributions"]) + len(skipped)
        samples = sum(1 if (new := self.samples.get(item)) is None else new for item in folded)
        if line.fields.get("samples", samples) != samples:
            self._report(f"version {version} is made of {line['samples']} samples: its contributions have {samples}")
        if not num_contributions:
            self._report(f"version {version} has no contribution")
        self._report(*(rule.committed(version, num_contributions, missing) for rule in self._rules))
