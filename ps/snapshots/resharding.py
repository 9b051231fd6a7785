"""Snapshots of a server with several shards: where they lie, which fit together, and another number of shards.

    DIR/snapshot-...                 of a server that is one process
    DIR/shard-0-of-2/snapshot-...    of two
    DIR/shard-1-of-2/snapshot-...

A moment of a run (run, server incarnation, version) can be gone on from when the snapshots of all its
shards are whole. A shard needs its own only, where the number of shards is the same; for another number
every shard puts its share together from all of them, so all must be where it can read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...common.config.schema import Config
from ...common.errors import CheckpointError
from ...common.reporting.log import get_logger
from ...common.tensors.sharding import Share, divide
from .checkpoint import Loaded, load
from .common import SnapshotName
from .files import candidates
from .manifest import AVERAGED, OPTIMIZER, WEIGHTS, FileName, Manifest, tensor_entries

log = get_logger()

Tensors = Mapping[str, torch.Tensor]

_NAME = re.compile(r"shard-([0-9]+)-of-([0-9]+)")


def snapshot_dir(config: Config, place: str | None = None) -> Path:
    """Where this shard's snapshots lie, in `place` or checkpoint.dir."""
    directory = Path(place or config.checkpoint.dir or "")
    return _shard_dir(directory, config.server.shard, config.server.shards)


def _shard_dir(directory: Path, shard: int, num_shards: int) -> Path:
    return directory / f"shard-{shard}-of-{num_shards}" if num_shards > 1 else directory


class Available:
    """The good snapshots this shard can begin with, and how to load one."""

    def __init__(self, config: Config) -> None:
        self._shard, self._num_shards = config.server.shard, config.server.shards
        options = config.checkpoint
        place = options.dir if options.resume in (None, "latest") else options.resume
        self.skipped: list[Path] = []
        # Of each moment, the snapshots of all the shards that were; one where there were as many as now.
        self._found: dict[SnapshotName, list[Loaded]] = {}
        if options.resume != "never" and place is not None:
            self._look(Path(place))
        if options.resume is not None and options.resume != "never" and not self._found:
            raise CheckpointError(
                f"there is no snapshot in {place} to go on from (checkpoint.resume is {options.resume})",
                fix="name a directory that ps-server --checkpoint-dir wrote to, or begin anew without --resume",
            )

    def _look(self, place: Path) -> None:
        own = _shard_dir(place, self._shard, self._num_shards)
        for loaded in self._good(own):
            self._found[_name(loaded)] = [loaded]
        for num_shards in _other_numbers(place, self._num_shards):
            sets = [
                {_name(one): one for one in self._good(_shard_dir(place, i, num_shards))} for i in range(num_shards)
            ]
            for name in set.intersection(*(set(found) for found in sets)):
                self._found.setdefault(name, [found[name] for found in sets])

    def _good(self, directory: Path) -> list[Loaded]:
        found = []
        for path in candidates(directory):
            try:
                found.append(load(path))
            except CheckpointError as error:
                self.skipped.append(path)
                log.warning("snapshot_skipped", path=str(path), reason=error.message)
        return found

    @property
    def names(self) -> tuple[SnapshotName, ...]:
        return tuple(sorted(self._found))

    def load(self, name: SnapshotName) -> Loaded:
        """This shard's share of it."""
        parts = self._found[name]
        if len(parts) == 1 and _num_shards(parts[0].manifest) == self._num_shards:
            return parts[0]
        log.warning("resharded", path=str(parts[0].path.parent), shards=len(parts), now=self._num_shards)
        return merge(parts, self._shard, self._num_shards)


def _other_numbers(place: Path, num_shards: int) -> list[int]:
    """Numbers of shards, other than this one, of which all directories are there."""
    names = [_NAME.fullmatch(path.name) for path in place.iterdir()] if place.is_dir() else []
    numbers = {int(name[2]) for name in names if name is not None} | {1}
    return sorted(n for n in numbers - {num_shards} if all(_shard_dir(place, i, n).is_dir() for i in range(n)))


def _name(loaded: Loaded) -> SnapshotName:
    manifest = loaded.manifest
    return SnapshotName(manifest.server_incarnation, manifest.version, manifest.run)


def _num_shards(manifest: Manifest) -> int:
    return manifest.share.shards if manifest.share is not None else 1


def merge(parts: list[Loaded], shard: int, num_shards: int) -> Loaded:
    """The share of one of `num_shards` shards, from the snapshots of all shards there were."""
    whole, optimizer = parts[0].whole
    before = divide(whole, len(parts))
    share = divide(whole, num_shards)[shard]
    files: dict[FileName, dict[str, torch.Tensor]] = {WEIGHTS: _collect([one.weights for one in parts], before, share)}
    averages = [one.averaged for one in parts]
    if all(average is not None for average in averages):
        files[AVERAGED] = _collect([average or {} for average in averages], before, share)
    if any(one.state for one in parts):
        files[OPTIMIZER] = _collect_state(parts, before, share)
    mine = share.optimizer(optimizer) if optimizer is not None else None
    manifest = parts[0].manifest.model_copy(update={"tensors": tensor_entries(share.layout)})
    return Loaded(parts[0].path, manifest, share.layout, mine, files, (whole, optimizer))


def _collect(files: Sequence[Tensors], before: list[Share], share: Share) -> dict[str, torch.Tensor]:
    """The tensors of `share`, cut and joined from those of the shards there were."""
    held: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for file, one in zip(files, before, strict=True):
        for part in one.parts:
            if part.name in file:
                end = part.end if not part.is_whole else _rows(part.spec.shape)
                held.setdefault(part.spec.name, []).append((part.first, end, file[part.name]))
    found: dict[str, torch.Tensor] = {}
    for part in share.parts:
        pieces = held.get(part.spec.name, [])
        if not pieces:
            continue
        first, end = (0, _rows(part.spec.shape)) if part.is_whole else (part.first, part.end)
        if len(pieces) == 1 and pieces[0][:2] == (first, end):
            joined = pieces[0][2]
        else:
            rows = [t[max(first, a) - a : min(end, b) - a] for a, b, t in pieces if a < end and b > first]
            joined = torch.cat(rows) if rows else pieces[0][2][:0]
        for name in (part.name, *part.as_spec().aliases):
            found[name] = joined if name == part.name else joined.clone()
    return found


def _collect_state(parts: list[Loaded], before: list[Share], share: Share) -> dict[str, torch.Tensor]:
    """Optimizer state, key by key: elementwise as the weights are, one value per parameter as of its first part."""
    scalars = set(parts[0].manifest.scalars)
    keys = {full.partition("/")[0] for one in parts for full in one.state}
    found: dict[str, torch.Tensor] = {}
    for key in sorted(keys):
        files = [
            {full.partition("/")[2]: tensor for full, tensor in one.state.items() if full.partition("/")[0] == key}
            for one in parts
        ]
        if key in scalars:
            values = {
                part.spec.name: file[part.name]
                for file, one in zip(files, before, strict=True)
                for part in one.parts
                if part.name in file
            }
            for part in share.parts:
                if part.spec.name in values:
                    found[f"{key}/{part.name}"] = values[part.spec.name].clone()
        else:
            found |= {f"{key}/{name}": tensor for name, tensor in _collect(files, before, share).items()}
    aliases = {alias for part in share.parts for alias in part.as_spec().aliases}
    return {full: tensor for full, tensor in found.items() if full.partition("/")[2] not in aliases}


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1
