"""What somebody without any secret finds out, and can do, at the ports of a job."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil

from paramserver.common.config.addresses import is_loopback

# The protocol of torch's TCPStore: TCPStoreBackend.hpp.
_VALIDATE = struct.pack("<BI", 0, 0x3C85F7CE)
_SET, _COUNT = 1, 7
_PATIENCE_S = 0.5

Place = tuple[str, int]


def listens(pids: Iterable[int]) -> set[Place]:
    """Where these processes and their children listen."""
    found = set()
    for pid in pids:
        for module in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            found |= {
                (c.laddr.ip, c.laddr.port) for c in module.net_connections("inet") if c.status == psutil.CONN_LISTEN
            }
    return found


def on_other_addresses(places: Iterable[Place]) -> list[Place]:
    """Those that other machines could reach."""
    return [address for address in places if not is_loopback(address[0].removeprefix("::ffff:"))]


def num_keys(address: Place) -> int:
    """How many keys of torch's store a stranger can count there, after writing one; 0 where none speaks to it."""
    with socket.create_connection(address, 5) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            value = struct.pack("<BQ", _SET, 8) + b"stranger" + struct.pack("<Q", 1) + b"x"
            connection.sendall(_VALIDATE + value + struct.pack("<B", _COUNT))
            (found,) = struct.unpack("<q", connection.recv(8))
        except (OSError, struct.error):
            return 0
        return int(found)


@contextmanager
def silent(places: Iterable[Place], each: int = 20) -> Iterator[None]:
    """Connections that say nothing, and one that says what nobody understands, to each of these, meanwhile."""
    open_now = []
    try:
        for address in places:
            open_now += [socket.create_connection(address, 5) for _ in range(each)]
            open_now[-1].sendall(b"GET / HTTP/1.0\r\n\r\n" * 8)
        yield
    finally:
        for item in open_now:
            item.close()
