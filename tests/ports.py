"""Ports for programs that bind one later themselves."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST, _COUNT = 20_000, 12_000  # below those that the kernel gives to clients and to port 0


def free_port() -> int:
    """A free port of loopback. No other call on this machine returns it for the next 12,000 calls: a port that the
    kernel chose and that was closed again may be given to somebody else before it is used."""
    with (Path(tempfile.gettempdir()) / f"paramserver-tests-{os.getuid()}.port").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        newest = int(file.read() or 0)
        while True:
            newest = (newest + 1) % _COUNT
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", _FIRST + newest))
                    break
                except OSError:
                    continue
        file.truncate(0)
        file.write(str(newest))
    return _FIRST + newest
