"""Runs whose processes are on hosts of their own: network namespaces of this machine, each with a link to one switch.

Needs root, and the commands `ip` and `tc` (iproute2). Whatever happens, the namespaces are gone at the
end, and with them the links.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paramserver.tests.cluster import Cluster

BURST = "256kb"
LATENCY = "100ms"
EXIT_SKIPPED = 77  # as automake's tests say it


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


def run_once(servers: list[Host], workers: list[Host], settings: list[str]) -> dict[str, Any]:
    """Runs a server of as many shards as it has hosts, and a worker on each of the others; returns the summary."""
    flags = ["--set=server.insecure=true", "--set=worker.transports=direct,grpc"]
    flags += [f"--set={setting}" for setting in settings]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            for number, host in enumerate(servers):
                cluster.prefix = host.prefix
                listen = ("--listen", f"{host.address}:0", *flags)
                if number:
                    cluster.shard(number, len(servers), *listen)
                else:
                    cluster.server("--shards", str(len(servers)), "--summary", "s.json", *listen)
            for rank, host in enumerate(workers):
                cluster.prefix = host.prefix
                cluster.worker(rank, *flags)
            for process in cluster.processes:
                if process.wait():
                    raise RuntimeError(f"{process.name}:\n{process.output[-3000:]}")
        finally:
            cluster.stop()
        return dict(json.loads((cluster.folder / "s.json").read_text()))


def report(
    options: Namespace, count: int, measure: Callable[[list[Host]], list[dict[str, Any]]], title: str, show: str
) -> None:
    """Measures on `count` hosts and prints the rows, each as `show` formats it; exits with 77 where it cannot."""
    # Ended from outside, the namespaces still have to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with hosts(count, options.rate) as machines:
            rows = measure(machines)
    except HostsError as error:
        print(f"SKIPPED: {error}", file=sys.stderr)
        sys.exit(EXIT_SKIPPED)
    if options.json:
        print(json.dumps(rows))
        return
    print(title)
    for row in rows:
        print("  " + show.format_map(row))
