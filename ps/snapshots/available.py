"""Finds the snapshots that a shard can resume from, checks which of them are complete, and loads one.

    DIR/snapshot-...                 of a server with one process
    DIR/shard-0-of-2/snapshot-...    of a server with two shards
    DIR/shard-1-of-2/snapshot-...

A run can resume from a moment (run, server incarnation, version) if the snapshots of all its shards are complete. With
the same number of shards, each shard reads only its own snapshot. With another number, every shard builds its share
from all of them, so it must be able to read all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...common.config.preflight import no_snapshot
from ...common.config.schema import Config
from ...common.errors import CheckpointError
from ...common.reporting.log import get_logger
from .common import Entry, SnapshotName
from .files import age_of, candidates, has_begun
from .manifest import Loaded, load
from .resharding import merge

log = get_logger()

_MOST_VERSIONS = 16
_NAME = re.compile(r"shard-([0-9]{1,4})-of-([0-9]{1,4})")


def snapshot_dir(config: Config) -> Path:
    """Return the folder for this shard's snapshots: checkpoint.dir, or with several shards a folder in it."""
    return _shard_dir(Path(config.checkpoint.dir or ""), config.server.shard, config.server.shards)


def locked_dir(config: Config) -> Path | None:
    """Return the directory that this server locks against other servers, or None without snapshots.

    The coordinator chooses the snapshot of a run, so it locks checkpoint.dir itself, for any number of shards.
    """
    if config.checkpoint.dir is None:
        return None
    return snapshot_dir(config) if config.server.shard else Path(config.checkpoint.dir)


def _shard_dir(directory: Path, shard: int, num_shards: int) -> Path:
    return directory / f"shard-{shard}-of-{num_shards}" if num_shards > 1 else directory


@dataclass
class _Moment:
    """The snapshots in `directory` of one moment of a run with `num_shards` shards."""

    directory: Path
    num_shards: int
    age: tuple[int, int]  # server incarnation, version
    paths: dict[int, Path]  # the snapshots to read, by shard; with the same number of shards, only this shard's
    missing: tuple[int, ...] = ()  # shards whose snapshot is needed and missing

    @property
    def path(self) -> Path:
        return next(iter(self.paths.values()))

    @cached_property
    def entry(self) -> Entry:
        """The entry of this moment. The first access reads and verifies all its files."""
        name, problem = SnapshotName(*self.age, ""), ""
        try:
            manifests = [load(path).manifest for path in self.paths.values()]
            names = {SnapshotName(item.server_incarnation, item.version, item.run) for item in manifests}
            name = min(names)
            if len(names) > 1:
                problem = f"its parts are of different runs, {' and '.join(sorted(name.run for name in names))}"
            elif self.missing:
                missing = ", ".join(map(str, self.missing))
                problem = f"the part of shard {missing} of {self.num_shards} is not in {self.directory}"
        except CheckpointError as error:
            problem = error.message
        if problem:
            log.warning("snapshot_skipped", path=str(self.path), reason=problem)
        may_have_trained = name.version > 0 or any(has_begun(path.parent) for path in self.paths.values())
        return Entry(name, problem, may_have_trained)


class Available:
    """The snapshots that checkpoint.resume names, newest first.

    Verification reads the files and keeps none of them open or mapped. Only the loaded snapshot is in memory. Raises
    CheckpointError if `checkpoint.resume` names a place without snapshots.
    """

    def __init__(self, config: Config) -> None:
        self._shard, self._num_shards = config.server.shard, config.server.shards
        options = config.checkpoint
        directory = options.dir if options.resume in (None, "latest") else options.resume
        self._directory = Path(directory) if options.resume != "never" and directory is not None else None
        self._moments = self._look(self._directory) if self._directory is not None else []
        self.skipped: list[Path] = []  # unusable snapshots that are newer than the loaded one
        if options.resume not in (None, "never") and not self._moments:
            raise no_snapshot(directory, options.resume)

    def _look(self, directory: Path) -> list[_Moment]:
        here, local_paths = self._num_shards, candidates(_shard_dir(directory, self._shard, self._num_shards))
        found = [_Moment(directory, here, age_of(path), {self._shard: path}) for path in local_paths]
        # Other numbers of shards for which at least one shard may have snapshots.
        names = filter(None, (_NAME.fullmatch(path.name) for path in directory.glob("shard-*")))
        for num_shards in ({int(name[2]) for name in names} | {1}) - {here}:
            by_shard: dict[int, dict[tuple[int, int], Path]] = {}
            for shard in range(num_shards):
                paths = candidates(_shard_dir(directory, shard, num_shards))
                by_shard[shard] = {age_of(path): path for path in reversed(paths)}  # not a replaced .old
            for age in set().union(*by_shard.values()):
                parts = {shard: by_age[age] for shard, by_age in by_shard.items() if age in by_age}
                missing = tuple(shard for shard in by_shard if shard not in parts)
                found.append(_Moment(directory, num_shards, age, parts, missing))
        return sorted(found, key=lambda moment: (moment.age, moment.num_shards == here), reverse=True)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of all snapshots, also unusable ones, newest first."""
        return tuple(moment.entry for moment in self._moments)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the newest snapshots, also unusable ones, newest first."""
        return tuple(sorted({moment.age[1] for moment in self._moments}, reverse=True)[:_MOST_VERSIONS])

    def newest(self) -> SnapshotName | None:
        """Return the newest complete snapshot, for a server of one process, or None if there are no snapshots.

        Raises CheckpointError if there are snapshots and none is complete. It does not read older ones.
        """
        for moment in self._moments:
            if moment.entry.is_whole:
                return moment.entry.name
        if not self._moments:
            return None
        problems = "; ".join(entry.problem for entry in self.entries)
        fix = "restore a copy of one, or start a new run with checkpoint.resume=never"
        raise CheckpointError(f"no snapshot in {self._directory} can be used: {problems}", fix=fix)

    def is_newest(self, directory: Path, name: SnapshotName) -> bool:
        """Whether the newest usable snapshot of this folder has the name."""
        is_here = self._directory is not None and self._directory.resolve() == directory.resolve()
        moments = self._moments if is_here else self._look(directory)
        return next((moment.entry.name for moment in moments if moment.entry.is_whole), None) == name

    def load(self, name: SnapshotName) -> Loaded:
        """Return this shard's share of a complete snapshot.

        The tensors share memory with the files, so drop the snapshot once the store is restored.
        """
        moment = next((moment for moment in self._moments if moment.entry.is_whole and moment.entry.name == name), None)
        if moment is None:
            raise CheckpointError(f"there is no whole snapshot of version {name.version} in {self._directory}")
        newer = [item for item in self._moments if item.age > moment.age]
        self.skipped = [moment.path for moment in newer if not moment.entry.is_whole]
        if moment.num_shards == self._num_shards:
            return load(moment.path, is_verified=True)
        log.warning("resharded", path=str(moment.path.parent), shards=moment.num_shards, now=self._num_shards)
        parts = [load(moment.paths[shard], is_verified=True) for shard in range(moment.num_shards)]
        return merge(parts, self._shard, self._num_shards)
