"""The line of a run: which start continues the run that a folder belongs to, and which is a run of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paramserver.common.config.schema import Config
from paramserver.ps.snapshots.available import Available
from paramserver.ps.snapshots.snapshots import new_incarnation, take_line
from paramserver.tests.ps.snapshots.test_available import keep


class Starts:
    """Starts of servers, each of which could name a new run."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, directory: Path, resume: str | None = None) -> str:
        """The run that a server continues or begins in the directory, and the incarnation as a suffix of its name."""
        config = Config.model_validate({"checkpoint": {"dir": str(directory), "resume": resume}})
        available = Available(config)
        name, self.number = available.newest(), self.number + 1
        incarnation = new_incarnation(config, 1)
        return take_line(config, available, name, f"run{self.number}", incarnation).run


@pytest.fixture
def start() -> Starts:
    return Starts()


def test_a_restart_goes_on_with_the_line_wherever_its_folder_is(tmp_path: Path, start: Starts) -> None:
    folder, moved = tmp_path / "a", tmp_path / "b"
    assert start(folder) == "run1"
    keep(folder, 5, run="run1")
    assert [start(folder), start(folder, "latest"), start(folder, str(folder))] == ["run1"] * 3
    assert start(folder, str(folder / "snapshot-000000000005-1")) == "run1", "its newest, by name"
    folder.rename(moved)
    assert start(moved) == "run1"
    shutil.copytree(moved, tmp_path / "backup")
    shutil.rmtree(moved)
    shutil.copytree(tmp_path / "backup", moved)
    assert start(moved) == "run1", "a backup in its place"


def test_a_copy_is_a_run_of_its_own_and_stays_it(tmp_path: Path, start: Starts) -> None:
    folder = tmp_path / "a"
    start(folder)
    keep(folder, 5, run="run1")
    for copy, run in ((tmp_path / "b", "run2"), (tmp_path / "c", "run4")):
        shutil.copytree(folder, copy)
        assert start(copy) == run
        assert start(copy) == run, "killed before its first snapshot, and started again"
        keep(copy, 9, run=run)
    assert [start(tmp_path / "b"), start(tmp_path / "c"), start(folder)] == ["run2", "run4", "run1"]
    (tmp_path / "d").mkdir()
    shutil.copytree(folder / "snapshot-000000000005-1", tmp_path / "d" / "snapshot-000000000005-1")
    assert start(tmp_path / "d") == "run9", "one snapshot alone, without the file of its line"


def test_an_older_snapshot_begins_another_line(tmp_path: Path, start: Starts) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    start(folder)
    for version in (5, 9):
        keep(folder, version, run="run1")
    older = str(folder / "snapshot-000000000005-1")
    assert start(folder, older) == "run2"
    assert start(folder, older) == "run2", "the same command, after a crash before its first snapshot"
    assert start(other, str(folder)) == "run4", "its newest, into another folder"
    assert start(folder, "never") == "run5"


def test_a_line_that_went_on_is_not_begun_again_from_its_origin(tmp_path: Path, start: Starts) -> None:
    folder, copy = tmp_path / "a", tmp_path / "b"
    start(folder)
    keep(folder, 5, run="run1")
    shutil.copytree(folder, copy)
    origin = str(copy / "snapshot-000000000005-1")
    assert start(copy, origin) == "run2"
    first = copy / "snapshot-000000000007-1"
    keep(copy, 7, run="run2")
    first.rename(copy / "snapshot-000000000007-3")  # by a later server
    assert start(copy, origin) == "run3", "its record has what came after the origin"
