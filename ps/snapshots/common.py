"""The choice of the snapshot that all shards can go on from. Pure: the coordinator decides from every shard's entries.

A run that has a snapshot anywhere never begins anew by itself: its workers would upload weights that are trained
already, and every sample in them would count twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...common.errors import CheckpointError, UsageError

# A run's name, which trackers make the name of a folder of.
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"
_MOST_NAMED = 5


class SnapshotName(NamedTuple):
    """A moment of a run. The greater of two was made later: a server that went on from version 900 because 1000 was
    damaged writes 950 later than the other 1000, and with a higher incarnation."""

    server_incarnation: int
    version: int
    run: str  # empty where a damaged snapshot does not tell


class Entry(NamedTuple):
    """A snapshot as a shard finds it. `problem` is the reason that it cannot be used; empty: it is whole."""

    name: SnapshotName
    problem: str = ""
    has_begun: bool = True  # workers may have trained; before all shards have had a first snapshot none is let in

    @property
    def is_whole(self) -> bool:
        return not self.problem


def choose_common(by_shard: Mapping[int, Sequence[Entry]]) -> SnapshotName | None:
    """The newest moment that every shard has whole; `by_shard` has the entries of each shard.

    None only where no shard has any snapshot, whole or damaged, or none but the first of a run that has let nobody in:
    then the run begins. Raises CheckpointError that says what each shard has when there are some and none is common,
    UsageError when they are of different runs.
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
        raise UsageError(
            f"the shards have snapshots of different runs: {kinds}",
            fix="give each shard its own --checkpoint-dir of one run, or begin anew with --resume never",
        )
    raise CheckpointError(
        "no snapshot is whole on all shards: "
        + "; ".join(f"shard {shard} has {_listed(entries)}" for shard, entries in shards),
        fix="put back a copy of what is missing, or begin anew with --resume never",
    )


def _listed(entries: Sequence[Entry]) -> str:
    """The newest snapshots of one shard as a phrase."""
    newest = sorted(entries, key=lambda entry: entry.name, reverse=True)
    named = [
        f"version {entry.name.version} of server incarnation {entry.name.server_incarnation}"
        + (f" (unusable: {entry.problem})" if entry.problem else "")
        for entry in newest[:_MOST_NAMED]
    ]
    if len(newest) > _MOST_NAMED:
        named.append(f"{len(newest) - _MOST_NAMED} older")
    return ", ".join(named) or "none"
