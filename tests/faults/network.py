"""A server and workers in network namespaces of their own, and what can be done to the network between them.

    server namespace: bridge 10.214.0.1 ──┬── worker 0: 10.214.0.10
                                          └── worker 1: 10.214.0.11 ...

Namespaces know nothing of each other or of the machine's own network, so every rig may have the same
addresses. Packets are dropped where they arrive (iptables INPUT), as a network would: the sender's kernel
does not know. A packet is 1,500 bytes, not 64 KiB as between namespaces otherwise: a lost one is one. Needs
root, `ip`, `tc` (iproute2) and `iptables`. At the end the namespaces are gone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

HOST = "10.214.0.1"
SERVER = "server"
# Token bucket of a limited link: a burst that passes at full speed, and how long a packet may queue.
_BURST, _LATENCY = "32kb", "400ms"


def why_not() -> str | None:
    """Why there can be no such network here; None when it can be tried."""
    if os.geteuid() != 0:
        return "network faults need root"
    missing = [name for name in ("ip", "tc", "iptables") if shutil.which(name) is None]
    return f"network faults need the command {' and '.join(missing)} (iproute2, iptables)" if missing else None


class Network:
    """One bridge with a server and `num_workers` workers."""

    def __init__(self, num_workers: int) -> None:
        self._name = f"flt{os.getpid()}-{secrets.token_hex(3)}"
        self._namespaces: list[str] = []
        self.num_workers = num_workers

    def set_up(self) -> None:
        """CalledProcessError when something of it cannot be made."""
        server = self._new(SERVER)
        _run("ip", "-n", server, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", server, "address", "add", f"{HOST}/24", "dev", "br0")
        for rank in range(self.num_workers):
            worker = self._new(rank)
            pair = ["eth0", "netns", worker, "type", "veth", "peer", "name", f"p{rank}", "netns", server]
            _run("ip", "link", "add", *pair)
            _run("ip", "-n", server, "link", "set", f"p{rank}", "master", "br0", "gso_max_segs", "1", "up")
            _run("ip", "-n", worker, "address", "add", f"{address_of(rank)}/24", "dev", "eth0")
            _run("ip", "-n", worker, "link", "set", "eth0", "gso_max_segs", "1", "up")
        for namespace in self._namespaces:
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", server, "link", "set", "br0", "gso_max_segs", "1", "up")

    def tear_down(self) -> None:
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=30, check=False)

    def at(self, host: str | int) -> tuple[str, ...]:
        """The command prefix that runs a program at the server ("server") or at a worker (its rank)."""
        return ("ip", "netns", "exec", f"{self._name}-{host}")

    # ---- faults ---------------------------------------------------------------------------

    def partition(self, rank: int) -> None:
        """Nothing passes between the server and this worker, in either direction."""
        self._drop(SERVER, "-s", address_of(rank))
        self._drop(rank)

    def partition_port(self, rank: int, port: int) -> None:
        """Nothing passes between this worker and a port of the server, in either direction; all else does."""
        self._drop(SERVER, "-s", address_of(rank), "-p", "tcp", "--dport", str(port))
        self._drop(rank, "-p", "tcp", "--sport", str(port))

    def partition_pair(self, number: int, other: int) -> None:
        """Nothing passes between these two workers; both reach the server."""
        self._drop(number, "-s", address_of(other))
        self._drop(other, "-s", address_of(number))

    def drop_replies(self, rank: int) -> None:
        """What the server sends does not arrive at this worker; the other direction is whole."""
        self._drop(rank)

    def lose(self, rank: int, percent: float) -> None:
        """Of the packets between the server and this worker so many are lost, in each direction."""
        chance = ("-m", "statistic", "--mode", "random", "--probability", f"{percent / 100:g}")
        self._drop(SERVER, "-s", address_of(rank), *chance)
        self._drop(rank, *chance)

    def limit(self, rank: int, mbit: float) -> None:
        """The worker's link passes so much, in each direction."""
        for host, device in ((rank, "eth0"), (SERVER, f"p{rank}")):
            _run("tc", "-n", f"{self._name}-{host}", "qdisc", "replace", "dev", device, "root",
                 "tbf", "rate", f"{mbit:g}mbit", "burst", _BURST, "latency", _LATENCY)  # fmt: skip

    def heal(self, rank: int) -> None:
        """All packets of this worker pass again. The limit of its link stays."""
        self._iptables(rank, "-F", "INPUT")
        listed = subprocess.run(
            [*self.at(SERVER), "iptables", "-S", "INPUT"], capture_output=True, text=True, check=True
        )
        for rule in listed.stdout.splitlines():
            if f"-s {address_of(rank)}/32" in rule:
                self._iptables(SERVER, "-D", *rule.split()[1:])

    def _drop(self, host: str | int, *which: str) -> None:
        self._iptables(host, "-A", "INPUT", *which, "-j", "DROP")

    def _iptables(self, host: str | int, *argv: str) -> None:
        _run(*self.at(host), "iptables", "-w", "10", *argv)

    def _new(self, host: str | int) -> str:
        name = f"{self._name}-{host}"
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        return name


def address_of(rank: int) -> str:
    return f"10.214.0.{10 + rank}"


def _run(*argv: str) -> None:
    try:
        subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(argv)}: {error.stderr.strip()}") from error
