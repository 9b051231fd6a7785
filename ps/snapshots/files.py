"""Snapshots as directories: their names and order, written whole or not at all, the oldest removed.

    DIR/snapshot-000000001200-3/      version 1200, written by the third server process of the run
    DIR/.writing-snapshot-.../        not whole yet; DIR/.removing-... no longer
    DIR/.lock                         held while one process writes or removes there
    DIR/.server                       held as long as a server lives, and says which
    DIR/begun                         all shards have had a snapshot: before that no worker is let in

A snapshot comes into being by one rename, after everything in it is on the disk. A writer that is killed leaves a
`.writing-` directory. The kernel frees a lock with its process, so whoever holds the lock knows that such leftovers
are nobody's, and removes them.
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
    """The snapshots at `place`, one of them or a directory of them, newest first; none where there is nothing.

    Newest is the highest server incarnation, then the highest version (`SnapshotName`); clocks play no part. Raises
    CheckpointError where it may not look.
    """
    try:
        if _NAME.fullmatch(location.name) or (location / MANIFEST).exists():
            return [location] if location.is_dir() else []
        found = [path for path in location.iterdir() if _NAME.fullmatch(path.name)] if location.exists() else []
    except OSError as error:
        raise CheckpointError(
            f"cannot look for snapshots in {location}: {error.strerror}", fix="name a directory that you may read"
        ) from None
    return sorted(found, key=lambda path: (age_of(path), path.suffix != ".old"), reverse=True)


def next_incarnation(directory: Path) -> int:
    """One more than of any snapshot in `directory`, damaged ones included."""
    return 1 + max((age_of(path)[0] for path in candidates(directory)), default=0)


def age_of(path: Path) -> tuple[int, int]:
    """(server incarnation, version) as the name of a snapshot says, which sorts by age; zeros for another name."""
    name = _NAME.fullmatch(path.name)
    return (int(name[2]), int(name[1])) if name else (0, 0)


def prepare(directory: Path) -> None:
    """Make `directory` where it is missing, and see now that snapshots can be written there. CheckpointError."""
    with writing_to(directory):
        probe = directory / f"{_WRITING}probe"
        probe.mkdir()
        probe.rmdir()


def mark_begun(directory: Path) -> None:
    """Remember that all shards have had a snapshot, so that workers were let in. CheckpointError when that fails."""
    with writing_to(directory):
        if not has_begun(directory):
            (directory / _BEGUN).touch()
            sync(directory)


def has_begun(directory: Path) -> bool:
    """Whether workers may have trained on what lies in `directory`."""
    return (directory / _BEGUN).exists()


def prune(directory: Path, keep: int, least_common: int | None = None) -> list[Path]:
    """Remove all but the newest `keep` snapshots and those of version `least_common`, the newest on all shards of the
    run (None: there are no others); returns those removed. CheckpointError when that fails.

    An attempt at a snapshot begins when that of all shards before it has ended. So of what is newer than the newest
    common one, only the newest can still become common, and the others are of no use to anybody.
    """
    with writing_to(directory):
        old = [path for path in candidates(directory)[keep:] if age_of(path)[1] != least_common]
        for path in old:
            _remove(path)
    return old


def drop(path: Path) -> None:
    """Remove one snapshot. CheckpointError when that fails."""
    with writing_to(path.parent):
        _remove(path)


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`, and remove leftovers. An OSError inside becomes a CheckpointError."""
    try:
        with _locked(directory / ".lock"):
            _remove_leftovers(directory)
            yield
    except BlockingIOError:
        raise CheckpointError(
            f"another process is writing snapshots to {directory}",
            fix="stop it, or give every run a checkpoint.dir of its own",
        ) from None
    except OSError as error:
        raise cannot_write(directory, error.strerror or str(error)) from None


@contextlib.contextmanager
def sole_server(directory: Path | None) -> Iterator[None]:
    """Be the only server of `directory` (None: no snapshots) until the end of this process. CheckpointError names
    another server that is there."""
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
                raise CheckpointError(
                    f"another server keeps its snapshots in {directory}: {who or 'it has just started'}",
                    fix="wait for its end or stop it, or give this job a --checkpoint-dir of its own",
                ) from None
            except OSError as error:
                raise cannot_write(directory, error.strerror or str(error)) from None
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the lock on `path`, made where it is missing. BlockingIOError when another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    finally:
        os.close(lock)


def cannot_write(directory: Path, why: str) -> CheckpointError:
    """The error for a snapshot that was not written, with the free space there."""
    with contextlib.suppress(OSError):
        why += f" ({shutil.disk_usage(directory).free / 1e6:.1f} MB are free there)"
    return CheckpointError(
        f"cannot write snapshots to {directory}: {why}",
        fix="make room or allow writing there, or choose another checkpoint.dir; older snapshots are as they were",
    )


@contextlib.contextmanager
def new_snapshot(final: Path) -> Iterator[Path]:
    """An empty directory that becomes `final` when all has gone well inside, and is removed otherwise.

    Call with the lock held. A snapshot of that name that is there already is replaced.
    """
    folder = final.with_name(_WRITING + final.name)
    folder.mkdir()
    try:
        yield folder
        sync(folder)
        # No directory can be renamed over another one. Until the new one is there the old one can be found as .old.
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
    """Remove a snapshot: first its name, so that nobody finds a part of it, then its files."""
    shutil.rmtree(path.rename(path.with_name(_REMOVING + path.name)))


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path)
        elif path.suffix == ".old" and _NAME.fullmatch(path.name) and path.with_suffix("").exists():
            _remove(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file; the GIL is free meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
