"""The connections of a group, which its members may want to end while they wait in a collective.

Gloo lets go of a collective when a connection of its group ends, and by nothing else: `abort()` leaves it to wait for a
member that stands still, up to its timeout. What it connects with it does not say. But each member's device listens on
a port of its own, which is new when the device is made; and every connection of the group has one of these ports.
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
_OPEN = "/dev/fd"  # on Linux and macOS: what this process has open


def listening(make: Callable[[], Made]) -> tuple[Made, int]:
    """What is made, and the port on which it listens from then on; 0 where that cannot be told.

    What is made listens on exactly one socket that was not there before. Where another thread has opened one meanwhile
    nobody can tell which is which, and it is made again."""
    with _one_at_a_time:
        for _ in range(_ATTEMPTS):
            before = set(_listeners())
            made = make()
            found = {number: port for number, port in _listeners().items() if number not in before}
            if len(found) <= 1:
                break
    return made, next(iter(found.values())) if len(found) == 1 else 0


def cut(ends: set[Address]) -> None:
    """End all connections of this process that have one of these at one of their ends."""
    for item in _sockets():
        with item, suppress(OSError):  # a socket that listens has no other end
            if ends & {_plain(item.getsockname()), _plain(item.getpeername())}:
                item.shutdown(socket.SHUT_RDWR)


def _plain(address: Any) -> Address:
    host, port, *_ = address
    return host.removeprefix("::ffff:"), port


def _listeners() -> dict[int, int]:
    """Port of each socket of this process that listens, by the number that the system gives to no other socket."""
    found: dict[int, int] = {}
    for item in _sockets():
        with item, suppress(OSError):
            if item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(item.fileno()).st_ino] = item.getsockname()[1]
    return found


def _sockets() -> Iterator[socket.socket]:
    """Of the internet's families, each under a number of its own: the process's is left open."""
    with suppress(OSError):
        for number in map(int, os.listdir(_OPEN)):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue  # `socket` would refuse its copy, and leave it open
                item = socket.socket(fileno=os.dup(number))
                if item.family in (socket.AF_INET, socket.AF_INET6):
                    yield item
                else:
                    item.close()
