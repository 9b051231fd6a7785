"""How a local process ends with its launcher, and with everything it has started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Found before the fork: between fork and exec nothing may be loaded.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(group, signal.SIGKILL)


def end_with(parent: int) -> Callable[[], None] | None:
    """What a new process does before exec: ask the kernel to be killed when its parent ends."""
    if _prctl is None:
        return None

    def ask() -> None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent ended before the request
            os.kill(os.getpid(), signal.SIGKILL)

    return ask
