"""Hosts that are network namespaces of this machine, each with a link of its own to one switch.

Needs root, and the commands `ip` and `tc` (iproute2). Whatever happens, the namespaces are gone at the
end, and with them the links.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

BURST = "256kb"
LATENCY = "100ms"


class HostsError(Exception):
    """There can be no such hosts here; the text says why."""


class Host(NamedTuple):
    """The command prefix that runs a program on it, and its address."""

    prefix: tuple[str, ...]
    address: str


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can be tried."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"hosts of their own need the command {' and '.join(missing)} (iproute2)" if missing else None


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """So many hosts; each sends and receives at most `rate`, as tc writes it ("1gbit"). HostsError otherwise."""
    reason = why_not()
    if reason is not None:
        raise HostsError(reason)
    tag = os.getpid() % 100_000
    switch, names = f"psw{tag}", [f"psh{tag}-{index}" for index in range(count)]
    shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        found = []
        for index, name in enumerate(names):
            port, address = f"p{index}", f"10.214.{tag % 200}.{index + 1}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)  # what the host sends
            _run("tc", "-n", switch, "qdisc", "add", "dev", port, *shape)  # and receives
            found.append(Host(("ip", "netns", "exec", name), address))
        yield found
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise HostsError(f"{' '.join(argv)}: {done.stderr.strip()}")
