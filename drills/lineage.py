"""Records which contributions of each rank are in each version, and counts them. Pure.

A server that goes back to a snapshot removes later commits. Workers must make these contributions again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple


class _Commit(NamedTuple):
    """A commit of one rank, or a skipped contribution (store.on_nonfinite): it counts, but no version contains it."""

    version: int
    number: int
    line: int
    is_skipped: bool


def _count(title: str) -> int:
    return field(default=0, metadata={"title": title})


@dataclass
class Tally:
    """Counts over all runs in a history. Each field has its title in tables."""

    applied: int = _count("applied")
    repeated: int = _count("repeated (replied, not applied)")
    skipped: int = _count("skipped (counted, nothing folded)")
    dropped: int = _count("dropped (came after their round)")
    rejected: int = _count("rejected (not finite)")
    refused: int = _count("refused")
    restarts: int = _count("restarts of the server")
    rolled_back: int = _count("rolled back by them")
    lost: int = _count("of these not made again")
    rejoins: int = _count("rejoins of workers")
    durable: int = _count("durable (in the newest snapshot)")


class Lineage:
    """The commits of a run after a snapshot, which has `numbers` by rank."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self._first = dict(numbers)  # by rank: its initial number, which has no commit here
        self._commits: defaultdict[int, list[_Commit]] = defaultdict(list)  # by rank, in order

    def begin(self, rank: int) -> None:
        """A new rank begins, whose first contribution is number 1."""
        self._first.setdefault(rank, 0)

    def add(self, rank: int, number: int, version: int, line: int, *, is_skipped: bool = False) -> str | None:
        """Add a commit, or a contribution that was skipped in it. Returns its problem as a sentence, if any."""
        self.begin(rank)
        last, problem = self.number(rank), None
        if number <= last:
            lines = (f" on line {commit.line}" for commit in self._commits[rank] if commit.number == number)
            problem = f"is committed again: it was{next(lines, '')}, and rank {rank} is at {last}"
        elif number > last + 1:
            problem = f"is committed after {last}: the {number - last - 1} between them are lost"
        self._commits[rank].append(_Commit(version, number, line, is_skipped))
        return problem and f"contribution {number} of rank {rank} {problem}"

    def _up_to(self, rank: int, version: int | None) -> list[_Commit]:
        """Returns the commits of a rank up to a version; None: all."""
        commits = self._commits[rank]
        return commits if version is None else commits[: bisect_right(commits, version, key=attrgetter("version"))]

    def number(self, rank: int, version: int | None = None) -> int:
        """Returns the number of the last commit, up to a version if one is given; 0 for an unknown rank."""
        commits = self._up_to(rank, version)
        return commits[-1].number if commits else self._first.get(rank, 0)

    def numbers(self) -> dict[int, int]:
        """Returns the number of the last commit by rank."""
        return {rank: self.number(rank) for rank in self._first}

    def differences(self, version: int, numbers: dict[int, int]) -> list[str]:
        """Returns how `numbers` differ from the commits up to `version`, as phrases. Ranks without commits may lack."""
        found = []
        for rank in sorted({*numbers, *self._first}):
            number, committed = numbers.get(rank), self.number(rank, version)
            if rank not in self._first:
                found.append(f"rank {rank} at number {number}, it never joined")
            elif number != committed and not (number is None and committed == self._first[rank]):
                found.append(f"rank {rank} at number {number}, committed were {committed}")
        return found

    def roll_back(self, version: int, numbers: dict[int, int]) -> list[tuple[int, int]]:
        """Remove the commits after `version` with its `numbers`, and return their (rank, number)."""
        voided: list[tuple[int, int]] = []
        for rank in list(self._first):
            commits, kept = self._commits[rank], self._up_to(rank, version)
            voided += [(rank, commit.number) for commit in commits[len(kept) :] if not commit.is_skipped]
            self._commits[rank] = kept
            if not kept and rank not in numbers:
                del self._first[rank]
        self._first = {**numbers, **self._first}
        return voided

    def contributions(self, version: int | None = None) -> set[tuple[int, int]]:
        """Returns the (rank, number) in the weights of `version`, the newest by default."""
        commits = ((rank, commit) for rank in self._first for commit in self._up_to(rank, version))
        return {(rank, commit.number) for rank, commit in commits if not commit.is_skipped}

    def commits(self) -> list[tuple[int, int, int]]:
        """Returns the (version, rank, number) of each commit, skipped or not, by version."""
        return sorted((it.version, rank, it.number) for rank, commits in self._commits.items() for it in commits)

    def sizes(self) -> dict[int, int]:
        """Returns the number of contributions in each version."""
        return Counter(it.version for commits in self._commits.values() for it in commits if not it.is_skipped)
