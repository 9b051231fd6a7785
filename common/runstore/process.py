"""Which process writes a run, so that whoever reads can tell whether it still does; on what machine, of which code."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_LOST_AFTER_HEARTBEATS = 5
_LOST_AFTER_S = 30.0
_GIT_S = 2.0


@cache
def this_host() -> str:
    """What has the same process numbers: a boot of a machine, in it a container."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return " ".join(parts)


def this_process() -> str:
    """Its number, and when it started: a number is given again."""
    return f"{os.getpid()} {_started(os.getpid())}"


def still_writes(host: str, process: str, heard_at: float, heartbeat_s: float) -> bool:
    """Whether the process that said so of itself may go on writing: on this host whether it runs, of another one
    whether it was heard of lately."""
    number, _, started = process.partition(" ")
    if host == this_host() and number.isdecimal():
        return _started(int(number)) == started != ""
    return time.time() - heard_at < max(_LOST_AFTER_S, _LOST_AFTER_HEARTBEATS * heartbeat_s)


def _started(number: int) -> str:
    """In ticks since the boot; empty for a process that is not there, or a zombie."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def machine(versions: Mapping[str, str]) -> dict[str, Any]:
    """Of this process; `versions` of the packages that matter."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "host": platform.node(), "system": platform.platform(), "num_cores": os.cpu_count(), "memory_bytes": pages,
        "python": platform.python_version(), **versions,
    }  # fmt: skip


def commit_of(folder: Path) -> str:
    """Returns the commit of a folder's Git checkout; empty without Git or a checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
