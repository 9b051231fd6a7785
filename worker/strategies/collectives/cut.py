"""Ends the connections of a Gloo group while its members wait in a collective.

A Gloo collective ends only when a connection of its group ends. After `abort()` it still waits for a member that hangs,
up to its timeout. Gloo does not expose its connections. But each member's device listens on a new port of its own, and
every connection of the group uses one of these ports.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

Made = TypeVar("Made")
Address = tuple[str, int]

_one_at_a_time = threading.Lock()
_ATTEMPTS = 100
_OPEN = "/dev/fd"  # the open files of this process, on Linux and macOS


def listening(make: Callable[[], Made]) -> tuple[Made, int]:
    """Call `make`, which opens one listening socket. Returns the result and the port; 0: the port is unknown.

    If another thread opened a socket meanwhile, `make` is called again.
    """
    with _one_at_a_time:
        for _ in range(_ATTEMPTS):
            before = set(_listeners())
            made = make()
            found = {number: port for number, port in _listeners().items() if number not in before}
            if len(found) <= 1:
                break
    return made, next(iter(found.values())) if len(found) == 1 else 0


def cut(ends: set[Address]) -> None:
    """End all connections of this process that have one of these addresses at either end."""
    for item in _sockets():
        with item, suppress(OSError):  # a listening socket has no peer
            if ends & {_plain(item.getsockname()), _plain(item.getpeername())}:
                item.shutdown(socket.SHUT_RDWR)


def _plain(address: Any) -> Address:
    host, port, *_ = address
    return host.removeprefix("::ffff:"), port


def _listeners() -> dict[int, int]:
    """The port of each listening socket of this process, by the socket's inode."""
    found: dict[int, int] = {}
    for item in _sockets():
        with item, suppress(OSError):
            if item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(item.fileno()).st_ino] = item.getsockname()[1]
    return found


def _sockets() -> Iterator[socket.socket]:
    """Copies of this process's internet sockets. Closing a copy leaves the original open."""
    with suppress(OSError):
        for number in map(int, os.listdir(_OPEN)):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue  # `socket` would raise and leave the copy open
                item = socket.socket(fileno=os.dup(number))
                if item.family in (socket.AF_INET, socket.AF_INET6):
                    yield item
                else:
                    item.close()
