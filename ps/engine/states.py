"""Keeps the scripts' states that come with contributions, for the next process of a rank. The bytes are opaque."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...common.wire.records import ContributionId, Row

# The beginning of a contribution that came: a position, and the script's state. Without a state it repeats that of the
# rank's contribution before.
StagedState = tuple[dict[str, int], bytes | None]


class Kept(NamedTuple):
    """The beginning of a contribution: fields of Position in the proto, and the script's state."""

    position: dict[str, int]
    payload: bytes


class States:
    """The states of all ranks. A state counts when its contribution does. States that a snapshot may need are kept."""

    def __init__(self) -> None:
        self._of_rank: dict[int, dict[int, Kept]] = {}  # by rank, and number of the contribution that began so

    def counted(self, id: ContributionId, staged: StagedState | None, num_committed: int) -> None:
        """Keep the state of a contribution that counts. `num_committed` of its rank's are in a version."""
        rank, kept = id.rank, self._of_rank.get(id.rank, {})
        position, payload = staged or (None, None)
        if payload is None and kept:
            payload = kept[max(kept)].payload
        if position is None or payload is None:
            self._of_rank.pop(rank, None)  # the script has no state
            return
        kept[id.seq] = Kept(position, payload)
        oldest = max((number for number in kept if number <= num_committed), default=0)
        self._of_rank[rank] = {number: snapshot for number, snapshot in kept.items() if number >= oldest}

    def at(self, rank: int, number: int) -> Kept | None:
        """Returns the state at the beginning of this contribution of the rank, or of the newest one before it."""
        kept = self._of_rank.get(rank, {})
        found = max((snapshot for snapshot in kept if snapshot <= number), default=None)
        return kept[found] if found is not None else None

    def saved(self, contributions: Mapping[int, int]) -> dict[int, Kept]:
        """Returns the states for a snapshot that has so many contributions of each rank."""
        found = {rank: self.at(rank, number) for rank, number in contributions.items()}
        return {rank: item for rank, item in found.items() if item is not None}

    def restore(self, rows: Mapping[int, Row], places: Any, payloads: Mapping[int, bytes]) -> None:
        """Restore the states of a snapshot; malformed positions are dropped."""
        for rank, payload in payloads.items():
            position = places.get(str(rank)) if isinstance(places, dict) else None
            if isinstance(position, dict) and all(type(number) is int and number >= 0 for number in position.values()):
                self._of_rank[rank] = {rows[rank].seq if rank in rows else 0: Kept(position, payload)}
