"""A network namespace for the job, in which packets can be dropped without disturbing the machine.

The calling process moves into the namespace. All processes that it starts later are in it. It ends with them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

_CLONE_NEWNET = 0x40000000  # linux/sched.h


def enter_own_network() -> str | None:
    """Move this process into a new network with a loopback. Returns why that failed, None if it did not."""
    if os.geteuid() != 0:
        return "a network namespace needs root"
    if missing := [program for program in ("ip", "iptables") if shutil.which(program) is None]:
        return f"there is no {' and no '.join(missing)}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        return f"no network namespace: {os.strerror(ctypes.get_errno())}"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    probe = subprocess.run(["iptables", "-w", "-L", "-n"], capture_output=True, text=True, check=False)
    return f"iptables: {probe.stderr.strip()}" if probe.returncode else None
