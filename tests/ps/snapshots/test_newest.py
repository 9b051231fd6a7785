"""Which of several snapshots is gone on from, and which of them stay."""

from __future__ import annotations

from pathlib import Path

from paramserver.common.wire.records import Row
from paramserver.ps.snapshots.files import candidates, next_incarnation, prune
from paramserver.ps.snapshots.manifest import load, write
from paramserver.tests.ps.snapshots.making import files_of, hidden, load_newest, manifest_of, snapshot


def test_the_newest_is_of_the_newest_server(tmp_path: Path) -> None:
    assert candidates(tmp_path) == [] and load_newest(tmp_path) is None and load_newest(tmp_path / "no") is None
    assert next_incarnation(tmp_path) == next_incarnation(tmp_path / "no") == 1
    for version, incarnation in [(900, 1), (1000, 1), (950, 2), (10**12, 1), (20, 10)]:
        snapshot(tmp_path, version, incarnation)
    (tmp_path / "snapshot-of-something-else").mkdir()
    names = [path.name for path in candidates(tmp_path)]
    assert names == [
        "snapshot-000000000020-10", "snapshot-000000000950-2", "snapshot-1000000000000-1",
        "snapshot-000000001000-1", "snapshot-000000000900-1",
    ]  # fmt: skip
    assert next_incarnation(tmp_path) == 11
    newest = load_newest(tmp_path)
    assert newest is not None and newest.manifest.version == 20
    item = load_newest(tmp_path / names[3])
    assert item is not None and item.manifest.version == 1000
    best = (tmp_path / names[4]).rename(tmp_path / "best")  # a name of one's own
    renamed = load_newest(best)
    assert renamed is not None and renamed.manifest.version == 900


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for version in range(5):
        snapshot(tmp_path, version, 1)
    snapshot(tmp_path, 1, 2)
    prune(tmp_path, 3)
    assert [path.name[-14:] for path in candidates(tmp_path)] == ["000000000001-2", "000000000004-1", "000000000003-1"]
    assert hidden(tmp_path) == []


def test_the_same_version_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    snapshot(tmp_path, 4)
    write(tmp_path, manifest_of(4, rows={0: Row(99, 99)}), files_of(4))
    assert len(candidates(tmp_path)) == 1 and hidden(tmp_path) == []
    assert load(candidates(tmp_path)[0]).manifest.rows == {0: (99, 99, 0, 0, 0)}


def test_killed_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 4)
    old = path.rename(path.with_name(path.name + ".old"))
    assert candidates(tmp_path) == [old]
    found = load_newest(tmp_path)
    assert found is not None and found.manifest.version == 4
    write(tmp_path, manifest_of(4, rows={0: Row(99, 99)}), files_of(4))
    assert candidates(tmp_path) == [path] and hidden(tmp_path) == []
