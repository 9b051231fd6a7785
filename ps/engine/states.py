"""What workers' scripts remember, as it came with their contributions, for the process that takes a rank next: bytes
that nobody here looks into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...common.wire.records import ContributionId


class Kept(NamedTuple):
    """When a contribution began: fields of Position in the proto, and the script's state."""

    place: dict[str, int]
    body: bytes


class States:
    """Of all ranks. One counts when its contribution does; those are kept that a snapshot may need."""

    def __init__(self) -> None:
        self._staged: dict[ContributionId, tuple[dict[str, int], bytes | None]] = {}
        self._of_rank: dict[int, dict[int, Kept]] = {}  # by rank, and number of the contribution that began so

    def stage(self, id: ContributionId, place: dict[str, int], body: bytes | None) -> None:
        """It came with this contribution; no body: that of the rank's one before that counts."""
        self._staged[id] = (place, body)

    def counted(self, id: ContributionId, num_committed: int) -> None:
        """The contribution counts; of its rank so many are in a version."""
        rank, kept = id.rank, self._of_rank.get(id.rank, {})
        place, body = self._staged.pop(id, (None, None))
        if body is None and kept:
            body = kept[max(kept)].body
        if place is None or body is None:
            self._of_rank.pop(rank, None)  # of a script that remembers nothing
            return
        kept[id.seq] = Kept(place, body)
        oldest = max((number for number in kept if number <= num_committed), default=0)
        self._of_rank[rank] = {number: one for number, one in kept.items() if number >= oldest}

    def forget(self, id: ContributionId) -> None:
        """The contribution does not count."""
        self._staged.pop(id, None)

    def fence(self, rank: int, incarnation: int) -> None:
        """What came from this incarnation of a rank, or an older one, and has not happened, never will."""
        self._staged = {
            one: told for one, told in self._staged.items() if one.rank != rank or one.incarnation > incarnation
        }

    def at(self, rank: int, number: int) -> Kept | None:
        """How the rank's contribution of this number began, or else the newest one before it."""
        kept = self._of_rank.get(rank, {})
        found = max((one for one in kept if one <= number), default=None)
        return kept[found] if found is not None else None

    def saved(self, contributions: Mapping[int, int]) -> dict[int, Kept]:
        """For a snapshot that holds so many contributions of each rank."""
        found = {rank: self.at(rank, number) for rank, number in contributions.items()}
        return {rank: one for rank, one in found.items() if one is not None}

    def restore(self, contributions: Mapping[int, int], places: Any, bodies: Mapping[int, bytes]) -> None:
        """Of a snapshot. A place that is not what it should be is none."""
        for rank, body in bodies.items():
            place = places.get(str(rank)) if isinstance(places, dict) else None
            if isinstance(place, dict) and all(type(one) is int and one >= 0 for one in place.values()):
                self._of_rank[rank] = {contributions.get(rank, 0): Kept(place, body)}
