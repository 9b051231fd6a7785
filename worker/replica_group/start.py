"""Starts the processes of one worker, as torchrun does (`--nproc-per-node G --standalone`), for ps-launch.

    python -m paramserver.worker.replica_group G ARGUMENTS...     G times: python ARGUMENTS...

They live and end together: when one fails the others are ended, and the exit code is that of the first, which ps-launch
goes by (torchrun's is 1 whatever happened). So nothing is started again here. It needs no torch, which takes seconds to
load.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1  # prctl.h
_LOOK_S = 0.05
_SAY_S = 0.5  # for the others to find out by themselves, and to say whom they lost
_END_S = 5.0  # to go in good order


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends as the first of them that fails does."""
    size, *command = sys.argv[1:] if arguments is None else arguments
    raise SystemExit(run(int(size), command))


def run(size: int, command: Sequence[str]) -> int:
    """Start `size` processes and wait for all; the exit code."""
    with held_port() as held:
        return _run(size, command, held.getsockname()[1])


def _run(size: int, command: Sequence[str], port: int) -> int:
    env = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    first = int(os.environ.get("PS_WORKER__LOCAL_RANK", 0)) * size
    started: list[subprocess.Popen[bytes]] = []
    told = 0  # a signal to this process

    def tell(number: int, _: FrameType | None) -> None:
        nonlocal told
        told = told or number
        _end(started, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PS_WORKER__LOCAL_RANK": str(first + rank)}
        argv = [sys.executable, *command]
        started.append(subprocess.Popen(argv, env=env | own, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent))
        if told:
            _end(started, told)
    return _wait(started)


def _wait(started: list[subprocess.Popen[bytes]]) -> int:
    """For the end of all; of the first that fails the exit code, as a shell has it."""
    code, failed_at = 0, 0.0
    while None in [popen.poll() for popen in started]:  # each is looked at, also behind one that stands still
        if not code:
            code = next((popen.returncode for popen in started if popen.returncode), 0)
            failed_at = time.monotonic()
        elif time.monotonic() - failed_at > _SAY_S + _END_S:
            _end(started, signal.SIGKILL)
        elif time.monotonic() - failed_at > _SAY_S:
            _end(started, signal.SIGTERM)
        time.sleep(_LOOK_S)
    code = code or next((popen.returncode for popen in started if popen.returncode), 0)
    return code if code >= 0 else 128 - code


def _end(started: list[subprocess.Popen[bytes]], number: int) -> None:
    for popen in started:
        if popen.poll() is None and (number, popen.pid) not in _told:
            _told.add((number, popen.pid))
            popen.send_signal(number)


_told: set[tuple[int, int]] = set()  # a second SIGTERM would mean: now


def held_port() -> socket.socket:
    """Bound, and not listening: the system gives its port to nobody else meanwhile, and group rank 0's store, which is
    told of it, may listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _die_with_parent() -> None:
    """A starter that is killed takes them along (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
