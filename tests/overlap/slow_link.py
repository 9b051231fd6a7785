"""Two network namespaces of this machine, joined by a link with a rate: two machines on a slow network.

Needs root, and the commands `ip` and `tc` (iproute2). Whatever happens, the namespaces are gone at the
end, and with them the link.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

# Token bucket of both ends: a burst the link passes at full speed, and how long a packet may queue.
BURST = "256kb"
LATENCY = "50ms"


class LinkError(Exception):
    """There can be no slow link here; the text says why."""


class Link(NamedTuple):
    """The command prefixes that run a program at either end, and the address of the near end."""

    near: tuple[str, ...]
    far: tuple[str, ...]
    host: str


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can be tried."""
    if os.geteuid() != 0:
        return "a slow link needs root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"a slow link needs the command {' and '.join(missing)} (iproute2)" if missing else None


@contextlib.contextmanager
def slow_link(rate: str) -> Iterator[Link]:
    """A link of `rate` in each direction, as tc writes it ("400mbit"). LinkError where it cannot be made."""
    reason = why_not()
    if reason is not None:
        raise LinkError(reason)
    names = [f"slow{os.getpid()}-{end}" for end in ("near", "far")]
    devices = [f"sl{os.getpid()}{end}" for end in ("n", "f")]  # at most 15 characters
    host, peer = "10.213.77.1", "10.213.77.2"
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = ["netns", names[0], "type", "veth", "peer", "name", devices[1], "netns", names[1]]
        _run("ip", "link", "add", devices[0], *ends)
        for name, device, address in zip(names, devices, (host, peer), strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", device)
            for each in ("lo", device):
                _run("ip", "-n", name, "link", "set", each, "up")
            _run(
                "tc", "-n", name, "qdisc", "add", "dev", device, "root",
                "tbf", "rate", rate, "burst", BURST, "latency", LATENCY,
            )  # fmt: skip
        yield Link(*(("ip", "netns", "exec", name) for name in names), host)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise LinkError(f"{' '.join(argv)}: {done.stderr.strip()}")
