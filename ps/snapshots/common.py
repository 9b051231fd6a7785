"""Chooses the snapshot from which all shards resume. Pure: the coordinator decides from every shard's entries.

A run that has a snapshot on any shard never starts over by itself. Otherwise its workers would upload trained weights
as initial weights, and the samples in them would count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...common.errors import CheckpointError, UsageError

# Pattern of a run's name. Trackers use the name for a folder.
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"
_MOST_NAMED = 5
States = Mapping[int, bytes]  # of ranks' scripts
Done = Callable[[int], object]  # gets the newest version that is kept


class Keeper:
    """Keeps versions of a run outside of its server: on a disk, or in the run above (`relay/region.py`). This class
    keeps none."""

    num_written = 0  # by this process

    def reason(self, is_holding: bool) -> str:
        """Why workers wait for it, as a phrase; empty: they do not. `is_holding`: none has begun before the first."""
        return "the first snapshot" if is_holding else ""

    def take(self, saved: dict[str, Any], done: Done, states: States) -> None:
        """Keep the newest version, and call `done`. See `Snapshots.take`."""

    def prune(self, least_common: int) -> None:
        """All shards have this version."""

    def drop(self) -> None:
        """The newest version is not to be used."""

    def close(self) -> None:
        """Wait until all is kept."""


class SnapshotName(NamedTuple):
    """A moment of a run. The order of names is the order in which snapshots were made.

    The server incarnation comes first. For example, a server that resumes from version 900, because 1000 is damaged,
    writes 950 later than 1000.
    """

    server_incarnation: int
    version: int
    run: str  # empty if a damaged snapshot does not contain it


class Entry(NamedTuple):
    """A snapshot that a shard found. `problem` is the reason why it is unusable, or "" if it is complete."""

    name: SnapshotName
    problem: str = ""
    has_begun: bool = True  # workers may have trained; they join only once all shards have a first snapshot

    @property
    def is_whole(self) -> bool:
        return not self.problem


def choose_common(by_shard: Mapping[int, Sequence[Entry]]) -> SnapshotName | None:
    """Return the newest moment that is complete on every shard. `by_shard` has the entries of each shard.

    Returns None for a new run: no shard has a snapshot, not even a damaged one, or no worker has joined since the first
    snapshot. Raises CheckpointError, which lists the snapshots of each shard, if there are snapshots and no common one.
    Raises UsageError if the snapshots are of different runs.
    """
    common = set.intersection(*({entry.name for entry in entries if entry.is_whole} for entries in by_shard.values()))
    if common:
        return max(common)
    if not any(entry.has_begun for entries in by_shard.values() for entry in entries):
        return None
    shards = sorted(by_shard.items())
    runs = {shard: {entry.name.run for entry in entries if entry.is_whole} for shard, entries in shards}
    if all(runs.values()) and not set.intersection(*runs.values()):
        kinds = "; ".join(f"shard {shard} of run {', '.join(sorted(of))}" for shard, of in runs.items())
        fix = "give each shard its own --checkpoint-dir of one run, or start a new run with --resume never"
        raise UsageError(f"the shards have snapshots of different runs: {kinds}", fix=fix)
    found = "; ".join(f"shard {shard} has {_listed(entries)}" for shard, entries in shards)
    fix = "restore copies of the missing snapshots, or start a new run with --resume never"
    raise CheckpointError(f"no snapshot is complete on all shards: {found}", fix=fix)


def _listed(entries: Sequence[Entry]) -> str:
    """Return the newest snapshots of one shard as a phrase."""
    newest = sorted(entries, key=lambda entry: entry.name, reverse=True)
    named = []
    for (incarnation, version, _), problem, _ in newest[:_MOST_NAMED]:
        unusable = f" (unusable: {problem})" if problem else ""
        named.append(f"version {version} of server incarnation {incarnation}{unusable}")
    if len(newest) > _MOST_NAMED:
        named.append(f"{len(newest) - _MOST_NAMED} older")
    return ", ".join(named) or "none"
