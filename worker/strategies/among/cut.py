"""The connections of a group, which its members may want to end while they wait in a collective.

Gloo lets go of a collective when a connection of its group ends, and by nothing else: `abort()` leaves it to wait for a
member that stands still, up to its timeout. What it connects with it does not say. But each member's device listens on
a port of its own, which is new when the device is made; and every connection of the group has one of these ports.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

Made = TypeVar("Made")
Address = tuple[str, int]

_OPEN = "/dev/fd"  # on Linux and macOS: what this process has open


def listening(make: Callable[[], Made]) -> tuple[Made, int]:
    """What is made, and the port on which it listens from then on; 0 where that cannot be told."""
    before = set(_listeners())
    made = make()
    found = set(_listeners()) - before
    return made, found.pop() if len(found) == 1 else 0


def cut(ends: set[Address]) -> None:
    """End all connections of this process that have one of these at one of their ends."""
    for one in _sockets():
        with one, suppress(OSError):  # a socket that listens has no other end
            if ends & {_plain(one.getsockname()), _plain(one.getpeername())}:
                one.shutdown(socket.SHUT_RDWR)


def _plain(address: Any) -> Address:
    host, port, *_ = address
    return host.removeprefix("::ffff:"), port


def _listeners() -> Iterator[int]:
    for one in _sockets():
        with one, suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield one.getsockname()[1]


def _sockets() -> Iterator[socket.socket]:
    """Of the internet's families, each under a number of its own: the process's is left open."""
    with suppress(OSError):
        for number in map(int, os.listdir(_OPEN)):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue  # `socket` would refuse its copy, and leave it open
                one = socket.socket(fileno=os.dup(number))
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one
                else:
                    one.close()
