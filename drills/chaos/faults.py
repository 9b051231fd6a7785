"""Injects each fault of a plan into a running job, and ends it; finds the job's processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ...launch.plan.hosts import SERVER, Child
from .plan import Fault
from .proxy import DOWN, UP, Network

_DROP_SHARE = 0.02  # of the packets
_FULL_BYTES = 4096  # limit of a file's size, to simulate a full disk
_CLONE_NEWNET = 0x40000000  # linux/sched.h


Say = Callable[[str], None]  # prints a line for the user


class Injector:
    """Injects faults into the job of one launcher. `close` ends lasting faults.

    `port_of`: returns the port on which a shard last listened. `most_cut_bytes`: a cut comes within so many.
    """

    def __init__(
        self, launcher: int, network: Network, seed: int, say: Say, port_of: Callable[[int], int | None],
        most_cut_bytes: int,
    ) -> None:  # fmt: skip
        self.killed: list[Child] = []  # once for each kill; the job removes those that it has seen restart
        self._launcher = launcher
        self._network = network
        self._chance = random.Random(seed)
        self._say = say
        self._port_of, self._most_cut_bytes = port_of, most_cut_bytes
        self._lasting: dict[asyncio.TimerHandle, Callable[[], None]] = {}

    def inject(self, fault: Fault) -> None:
        """Begin a fault; a lasting one ends by itself."""
        try:
            done = getattr(self, f"_{fault.kind}")(fault)
        except ProcessLookupError:  # it has ended, perhaps since it was looked up
            done = "it is not running"
        self._say(f"{fault}" + (f": {done}" if done else ""))

    def close(self) -> None:
        """End all lasting faults."""
        for timer, undo in self._lasting.items():
            timer.cancel()
            undo()
        self._lasting.clear()

    def _for_a_while(self, seconds: float, undo: Callable[[], None]) -> None:
        def end() -> None:
            self._lasting.pop(timer)()

        timer = asyncio.get_running_loop().call_later(seconds, end)
        self._lasting[timer] = undo

    # ---- processes -------------------------------------------------------------------------

    def _pid(self, fault: Fault) -> int:
        """Returns the process that the fault hits. Raises ProcessLookupError if it is not running."""
        if (found := job_processes(self._launcher).get(fault.child)) is None:
            raise ProcessLookupError
        return found[0]

    def _kill(self, fault: Fault) -> str:
        handle = Handle(pid := self._pid(fault))
        handle.send(signal.SIGKILL)
        handle.close()
        self.killed.append(fault.child)
        return f"pid {pid}"

    _kill_worker = _kill_server = _kill_shard = _kill

    def _freeze(self, fault: Fault) -> str:
        handle = Handle(pid := self._pid(fault))
        handle.send(signal.SIGSTOP)

        def thaw() -> None:
            handle.send(signal.SIGCONT)
            handle.close()

        self._for_a_while(fault.for_s, thaw)
        return f"pid {pid}"

    _freeze_worker = _freeze_server = _freeze_shard = _freeze

    def _full_disk(self, fault: Fault) -> str:
        """Limit the size of every file that the process writes to a few bytes."""
        soft, hard = resource.prlimit(pid := self._pid(fault), resource.RLIMIT_FSIZE)
        if soft == _FULL_BYTES:
            return "it is full already"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))

        def make_room() -> None:
            with contextlib.suppress(ProcessLookupError):
                if self._pid(fault) == pid:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

        self._for_a_while(fault.for_s, make_room)
        return f"pid {pid}"

    # ---- the network -----------------------------------------------------------------------

    def _block(self, whose: Child | None, seconds: float) -> None:
        self._network.block(whose, UP, DOWN)
        self._for_a_while(seconds, lambda: self._network.unblock(whose, UP, DOWN))

    def _partition(self, fault: Fault) -> None:
        self._block(fault.worker, fault.for_s)

    def _lose_replies(self, fault: Fault) -> None:
        whose = fault.worker
        self._network.block(whose, DOWN)

        def reset() -> None:  # first, so that the blocked bytes are lost
            self._network.reset(whose)
            self._network.unblock(whose, DOWN)

        self._for_a_while(fault.for_s, reset)

    def _reset(self, fault: Fault) -> str:
        port = self._port_of(fault.shard) if fault.shard is not None else None
        return f"{self._network.reset(fault.worker, port)} connections"

    def _reset_link(self, fault: Fault) -> str:
        return f"{self._network.reset(fault.child)} connections"

    def _part_link(self, fault: Fault) -> None:
        """Also reset: a blocked connection loses nothing, and a connection between shards has no lease."""
        self._block(fault.child, fault.for_s)
        self._network.reset(fault.child)

    def _cut(self, fault: Fault) -> str:
        num_bytes = self._chance.randrange(1, self._most_cut_bytes)
        self._network.cut(fault.child, num_bytes)
        return f"after {num_bytes} bytes"

    def _delay(self, fault: Fault) -> None:
        self._network.delays.update([fault.kind])
        self._for_a_while(fault.for_s, lambda: self._network.delays.subtract([fault.kind]))

    _slow = _loss = _delay

    def _drop(self, fault: Fault) -> str:
        """Drop packets, only in the job's own network namespace (`enter_own_network`)."""
        rule = ["INPUT", "-i", "lo", "-m", "statistic", "--mode", "random", "--probability"]

        def iptables(action: str) -> None:
            command = ["iptables", "-w", action, *rule, str(_DROP_SHARE), "-j", "DROP"]
            subprocess.run(command, check=True, capture_output=True)

        iptables("-A")
        self._for_a_while(fault.for_s, lambda: iptables("-D"))
        return f"{_DROP_SHARE:.0%} of the packets"


def enter_own_network() -> str | None:
    """Move this process into a new network namespace with a loopback, in which packets can be dropped.

    All processes that it starts later are in the namespace, which ends with them. Returns why that failed, None if it
    did not.
    """
    if os.geteuid() != 0:
        return "a network namespace needs root"
    if missing := [program for program in ("ip", "iptables") if shutil.which(program) is None]:
        return f"there is no {' and no '.join(missing)}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        return f"no network namespace: {os.strerror(ctypes.get_errno())}"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    probe = subprocess.run(["iptables", "-w", "-L", "-n"], capture_output=True, text=True, check=False)
    return f"iptables: {probe.stderr.strip()}" if probe.returncode else None


# ---- processes -----------------------------------------------------------------------------------
# Finds the processes of a running job, and the owner of a connection, in /proc (Linux).
#
# The job's log is too late to hit a process in the moment of its start.


_PROC = Path("/proc")
_ZOMBIE = "Z"


def job_processes(launcher: int) -> dict[Child, tuple[int, str]]:
    """Returns the running servers and workers of a launcher: pid and state of each.

    A state is the kernel's letter: R runs, S sleeps, T is stopped, D waits for a disk.
    """
    found: dict[Child, tuple[int, str]] = {}
    for agent, _, _ in children_of(launcher):
        for pid, state, argv in children_of(agent):
            if (child := _child_of(argv)) is not None:
                found[child] = pid, state
    return found


def children_of(parent: int) -> Iterator[tuple[int, str, list[str]]]:
    """Yields pid, state and command line of the running children of `parent`."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):  # ended meanwhile
            state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != _ZOMBIE:
                yield int(entry.name), state, (entry / "cmdline").read_text().split("\0")


def _child_of(argv: list[str]) -> Child | None:
    """Returns the process of a job with this command line; None for others, such as the agent's guardian."""
    if "paramserver.ps" in argv:
        shards = [int(word.partition("=")[2]) for word in argv if word.startswith("server.shard=")]
        return Child("server", max(shards, default=0))
    if "paramserver.worker" in argv:
        return Child("worker", int(argv[argv.index("--rank") + 1]))
    return None


def child_of_port(launcher: int, port: int) -> Child | None:
    """Returns the process of the job whose end of a TCP connection has this local port.

    It is never the coordinator, which makes no connections during a run.
    """
    inode = _inode_of(port)
    if inode is None:
        return None
    for child, (pid, _) in job_processes(launcher).items():
        with suppress(OSError):
            for entry in (_PROC / str(pid) / "fd").iterdir() if child != SERVER else ():
                with suppress(OSError):
                    if os.readlink(entry) == f"socket:[{inode}]":
                        return child
    return None


def _inode_of(port: int) -> str | None:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in (_PROC / "net" / name).read_text().splitlines()[1:]:
                columns = row.split()
                if int(columns[1].rpartition(":")[2], 16) == port and columns[9] != "0":
                    return columns[9]
    return None


class Handle:
    """Signals a process, never a later process with the same pid."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """Send a signal; does nothing when the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        os.close(self._descriptor)
