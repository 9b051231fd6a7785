"""Identifies the process, machine and code of a run, so that readers can tell whether the run is alive."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ..version import installed

_LOST_AFTER_HEARTBEATS = 5
_LOST_AFTER_S = 30.0
_GIT_S = 2.0
_DIGITS = 12  # of a file's digest
_PACKAGES = ("torch", "numpy", "grpcio")


@cache
def this_host() -> str:
    """Returns a name for this PID namespace: host name, boot id and container namespace."""
    boot = container = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        container = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {container}"


def this_process() -> str:
    """Returns the PID and its start time, because the system reuses PIDs."""
    return f"{os.getpid()} {_started(os.getpid())}"


def still_writes(host: str, process: str, heard_at: float, heartbeat_s: float) -> bool:
    """Returns whether the process may still write the run.

    On this host: whether the process runs. On another host: whether its last heartbeat is recent.
    """
    number, _, started = process.partition(" ")
    if host == this_host() and number.isdecimal():
        return _started(int(number)) == started != ""
    return time.time() - heard_at < max(_LOST_AFTER_S, _LOST_AFTER_HEARTBEATS * heartbeat_s)


def _started(number: int) -> str:
    """Returns the start time in ticks since boot; empty if the process is missing or a zombie."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def machine() -> dict[str, Any]:
    """Returns a description of this machine, with the versions of packages."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "host": platform.node(), "system": platform.platform(), "num_cores": os.cpu_count(), "memory_bytes": pages,
        "python": platform.python_version(), **{name: installed(name) for name in _PACKAGES},
    }  # fmt: skip


def code_of(file: Path, *, asks_git: bool) -> dict[str, Any]:
    """Returns a digest of a file, and the commit of its Git checkout if it has one and `asks_git`."""
    try:
        found: dict[str, Any] = {"digest": hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGITS]}
    except OSError:
        return {}
    if asks_git and (commit := _git(file.parent, "rev-parse", "HEAD")):
        changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
        found |= {"commit": commit, "is_dirty": None if changes is None else bool(changes)}
    return found


def _git(folder: Path, *command: str) -> str | None:
    """Returns the output of a Git command in a folder; None if it fails."""
    words = ["git", "-C", str(folder), *command]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
