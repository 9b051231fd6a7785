"""A process of a few lines beside each one that is started on another machine, and holds it by its standard input.

Whoever starts the leash keeps the other end: `t` asks the process to end in good order, `k` and the end of the
input kill it with everything it started. So nothing is left when the launcher is gone, however it went. It is
started as a file of its own, without the package: python -I -S leash.py ARGV...

Its output is the process's, with two lines of its own, which begin with MARK: `step ID` (of Slurm) at once, and
`end CODE` last, negative for a signal as subprocess has it. What comes before MARK in that last line is the
process's own, a line without an end.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress

MARK = "\x1eps-launch "
_CANNOT_START = 126
# The place in a step of one task, which is not the process's place in the run.
_STEPS_OWN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")


def main(argv: list[str]) -> None:
    """Run the process to its end."""
    _say(f"step {os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}")
    # Set before the process exists, so that no end and no request is missed.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    asked: list[int] = []
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number) if number != signal.SIGCHLD else None)
    env = {name: value for name, value in os.environ.items() if name not in _STEPS_OWN}
    try:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", flush=True)
        _say(f"end {_CANNOT_START}")
        return
    _hold(process, woken, asked)
    _kill_group(process.pid)  # its number stays the group's as long as anything it started is alive
    _say(f"end {process.returncode}")


def _hold(process: subprocess.Popen[bytes], woken: int, asked: list[int]) -> None:
    """Carry out what is asked for until the process has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(woken, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while process.poll() is None:
            for key, _ in selector.select():
                words = os.read(key.fd, 64)
                if key.fd == woken:
                    if asked:  # by Slurm: the job is cancelled, or its time is over
                        asked.clear()
                        process.terminate()
                    continue
                if b"t" in words:
                    process.terminate()
                if not words:
                    selector.unregister(0)
                if not words or b"k" in words:
                    _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(1, f"{MARK}{text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
