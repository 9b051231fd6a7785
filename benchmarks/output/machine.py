"""Describes where a metric was measured: cores and clock, never the machine's name, and versions."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...common.errors import UsageError

_PROC = Path("/proc")


def machine() -> dict[str, Any]:
    """Cores this process may use, clock in MHz and model of the processor (None where the system does not say)."""
    text = _read(_PROC / "cpuinfo")
    clocks = [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "clock_mhz": round(max(clocks)) if clocks else None,
        "model": model.group(1).strip() if model else platform.processor() or platform.machine(),
    }


def name() -> str:
    """Cores and clock for a file's name, e.g. `2x2.6GHz`; the cores alone where there is no clock to be had."""
    found = machine()
    clock = f"{found['clock_mhz'] / 1000:.1f}GHz" if found["clock_mhz"] else "cores"
    return f"{found['cores']}x{clock}"


def versions() -> dict[str, str]:
    return {"torch": version("torch"), "grpcio": version("grpcio"), "python": platform.python_version()}


def memory_of(pid: int) -> dict[str, int]:
    """Of a process, bytes: `rss`, `peak` (VmHWM), and of `rss` what is `anonymous` and what is `shared` memory.

    UsageError where the system has no /proc.
    """
    text = _read(_PROC / str(pid) / "status")
    found = dict(re.findall(r"^(VmRSS|VmHWM|RssAnon|RssShmem):\s*(\d+) kB", text, re.MULTILINE))
    if len(found) != 4:
        raise UsageError("ps-bench reads /proc/PID/status, which this system does not have", fix="use Linux")
    names = {"rss": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon", "shared": "RssShmem"}
    return {name: int(found[key]) * 1024 for name, key in names.items()}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far. UsageError where the system has no /proc."""
    text = _read(_PROC / str(pid) / "stat")
    if not text:
        raise UsageError("ps-bench reads /proc/PID/stat, which this system does not have", fix="use Linux")
    after_name = text.rpartition(")")[2].split()  # the name may hold spaces
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """Memory that can be had without swapping; 0 where the system does not say."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read(_PROC / "meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
