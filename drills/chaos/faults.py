"""How each fault of a plan is injected into a running job, and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import subprocess
from collections.abc import Callable
from typing import Protocol

from ...launch.plan.process import Child
from .plan import Fault
from .processes import Handle, job_processes
from .proxy import DOWN, UP, Network

_MOST_CUT_BYTES = 1 << 16
_DROP_SHARE = 0.02  # of the packets
_FULL_BYTES = 4096  # the most that a file may have on a disk that is full


class Say(Protocol):
    def __call__(self, what: str) -> None:
        """Tell the user."""


class Injector:
    """Injects faults into the job of one launcher. `close` takes back what lasts.

    `port_of` gives the port on which a shard was last heard to listen.
    """

    def __init__(
        self,
        launcher: int,
        network: Network,
        seed: int,
        say: Say,
        port_of: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        self.killed: list[Child] = []
        self._launcher = launcher
        self._network = network
        self._chance = random.Random(seed)
        self._say = say
        self._port_of = port_of
        self._lasting: dict[asyncio.Task[None], Callable[[], None]] = {}

    def inject(self, fault: Fault) -> None:
        """Begin a fault; what it does for a while ends by itself."""
        done = getattr(self, f"_{fault.kind}")(fault)
        self._say(f"{fault}" + (f": {done}" if done else ""))

    def close(self) -> None:
        """Take back everything that lasts."""
        for task, undo in list(self._lasting.items()):
            task.cancel()
            undo()
        self._lasting.clear()

    def _for_a_while(self, seconds: float, undo: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            self._lasting.pop(task)()

        task = asyncio.ensure_future(wait())
        self._lasting[task] = undo

    # ---- processes -------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> str:
        process = job_processes(self._launcher).get(fault.child)
        if process is None:
            return "it is not running"
        handle = Handle(process.pid)
        handle.send(signal.SIGKILL)
        handle.close()
        self.killed.append(fault.child)
        return f"pid {process.pid}"

    _kill_worker = _kill_server = _kill_shard = _kill

    def _freeze(self, fault: Fault) -> str:
        process = job_processes(self._launcher).get(fault.child)
        if process is None:
            return "it is not running"
        handle = Handle(process.pid)
        handle.send(signal.SIGSTOP)

        def thaw() -> None:
            handle.send(signal.SIGCONT)
            handle.close()

        self._for_a_while(fault.for_s, thaw)
        return f"pid {process.pid}"

    _freeze_worker = _freeze_server = _freeze_shard = _freeze

    def _full_disk(self, fault: Fault) -> str:
        """Every file that its process writes ends after a few bytes, with an error that says so."""
        process = job_processes(self._launcher).get(fault.child)
        if process is None:
            return "it is not running"
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        if soft == _FULL_BYTES:
            return "it is full already"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))

        def make_room() -> None:
            if job_processes(self._launcher).get(fault.child, process).pid == process.pid:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))

        self._for_a_while(fault.for_s, make_room)
        return f"pid {process.pid}"

    # ---- the network -----------------------------------------------------------------------

    def _partition(self, fault: Fault) -> str:
        whose = _worker(fault)
        self._network.hold(whose, UP, DOWN)
        self._for_a_while(fault.for_s, lambda: self._network.release(whose, UP, DOWN))
        return ""

    def _lose_replies(self, fault: Fault) -> str:
        whose = _worker(fault)
        self._network.hold(whose, DOWN)

        def reset() -> None:  # first: what was held is never heard
            self._network.reset(whose)
            self._network.release(whose, DOWN)

        self._for_a_while(fault.for_s, reset)
        return ""

    def _reset(self, fault: Fault) -> str:
        port = self._port_of(fault.shard) if fault.shard is not None else None
        return f"{self._network.reset(_worker(fault), port)} connections"

    def _reset_link(self, fault: Fault) -> str:
        return f"{self._network.reset(fault.child)} connections"

    def _part_link(self, fault: Fault) -> str:
        """A hold alone nobody would notice: nothing is lost, and an open connection has no lease."""
        whose = fault.child
        self._network.hold(whose, UP, DOWN)
        self._network.reset(whose)
        self._for_a_while(fault.for_s, lambda: self._network.release(whose, UP, DOWN))
        return ""

    def _cut(self, fault: Fault) -> str:
        num_bytes = self._chance.randrange(1, _MOST_CUT_BYTES)
        self._network.cut(fault.child, num_bytes)
        return f"after {num_bytes} bytes"

    def _slow(self, fault: Fault) -> str:
        return self._count("num_slow", fault.for_s)

    def _loss(self, fault: Fault) -> str:
        return self._count("num_lossy", fault.for_s)

    def _count(self, name: str, seconds: float) -> str:
        def add(number: int) -> None:
            setattr(self._network, name, getattr(self._network, name) + number)

        add(1)
        self._for_a_while(seconds, lambda: add(-1))
        return ""

    def _drop(self, fault: Fault) -> str:
        """Only in a network of our own (`network.py`): the machine's is not ours to disturb."""
        rule = ["INPUT", "-i", "lo", "-m", "statistic", "--mode", "random", "--probability", str(_DROP_SHARE)]
        iptables("-A", *rule, "-j", "DROP")
        self._for_a_while(fault.for_s, lambda: iptables("-D", *rule, "-j", "DROP"))
        return f"{_DROP_SHARE:.0%} of the packets"


def _worker(fault: Fault) -> Child | None:
    """None: everybody's."""
    return Child("worker", fault.rank) if fault.rank is not None else None


def iptables(*arguments: str) -> None:
    subprocess.run(["iptables", "-w", *arguments], check=True, capture_output=True)
