"""CPU and memory use of this process, measured with the standard library only."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

_STATM = Path("/proc/self/statm")
_LEAST_S = 0.5  # between two readings of the CPU; several views read at once


class Usage:
    """CPU and memory of this process."""

    def __init__(self) -> None:
        self._at, self._used_s = time.monotonic(), time.process_time()
        self._cpu: float | None = None

    def cpu(self) -> float | None:
        """Returns CPU time as a share of one core since the previous reading; None at first."""
        now = time.monotonic()
        if (passed_s := now - self._at) >= _LEAST_S:
            used_s = time.process_time()
            self._cpu = (used_s - self._used_s) / passed_s
            self._at, self._used_s = now, used_s
        return self._cpu

    def memory(self) -> int:
        """Returns the resident bytes; without /proc the peak."""
        try:
            return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else most * 1024


HERE = Usage()
