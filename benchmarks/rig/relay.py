"""A delay in user space, where a kernel has no netem: packets of one device are written to another a while later.

    python -m paramserver.benchmarks.rig.relay SECONDS DESCRIPTOR DESCRIPTOR [DESCRIPTOR DESCRIPTOR]...

A device of layer 3 (`tun`) carries packets one by one. A device of layer 2 (`tap`) is a network card that leaves
cutting data into packets to others, so that tens of kilobytes pass at once, and 100 Mbit/s cost little of a core.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_MOST_BYTES = 66_000  # what a tap hands over at once: an IP packet of 64 KiB and its headers


class Way:
    """One direction: packets read at `source` are written to `target` later, or dropped."""

    def __init__(self, source: int, target: int, rate: float, delay_s: float, loss: float) -> None:
        self.source, self._target = source, target
        self._rate, self._delay_s, self._loss = rate * 1e6 / 8, delay_s, loss / 100
        self._queue_s = max(0.02, 4 * delay_s)
        self._free_at = 0.0  # when all that is queued will have left
        self._on_its_way: deque[tuple[float, bytes]] = deque()
        self._chance = random.Random(0)

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                packet, now = os.read(self.source, _MOST_BYTES), time.monotonic()
                if self._free_at > now + self._queue_s or self._chance.random() < self._loss:
                    continue
                self._free_at = max(self._free_at, now) + len(packet) / self._rate
                self._on_its_way.append((self._free_at + self._delay_s, packet))

    def pass_on(self, now: float) -> float:
        """Deliver the packets that are due, and return the time of the next."""
        while self._on_its_way and self._on_its_way[0][0] <= now:
            with contextlib.suppress(BlockingIOError):
                os.write(self._target, self._on_its_way.popleft()[1])
        return self._on_its_way[0][0] if self._on_its_way else now + 1


def relay(ways: list[Way]) -> None:
    """Relay packets until this process is killed, or the one that started it has gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        now = time.monotonic()
        due = min(way.pass_on(now) for way in ways)
        readable, _, _ = select.select([way.source for way in ways], [], [], max(0.0, due - time.monotonic()))
        for way in ways:
            if way.source in readable:
                way.take()


def tun(name: str) -> int:
    """A new layer-3 device; returns the descriptor of its packets."""
    return _device(name, _IFF_TUN)


def tap(name: str) -> int:
    """A new layer-2 device that leaves segmentation and checksums to others; returns the descriptor of its frames."""
    descriptor = _device(name, _IFF_TAP | _IFF_VNET_HDR)
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return descriptor


def _device(name: str, kind: int) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), kind | _IFF_NO_PI))
    return descriptor


def main() -> None:
    """The two ends of each link are joined, with the delay each way; before all other work, for it is a part of the
    network."""
    delay_s, ends = float(sys.argv[1]), [int(end) for end in sys.argv[2:]]
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    pairs = list(zip(ends[::2], ends[1::2], strict=True))
    relay([Way(a, b, math.inf, delay_s, 0) for here, there in pairs for a, b in ((here, there), (there, here))])


if __name__ == "__main__":
    main()
