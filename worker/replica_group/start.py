"""Starts the processes of one worker for ps-launch, as torchrun does (`--nproc-per-node G --standalone`).

    python -m paramserver.worker.replica_group G ARGUMENTS...     G times: python ARGUMENTS...

The processes end together: when one fails, the others are ended. The exit code is that of the process that failed
first, which ps-launch needs (torchrun's is always 1). The others may lose it and end with 15 before this process looks.
Nothing is restarted here. This module does not import torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from ...common.errors import UnreachableError
from ..ownership import die_with_parent

_LOOK_S = 0.05
_SAY_S = 0.5  # for the others to notice and to log which process they lost
_END_S = 5.0  # for the others to end in good order


def main() -> None:
    """Start the processes and wait for them. Exit with the code of the first process that fails."""
    size, argv = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    reserved = reserved_port()
    env = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserved.getsockname()[1]),
    }
    first = int(os.environ.get("PS_WORKER__LOCAL_RANK", 0)) * size
    started: list[subprocess.Popen[bytes]] = []
    received = 0  # the number of a signal to this process

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = received or number
        _end(started, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    for rank in range(size):
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "PS_WORKER__LOCAL_RANK": str(first + rank)}
        started.append(subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent))
        if received:
            _end(started, received)
    raise SystemExit(_wait(started))


def _wait(started: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes. Returns the exit code of the first failure, as a shell reports it.

    A process that loses another one may be seen to end before that one. So its code counts only if no other failure
    follows within `_SAY_S`, before this process ends any.
    """
    code, failed_at = 0, float("inf")
    while True:
        is_over = None not in [popen.poll() for popen in started]  # polls all processes, also after one that hangs
        failed_s = time.monotonic() - failed_at
        if code in (0, UnreachableError.exit_code) and failed_s <= _SAY_S:
            # The failure that led to the others: not 15 if there is another, and a signal first.
            codes = [popen.returncode for popen in started if popen.returncode]
            code = min(codes, key=lambda code: (code == UnreachableError.exit_code, code), default=0)
            failed_at = min(failed_at, time.monotonic()) if code else failed_at
        if is_over:
            return code if code >= 0 else 128 - code
        if failed_s > _SAY_S:
            _end(started, signal.SIGTERM if failed_s <= _SAY_S + _END_S else signal.SIGKILL)
        time.sleep(_LOOK_S)


def _end(started: list[subprocess.Popen[bytes]], number: int) -> None:
    for popen in started:
        if popen.poll() is None and (number, popen.pid) not in _sent:
            _sent.add((number, popen.pid))
            popen.send_signal(number)


_sent: set[tuple[int, int]] = set()  # (signal, process) pairs: a second SIGTERM would end a process at once


def reserved_port() -> socket.socket:
    """A bound socket that does not listen. The system gives its port to no other process.

    Group rank 0's store may listen on this port.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
