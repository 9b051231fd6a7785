"""What the newest weights hold: which contribution of which rank went in with which version; and counts. Pure.

A server that goes back to a snapshot takes the commits after it out again; they must be redone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class _Rank:
    """Commits of one rank, in order; `first` is the number it began at, with nothing of its own.

    Steps that were skipped (store.on_nonfinite) count, and nothing of them is in the version.
    """

    first: int
    numbers: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)

    def number_at(self, version: int) -> int:
        count = bisect_right(self.versions, version)
        return self.numbers[count - 1] if count else self.first


@dataclass
class Tally:
    """Counts of a history, over all runs in it."""

    applied: int = 0  # contributions in the final weights
    repeated: int = 0
    skipped: int = 0
    dropped: int = 0
    rejected: int = 0
    refused: int = 0
    rolled_back: int = 0  # contributions that a restart of the server took out
    restarts: int = 0  # of the server
    rejoins: int = 0
    durable: int = 0  # contributions in the newest snapshot
    lost: int = 0  # taken out by a restart and not made again


class Lineage:
    """Begins with a snapshot's numbers, or with nothing."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self._ranks = {rank: _Rank(number) for rank, number in numbers.items()}

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def begin(self, rank: int, number: int) -> None:
        """A rank that was never here starts at `number`."""
        self._ranks.setdefault(rank, _Rank(number))

    def add(self, rank: int, number: int, version: int, line: int, *, is_skipped: bool = False) -> str | None:
        """A commit, or a contribution that was skipped in it; says what is wrong with it."""
        own = self._ranks.setdefault(rank, _Rank(max(0, number - 1)))
        last = own.numbers[-1] if own.numbers else own.first
        problem = None
        if number <= last:
            at = f" on line {own.lines[own.numbers.index(number)]}" if number in own.numbers else ""
            problem = (
                f"contribution {number} of rank {rank} is committed again: it was{at}, and rank {rank} is at {last}"
            )
        elif number > last + 1:
            problem = (
                f"contribution {number} of rank {rank} is committed after {last}: {number - last - 1} between are lost"
            )
        own.numbers.append(number)
        own.versions.append(version)
        own.lines.append(line)
        if is_skipped:
            own.skipped.add(number)
        return problem

    def number(self, rank: int) -> int:
        """Of the last commit; 0 for a rank that was never here."""
        own = self._ranks.get(rank)
        return 0 if own is None else own.numbers[-1] if own.numbers else own.first

    def version(self, rank: int) -> int:
        """The version that the rank's last commit made; 0 without one."""
        own = self._ranks.get(rank)
        return own.versions[-1] if own is not None and own.versions else 0

    def numbers(self) -> dict[int, int]:
        return {rank: self.number(rank) for rank in self._ranks}

    def differences(self, version: int, numbers: dict[int, int], newcomers: set[int]) -> list[str]:
        """How `numbers` differ from what was committed up to `version`; a rank without commits may be left out,
        and `newcomers` have none."""
        found = []
        for rank in sorted({*numbers, *self._ranks}):
            own, told = self._ranks.get(rank), numbers.get(rank)
            if own is None:
                if rank not in newcomers:
                    found.append(f"rank {rank} at number {told}, it was never here")
                continue
            committed = own.number_at(version)
            if told != committed and not (told is None and committed == own.first):
                found.append(f"rank {rank} at number {told}, committed were {committed}")
        return found

    def roll_back(self, version: int, numbers: dict[int, int]) -> list[tuple[int, int]]:
        """Forget what came after `version`, where the numbers were these: its (rank, number)."""
        voided: list[tuple[int, int]] = []
        for rank, own in list(self._ranks.items()):
            kept = bisect_right(own.versions, version)
            voided += [(rank, number) for number in own.numbers[kept:] if number not in own.skipped]
            own.skipped.intersection_update(own.numbers[:kept])
            del own.numbers[kept:], own.versions[kept:], own.lines[kept:]
            if not kept and rank not in numbers:
                del self._ranks[rank]
        for rank, number in numbers.items():
            self.begin(rank, number)
        return voided

    def contributions(self, version: int | None = None) -> set[tuple[int, int]]:
        """The (rank, number) in the weights of `version`, the newest by default."""
        return {
            (rank, number)
            for rank, own in self._ranks.items()
            for number in (own.numbers if version is None else own.numbers[: bisect_right(own.versions, version)])
            if number not in own.skipped
        }

    def sizes(self) -> dict[int, int]:
        """How many contributions each version holds."""
        return Counter(
            version
            for own in self._ranks.values()
            for number, version in zip(own.numbers, own.versions, strict=True)
            if number not in own.skipped
        )
