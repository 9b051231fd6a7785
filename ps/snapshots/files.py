"""Snapshots as directories: their names and order, atomic writing, and removal of the oldest.

    DIR/snapshot-000000001200-3/      version 1200, written by the third server process of the run
    DIR/.writing-snapshot-.../        being written; DIR/.removing-... is being removed
    DIR/.lock                         locked while a process writes or removes snapshots
    DIR/.server                       locked as long as a server lives, and names this server
    DIR/begun                         all shards have had a snapshot, so workers may have joined

A rename creates a snapshot, after all its files are on the disk. A killed writer leaves a `.writing-` directory. The
kernel releases a lock with its process. So the process that has the lock knows that no other process uses such
leftovers, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ...common.errors import CheckpointError

MANIFEST = "manifest.json"

_NAME = re.compile(r"snapshot-([0-9]{12,20})-([0-9]{1,20})(\.old)?")
_WRITING, _REMOVING = ".writing-", ".removing-"
_BEGUN, _SERVER = "begun", ".server"


def candidates(location: Path) -> list[Path]:
    """Return the snapshots at `location`, a snapshot or a directory of snapshots, newest first.

    The newest has the highest server incarnation, then the highest version (`SnapshotName`). Clocks do not matter.
    Raises CheckpointError if the directory is not readable.
    """
    try:
        if _NAME.fullmatch(location.name) or (location / MANIFEST).exists():
            return [location] if location.is_dir() else []
        found = [path for path in location.iterdir() if _NAME.fullmatch(path.name)] if location.exists() else []
    except OSError as error:
        fix = "name a directory that you may read"
        raise CheckpointError(f"cannot look for snapshots in {location}: {error.strerror}", fix=fix) from None
    return sorted(found, key=lambda path: (age_of(path), path.suffix != ".old"), reverse=True)


def next_incarnation(directory: Path) -> int:
    """Return a server incarnation that is higher than that of any snapshot in `directory`, also of damaged ones."""
    return 1 + max((age_of(path)[0] for path in candidates(directory)), default=0)


def age_of(path: Path) -> tuple[int, int]:
    """Return (server incarnation, version) from the name of a snapshot, which sorts by age. (0, 0) for other names."""
    name = _NAME.fullmatch(path.name)
    return (int(name[2]), int(name[1])) if name else (0, 0)


def prepare(directory: Path) -> None:
    """Make `directory` if it is missing, and check that it is writable. Raises CheckpointError."""
    with writing_to(directory):
        probe = directory / f"{_WRITING}probe"
        probe.mkdir()
        probe.rmdir()


def has_begun(directory: Path) -> bool:
    """Whether workers may have trained since the first snapshot in `directory`."""
    return (directory / _BEGUN).exists()


def prune(directory: Path, keep: int, least_common: int | None = None) -> None:
    """Remove old snapshots. Raises CheckpointError.

    The newest `keep` snapshots stay, and those of version `least_common`, the newest that all shards have (None: there
    is only one shard). A new snapshot begins only after the previous one has ended on all shards. So among snapshots
    that are newer than the common one, only the newest can still become common. The file `begun` records that all
    shards have had a snapshot, so that workers may join.
    """
    with writing_to(directory):
        if least_common is not None and not has_begun(directory):
            (directory / _BEGUN).touch()
            sync(directory)
        for path in candidates(directory)[keep:]:
            if age_of(path)[1] != least_common:
                _remove(path)


def drop(path: Path) -> None:
    """Remove one snapshot. Raises CheckpointError."""
    with writing_to(path.parent):
        _remove(path)


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Return a context that locks `directory` and removes leftovers. An OSError inside becomes a CheckpointError."""
    try:
        with _locked(directory / ".lock"):
            for path in directory.iterdir():  # leftovers
                if path.name.startswith((_WRITING, _REMOVING)):
                    shutil.rmtree(path)
                elif path.suffix == ".old" and _NAME.fullmatch(path.name) and path.with_suffix("").exists():
                    _remove(path)
            yield
    except BlockingIOError:
        fix = "stop it, or give every run its own checkpoint.dir"
        raise CheckpointError(f"another process is writing snapshots to {directory}", fix=fix) from None
    except OSError as error:
        raise cannot_write(directory, error.strerror or str(error)) from None


@contextlib.contextmanager
def sole_server(directory: Path | None) -> Iterator[None]:
    """Return a context in which this is the only server of `directory` (None: no snapshots).

    Raises CheckpointError, which names the other server, if `directory` is already in use.
    """
    with contextlib.ExitStack() as stack:
        if directory is not None:
            try:
                lock = stack.enter_context(_locked(directory / _SERVER))
                os.ftruncate(lock, 0)
                since = datetime.now().astimezone().isoformat(" ", "seconds")
                os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode(), 0)
            except BlockingIOError:
                who = ""
                with contextlib.suppress(OSError):
                    who = (directory / _SERVER).read_text(errors="replace").strip()
                problem = f"another server keeps its snapshots in {directory}: {who or 'it has just started'}"
                fix = "wait for its end or stop it, or give this job its own --checkpoint-dir"
                raise CheckpointError(problem, fix=fix) from None
            except OSError as error:
                raise cannot_write(directory, error.strerror or str(error)) from None
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Return a context that locks the file `path`. Raises BlockingIOError if another process has the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    finally:
        os.close(lock)


def cannot_write(directory: Path, why: str) -> CheckpointError:
    """Return the error for a snapshot that was not written, with the free space in `directory`."""
    with contextlib.suppress(OSError):
        why += f" ({shutil.disk_usage(directory).free / 1e6:.1f} MB are free there)"
    fix = "free space or allow writing there, or choose another checkpoint.dir; older snapshots are unchanged"
    return CheckpointError(f"cannot write snapshots to {directory}: {why}", fix=fix)


@contextlib.contextmanager
def new_snapshot(final: Path) -> Iterator[Path]:
    """Return a context with an empty directory, which becomes `final` at the end, or is removed after an exception.

    Call this with the lock. It replaces an existing snapshot of that name.
    """
    folder = final.with_name(_WRITING + final.name)
    folder.mkdir()
    try:
        yield folder
        sync(folder)
        # A directory cannot be renamed over another. Until the new one is in place, readers find the old one as .old.
        old = final.with_name(final.name + ".old")
        if final.exists():
            final.rename(old)
        folder.rename(final)
        sync(final.parent)
        if old.exists():
            _remove(old)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    """Remove a snapshot. The rename comes first, so that no reader finds an incomplete one."""
    shutil.rmtree(path.rename(path.with_name(_REMOVING + path.name)))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, computed without the GIL."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
