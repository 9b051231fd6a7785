"""`PS_TESTS_LATE=0.5 make test-slow`: whoever looks at a process, or kills it, comes half a second late, as on a
machine that is busy with others. A test that fails then, and not by its deadline, was decided by who was faster: it
needs a gate, a slower step, or more of them.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

LATE_S = float(os.environ.get("PS_TESTS_LATE", "0"))


def come_late() -> None:
    """After something has been waited for, and before a signal."""
    if LATE_S:
        time.sleep(LATE_S)


def signal_late() -> None:
    """From now on every signal that this process sends is."""
    send, kill = subprocess.Popen.send_signal, os.kill

    def send_late(popen: subprocess.Popen[Any], number: int) -> None:
        come_late()
        send(popen, number)

    def kill_late(pid: int, number: int) -> None:
        if number:
            come_late()
        kill(pid, number)

    subprocess.Popen.send_signal = send_late  # type: ignore[method-assign, assignment]
    os.kill = kill_late  # type: ignore[assignment]
