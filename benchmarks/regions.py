"""Trains on three hosts of this machine, a server and two regions behind slow links: flat, and with relays.

    sudo python -m paramserver.benchmarks.regions [--rate 10] [--latency 40] [--workers 3] [--steps 96] [--every 32]
        [--asynchronous]

Each host is a network namespace. The link of a region carries RATE Mbit/s each way, and a packet and its answer take
LATENCY ms. Within a region there is no limit. Every command is printed before it runs, so that it can be copied to real
hosts. The table has the bytes that each border carried, headers included, as the kernel counts them. Needs root, `ip`
and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..common.errors import ParamServerError
from .rig.forks import Program, forking, running
from .rig.links import DEVICE, Host, linked_hosts
from .rig.server_process import clean_environment

_PORT, _MODULES = 50051, {"ps-server": "paramserver.ps.main", "ps-worker": "paramserver.worker.main"}
_END_S = 3600.0


class Side(NamedTuple):
    """One way to train: flags of the server above, and of the relays. No relay: the workers join the server."""

    name: str
    above: tuple[str, ...]
    relay: tuple[str, ...] | None = None
    worker: tuple[str, ...] = ()  # flags of the workers


_Q4 = ("--set", "upstream.codec=q4", "--set", "upstream.reply_codec=q4")


_FLAT_Q4 = ("--set", "worker.codec=q4", "--set", "worker.reply_codec=q4")


def _sides(every: int, asynchronous: bool) -> list[Side]:
    own_steps = ("--local-steps", str(every))
    sides = [
        Side("flat, sync", ("--mode", "sync")),
        Side("regions, sync", ("--mode", "sync"), ("--mode", "sync")),
        Side(f"regions, diloco {every} q4", ("--mode", "diloco", *own_steps), ("--mode", "sync", *_Q4)),
    ]
    if asynchronous:
        above = ("--mode", "async_diloco", *own_steps)
        sides += [
            Side("flat, async_diloco", above),
            Side("flat, async_diloco q4", above, worker=_FLAT_Q4),
            Side("regions, async_diloco q4", above, ("--mode", "sync", *_Q4)),
        ]
    return sides


def _commands(side: Side, hosts: Sequence[Host], asked: argparse.Namespace) -> list[tuple[Host, list[str]]]:
    """Returns each command line and its host: the server, the relays, the workers."""
    top, *regions = hosts
    num = asked.workers
    size = len(regions) if side.relay is not None else num * len(regions)
    length = ["--steps", str(asked.steps), "--task", asked.task, "--summary", "summary.json"]
    found = [(top, ["ps-server", "--listen", f"{top.address}:{_PORT}", "--workers", str(size), *side.above, *length])]
    for region, host in enumerate(regions):
        if side.relay is not None:
            where = ["--listen", f"{host.address}:{_PORT}", "--upstream", f"{top.address}:{_PORT}"]
            number = ["--upstream-rank", str(region), "--workers", str(num)]
            found.append((host, ["ps-server", *where, *number, *side.relay]))
        for worker in range(num):
            server, rank = (host, worker) if side.relay is not None else (top, region * num + worker)
            found.append(
                (host, ["ps-worker", "--server", f"{server.address}:{_PORT}", "--rank", str(rank), *side.worker])
            )
    return [(host, [*command, *(f"--set={item}" for item in asked.set)]) for host, command in found]


def _carried(host: Host) -> int:
    """Returns the bytes that the link of a host has carried so far, both ways."""
    shown = subprocess.check_output(("ip", "-n", host.namespace, "-s", "-j", "link", "show", DEVICE), text=True)
    counts = json.loads(shown)[0]["stats64"]
    return int(counts["rx"]["bytes"]) + int(counts["tx"]["bytes"])


def _train(side: Side, hosts: Sequence[Host], asked: argparse.Namespace) -> dict[str, Any]:
    """Run one side. Returns its summary, with the bytes of each border as `border`."""
    environment = {**clean_environment(), "PS_SERVER__INSECURE": "true", "PS_OUTPUT__STORE": "false"}
    environment |= {"PS_WORKER__THREADS": "1", "PS_LOG__LEVEL": "warning"}
    with tempfile.TemporaryDirectory(prefix="ps-regions-") as folder:
        programs = []
        for number, (host, (command, *argv)) in enumerate(_commands(side, hosts, asked)):
            print(f"  [{'above' if host == hosts[0] else f'region {hosts.index(host)}'}] {command} {' '.join(argv)}")
            is_within = side.relay is not None and command == "ps-worker"
            transports = {} if is_within else {"PS_WORKER__TRANSPORTS": "direct,grpc"}  # hosts share no memory
            argv = [word if word != "summary.json" else f"{folder}/{word}" for word in argv]
            log = Path(folder, f"{command}{number}")
            programs.append((host, Program(_MODULES[command], argv, environment | transports, log)))
        sys.stdout.flush()
        before = [_carried(host) for host in hosts[1:]]
        with running(programs) as processes:
            for process, (_, program) in zip(processes, programs, strict=True):
                process.join(_END_S)
                if process.exitcode:
                    raise ParamServerError(f"{program.log.name} failed:\n{program.log.read_text()[-2000:]}")
        carried = [_carried(host) - count for host, count in zip(hosts[1:], before, strict=True)]
        return {**json.loads(Path(folder, "summary.json").read_text()), "border": carried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10, help="Mbit/s of a region's link, each way")
    parser.add_argument("--latency", type=float, default=40, help="ms from host to host and back")
    parser.add_argument("--workers", type=int, default=3, help="in each region")
    parser.add_argument("--steps", type=int, default=96, help="training steps of each worker")
    parser.add_argument("--every", type=int, default=32, help="steps between exchanges of regions in diloco")
    parser.add_argument("--asynchronous", action="store_true", help="also async_diloco above, and flat")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all processes")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go
    rows = []
    try:
        with linked_hosts([0, asked.rate, asked.rate], asked.latency) as hosts, forking():
            names = ("server above", "region 1", "region 2")
            for name, host in zip(names, hosts, strict=True):
                print(f"{name:13} {host.address}   (ip netns exec {host.namespace} bash)")
            print(f"{asked.rate:g} Mbit/s and {asked.latency:g} ms between them")
            for side in _sides(asked.every, asked.asynchronous):
                print(f"\n{side.name}")
                rows.append((side.name, _train(side, hosts, asked)))
    except ParamServerError as error:
        sys.exit(str(error))
    flat = sum(rows[0][1]["border"])
    print(f"\n{'':26}{'MB over each border':>20}{'of flat':>10}{'seconds':>9}{'loss':>8}{'accuracy':>10}")
    for name, found in rows:
        each = " ".join(f"{count / 1e6:.2f}" for count in found["border"])
        part, final = sum(found["border"]) / flat, found["final"]
        scores = f"{final.get('loss', float('nan')):8.3f}{final.get('accuracy', float('nan')):10.3f}"
        print(f"{name:26}{each:>20}{f'1/{1 / part:.1f}':>10}{found['wall_s']:9.1f}{scores}")
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
