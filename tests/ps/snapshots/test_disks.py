"""Disks that are full, read-only or forbidden, directories with another writer or with leftovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.ps.snapshots.files import candidates, prepare, prune, writing_to
from paramserver.ps.snapshots.manifest import WEIGHTS, load, write
from paramserver.tests.ps.snapshots.making import hidden, load_newest, manifest_of, snapshot


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own; skips where this user may not mount."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"NOT TESTED: mounting a tmpfs needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("num_free", [0, 8 << 10, 40 << 10, 44 << 10])
def test_a_full_disk_leaves_the_old_snapshot_and_no_new_one(tmp_path: Path, num_free: int) -> None:
    """Nothing fits; some of the weights; the weights; the weights and the manifest."""
    with mounted(tmp_path / "disk", "size=160k") as disk:
        good = snapshot(disk, 1)
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - num_free))
        layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (10_000,))])
        manifest = manifest_of(2, tensors=layout.specs, optimizer=None, hyperparameters=None)
        files = {WEIGHTS: {"w": torch.ones(10_000)}}
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            write(disk, manifest, files)
        assert (
            ", for 0.0 MB (0." in caught.value.message
            and "MB are free" in caught.value.message
            and "older snapshots are unchanged" in caught.value.fix
        )
        assert hidden(disk) == ["ballast"] and candidates(disk) == [good]
        load(good)
        (disk / "ballast").unlink()
        assert write(disk, manifest, files).path == candidates(disk)[0] != good, "goes on when there is space"


def test_a_read_only_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        good = snapshot(disk, 1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        tries: list[Callable[[], object]] = [
            lambda: snapshot(disk, 2), lambda: prune(disk, 0), lambda: prepare(disk / "new"),
        ]  # fmt: skip
        for use in tries:
            with pytest.raises(CheckpointError, match="Read-only file system"):
                use()
        found = load_newest(disk)
        assert found is not None and found.path == good


def test_a_directory_without_permission(tmp_path: Path) -> None:
    """As a user who is not root, since root may do anything."""
    directory = tmp_path / "snapshots"
    good = snapshot(directory, 1).relative_to(tmp_path)
    tmp_path.chmod(0o755)
    directory.chmod(0o555)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.chdir(tmp_path)  # the directories above are pytest's and closed
            if os.geteuid() == 0:
                os.setuid(65534)
            is_refused = refuses(lambda: prepare(Path("snapshots")))
            status = 0 if is_refused and load(good).manifest.version == 1 else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    directory.chmod(0o755)


def refuses(use: Callable[[], object]) -> bool:
    try:
        use()
    except CheckpointError as error:
        return "Permission denied" in error.message and error.exit_code == 14
    return False


def test_two_writers_in_one_directory(tmp_path: Path) -> None:
    with writing_to(tmp_path), pytest.raises(CheckpointError, match="another process is writing snapshots"):
        snapshot(tmp_path, 1)
    snapshot(tmp_path, 1)


def test_leftovers_go_with_the_next_writer(tmp_path: Path) -> None:
    for name in (f".writing-{os.getpid()}-abcd", ".writing-1-x", ".removing-y"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    prepare(tmp_path)
    assert hidden(tmp_path) == ["mine"]
