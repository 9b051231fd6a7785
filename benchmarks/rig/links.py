"""Hosts on limited links: network namespaces of this machine, each with a link of its own to one switch.

A host's link carries at most its rate each way (`tc`, a token bucket), and takes a quarter of the latency each way (a
process between two devices, relay.py: not every kernel has netem), so that a packet between two hosts and its answer
take the latency. Needs root, `ip` and `tc`. Whatever ends the block, the namespaces go with it; those of a process that
was killed go when the next begins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...common.errors import UsageError
from .relay import tap
from .server_process import undisturbed

_TAG = "psrace"
_NET_DEV = Path("/proc/net/dev")
DEVICE = "eth0"


class Host(NamedTuple):
    """The network namespace that stands for it, and its address."""

    namespace: str
    address: str


def check_links() -> None:
    """Raise UsageError where there can be no such hosts."""
    if os.geteuid() != 0:
        raise UsageError("limited links are network namespaces, which need root", fix="run it with sudo")
    for name in ("ip", "tc"):
        if shutil.which(name) is None:
            raise UsageError(f"limited links need the command {name}", fix="apt-get install iproute2")
    if not os.access("/dev/net/tun", os.W_OK):
        raise UsageError("limited links need /dev/net/tun, which is missing here", fix="modprobe tun")


@contextlib.contextmanager
def linked_hosts(rates: Sequence[float], latency_ms: float) -> Iterator[list[Host]]:
    """A host for each of `rates` (Mbit/s; 0: unlimited). UsageError where there can be none."""
    check_links()
    _remove_orphans()
    switch = f"{_TAG}{os.getpid()}"
    ends: list[int] = []
    wire = None
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        hosts = [_host(switch, number, rate, ends) for number, rate in enumerate(rates)]
        relay = [sys.executable, "-m", "paramserver.benchmarks.rig.relay", str(latency_ms / 4e3), *map(str, ends)]
        with undisturbed():
            wire = subprocess.Popen(relay, pass_fds=ends, start_new_session=True)
        yield hosts
    finally:
        with undisturbed():  # a second Ctrl-C does not keep the namespaces
            if wire is not None:
                wire.kill()
                wire.wait()
            for end in ends:
                os.close(end)
            _remove(os.getpid())


def link_bytes() -> int:
    """What the link of the host that this process is on has carried, both ways."""
    for line in _NET_DEV.read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            fields = counts.split()
            return int(fields[0]) + int(fields[8])
    return 0


def _host(switch: str, number: int, rate: float, ends: list[int]) -> Host:
    name, address, port = f"{switch}-{number}", f"10.215.0.{number + 1}", f"p{number}"
    _run("ip", "netns", "add", name)
    for namespace, device in ((name, DEVICE), (switch, port)):
        made = f"pr{os.getpid()}{'hs'[device == port]}"
        ends.append(tap(made))
        _run("ip", "link", "set", made, "netns", namespace)
        _run("ip", "-n", namespace, "link", "set", made, "name", device, "up")
        if rate:
            bucket = ("tbf", "rate", f"{rate:g}mbit", "burst", "128kb", "latency", "200ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)
    _run("ip", "-n", switch, "link", "set", port, "master", "br0")
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return Host(name, address)


def _remove_orphans() -> None:
    for number in {int(name.partition("-")[0].removeprefix(_TAG)) for name in _namespaces()}:
        if not Path(f"/proc/{number}").exists():
            _remove(number)


def _remove(number: int) -> None:
    for name in _namespaces():
        if name.partition("-")[0] == f"{_TAG}{number}":
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, start_new_session=True, check=False)


def _namespaces() -> list[str]:
    listed = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(_TAG)]


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True, check=False)
    if done.returncode:
        raise UsageError(
            f"{' '.join(argv)}: {done.stderr.strip()}", fix="a kernel with network namespaces, tun and tbf"
        )
