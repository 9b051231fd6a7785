"""On what a figure was measured: the machine by cores and clock, never by its name, and the versions."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..common.errors import UsageError

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


def versions() -> dict[str, str]:
    return {"torch": version("torch"), "grpcio": version("grpcio"), "python": platform.python_version()}


def memory_of(pid: int) -> dict[str, int]:
    """`rss` and `peak` (VmHWM) of a process in bytes. UsageError where the system has no /proc."""
    text = _read(_PROC / str(pid) / "status")
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB", text, re.MULTILINE))
    if len(found) != 2:
        raise UsageError("ps-bench memory reads /proc/PID/status, which this system does not have", fix="use Linux")
    return {"rss": int(found["VmRSS"]) * 1024, "peak": int(found["VmHWM"]) * 1024}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
