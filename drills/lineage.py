"""Records which contributions of each rank are in each version, and counts them. Pure.

A server that goes back to a snapshot removes later commits. Workers must make these contributions again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class _Commit(NamedTuple):
    """A commit of one rank, or a skipped contribution (store.on_nonfinite): it counts, but no version contains it."""

    version: int
    number: int
    line: int
    is_skipped: bool


@dataclass
class _Rank:
    """Commits of one rank, in order. `first`: its initial number, which has no commit."""

    first: int
    commits: list[_Commit] = field(default_factory=list)

    def up_to(self, version: int) -> list[_Commit]:
        return self.commits[: bisect_right(self.commits, version, key=lambda commit: commit.version)]

    def number(self, commits: list[_Commit]) -> int:
        """Returns the number after these commits, its first ones."""
        return commits[-1].number if commits else self.first


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
    """The commits of a run after a snapshot."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self._ranks = {rank: _Rank(number) for rank, number in numbers.items()}

    def begin(self, rank: int) -> None:
        """A new rank begins, whose first contribution is number 1."""
        self._ranks.setdefault(rank, _Rank(0))

    def add(self, rank: int, number: int, version: int, line: int, *, is_skipped: bool = False) -> str | None:
        """Add a commit, or a contribution that was skipped in it. Returns its problem as a sentence, if any."""
        known = self._ranks.setdefault(rank, _Rank(0))
        last, problem = self.number(rank), None
        if number <= last:
            before = next((f" on line {commit.line}" for commit in known.commits if commit.number == number), "")
            problem = f"is committed again: it was{before}, and rank {rank} is at {last}"
        elif number > last + 1:
            problem = f"is committed after {last}: the {number - last - 1} between them are lost"
        known.commits.append(_Commit(version, number, line, is_skipped))
        return problem and f"contribution {number} of rank {rank} {problem}"

    def number(self, rank: int) -> int:
        """Returns the number of the last commit, 0 for an unknown rank."""
        known = self._ranks.get(rank, _Rank(0))
        return known.number(known.commits)

    def numbers(self) -> dict[int, int]:
        """Returns the number of the last commit by rank."""
        return {rank: self.number(rank) for rank in self._ranks}

    def differences(self, version: int, numbers: dict[int, int]) -> list[str]:
        """Returns how `numbers` differ from the commits up to `version`, as phrases. Ranks without commits may lack."""
        found = []
        for rank in sorted({*numbers, *self._ranks}):
            known, number = self._ranks.get(rank), numbers.get(rank)
            if known is None:
                found.append(f"rank {rank} at number {number}, it never joined")
                continue
            committed = known.number(known.up_to(version))
            if number != committed and not (number is None and committed == known.first):
                found.append(f"rank {rank} at number {number}, committed were {committed}")
        return found

    def roll_back(self, version: int, numbers: dict[int, int]) -> list[tuple[int, int]]:
        """Remove the commits after `version` with its `numbers`, and return their (rank, number)."""
        voided: list[tuple[int, int]] = []
        for rank, known in list(self._ranks.items()):
            kept = known.up_to(version)
            voided += [(rank, commit.number) for commit in known.commits[len(kept) :] if not commit.is_skipped]
            known.commits = kept
            if not kept and rank not in numbers:
                del self._ranks[rank]
        for rank, number in numbers.items():
            self._ranks.setdefault(rank, _Rank(number))
        return voided

    def contributions(self, version: int | None = None) -> set[tuple[int, int]]:
        """Returns the (rank, number) in the weights of `version`, the newest by default."""
        return {
            (rank, commit.number)
            for rank, known in self._ranks.items()
            for commit in (known.commits if version is None else known.up_to(version))
            if not commit.is_skipped
        }

    def commits(self) -> list[tuple[int, int, int]]:
        """Returns the (version, rank, number) of each commit, skipped or not, by version."""
        return sorted(
            (commit.version, rank, commit.number) for rank, known in self._ranks.items() for commit in known.commits
        )

    def sizes(self) -> dict[int, int]:
        """Returns the number of contributions in each version."""
        return Counter(
            commit.version for known in self._ranks.values() for commit in known.commits if not commit.is_skipped
        )
