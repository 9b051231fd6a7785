"""The job under chaos: an ordinary `ps-launch` as a child, so that its supervision is tested as well."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...common.config.schema import Config
from ...common.proxies import DRILL_VARIABLE
from ...common.reporting.summary import Status
from ...launch.backends.base import Site
from ...launch.backends.local import LocalBackend
from ...launch.plan.hosts import SERVER, Child, ProcessSpec
from ...launch.view import Event, parse_event
from .faults import Injector, Say, child_of_port, children_of, job_processes
from .plan import Fault
from .proxy import Network

LAUNCHER = Child("launcher", 0)
_PROGRAM = "paramserver.launch"
_GRACE_S = 15.0
_LOOK_S = 1.0
_HANG_S = 90.0  # without any progress
_POLL_S = 0.05
_MAX_UNEXPECTED = 5
# Events of the job that are shown beside the faults, with the field to show. _SERVERS: the server's count only.
_SHOWN = {"restarting": "reason", "away": "reason", "left": "reason", "resumed": "seq", "rejoined": "seq"}
_OF_SHARDS = {"shard_away": "lost_in_s", "shard_back": "missed", "shard_lost": "meaning"}
_SHOWN |= {**_OF_SHARDS, "snapshot_failed": "reason"}
_SERVERS = frozenset({"away", "left", "resumed"})
# After these events faults have no effect until the run resumes from its newest snapshot.
_STOPS_ALL = frozenset({"kill_server", "kill_shard"})
_NO_PROXY = ("no_grpc_proxy", "no_proxy", "NO_PROXY", "https_proxy", "http_proxy")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A job to run, and which faults to inject. Seconds."""

    arguments: tuple[str, ...]  # of ps-launch
    folder: Path
    config: Config  # that its processes see
    plan: list[Fault]
    seed: int
    last_step: int  # of the fastest worker: no faults after it, so that every process is back in time
    most_cut_bytes: int  # a cut comes within so many bytes from a worker
    deadline_s: float  # for the whole job, which may repeat itself


@dataclass
class Ending:
    """How the job went."""

    exit_code: int | None = None  # None: the job hung
    signal_number: int = 0  # signal of the user's interrupt
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)  # ends of processes that no fault caused
    hang: str = ""
    num_bytes: int = 0  # that went through the controlled network


class Chaos:
    """One job under one plan."""

    def __init__(self, setup: Setup, say: Say) -> None:
        self._setup = setup
        self._say = say
        self._ending = Ending()
        self._status: Status | None = None
        self._is_down = False  # a fault has killed the server, and no commit has come since
        self._progress: tuple[object, float] = (None, 0.0)  # the last progress, and its time
        self._begun = asyncio.Event()  # there is a snapshot
        self._ended: asyncio.Future[int]  # the launcher's exit code
        self._stopped: asyncio.Future[int]  # by the user: the number of the signal
        self._launcher = 0  # its pid
        self._ports: dict[int, int] = {}  # of each listening shard
        self._injector: Injector | None = None

    async def run(self) -> Ending:
        """Start the job, inject the faults, and return when nothing of it is left."""
        loop = asyncio.get_running_loop()
        self._ended, self._stopped = loop.create_future(), loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        network = Network(lambda port: child_of_port(self._launcher, port), self._setup.seed)
        await network.start()
        with (self._setup.folder / "job.log").open("w", encoding="utf-8") as self._log:
            backend = LocalBackend(self._on_line, self._on_exit, Site(config=Config()))
            try:
                await self._start(backend, network)
                await self._watch(backend)
            finally:
                await backend.close()
                await network.close()
            self._ending.num_bytes = network.num_bytes
        return self._ending

    async def _start(self, backend: LocalBackend, network: Network) -> None:
        argv = (sys.executable, "-m", _PROGRAM, *self._setup.arguments)
        environ = {"grpc_proxy": f"http://{network.address}", DRILL_VARIABLE: "1", **dict.fromkeys(_NO_PROXY, "")}
        backend.start(ProcessSpec(LAUNCHER, argv, environ))
        while not self._launcher and not self._ended.done():
            await asyncio.sleep(_POLL_S)
            agents = [pid for pid, _, _ in children_of(os.getpid())]
            found = [pid for agent in agents for pid, _, argv in children_of(agent) if _PROGRAM in argv]
            self._launcher = found[0] if found else 0
        setup = self._setup
        self._injector = Injector(self._launcher, network, setup.seed, self._say, self._ports.get, setup.most_cut_bytes)

    async def _watch(self, backend: LocalBackend) -> None:
        """Wait until the job has ended, the user interrupts, or nothing moves."""
        assert self._injector is not None
        loop = asyncio.get_running_loop()
        faults = asyncio.ensure_future(self._inject(self._injector))
        began = loop.time()
        self._progress = (None, began)
        try:
            waited = {self._ended, self._stopped}
            while not any(future.done() for future in waited) and not self._ending.hang:
                await asyncio.wait(waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                now, since = loop.time(), self._progress[1]
                if len(self._ending.unexpected) > _MAX_UNEXPECTED:
                    self._ending.hang = self._who_waits("processes end by themselves again and again")
                elif now - since >= _HANG_S:
                    self._ending.hang = self._who_waits(f"nothing has moved for {now - since:.0f} s")
                elif now - began >= self._setup.deadline_s:
                    self._ending.hang = self._who_waits(f"still running after {now - began:.0f} s")
        finally:
            self._injector.close()
            if not faults.cancel():
                faults.result()  # it may have failed
        if not self._ended.done():  # `close` kills what is left after the grace time
            backend.terminate(LAUNCHER)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), _GRACE_S)
        elif not self._ending.hang:
            self._ending.exit_code = self._ended.result()

    async def _inject(self, injector: Injector) -> None:
        """Inject the plan, from the first snapshot until the fastest worker is near its end.

        The time until the server works again after a kill is added to the plan's gaps, because a fault that hits no
        running job tests nothing. Only the fault right after a kill does not wait.
        """
        await self._begun.wait()
        before_s, was_server = 0.0, False
        for fault in self._setup.plan:
            is_server = fault.kind in _STOPS_ALL
            while (is_server or not was_server) and self._is_down:
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(fault.at_s - before_s)
            if self._fastest_step() >= self._setup.last_step:
                self._say("the workers are near their end: no more faults")
                return
            injector.inject(fault)
            self._ending.faults[fault.kind] += 1
            self._is_down |= is_server
            before_s, was_server = fault.at_s, is_server

    def _fastest_step(self) -> int:
        return max((worker.step for worker in self._status.workers), default=0) if self._status else 0

    # ---- what happens ----------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        self._ending.signal_number = number
        if not self._stopped.done():
            self._stopped.set_result(number)

    def _on_exit(self, child: Child, code: int) -> None:
        self._ended.set_result(code)

    def _on_line(self, child: Child, line: str) -> None:
        self._log.write(line + "\n")
        if (event := parse_event(line)) is None:
            return
        if (status := event.status) is not None:
            if self._status is not None and status.version > self._status.version:
                self._is_down = False
            self._status = status
            progress = (status.version, [(worker.step, worker.state) for worker in status.workers])
            if progress != self._progress[0]:
                self._progress = (progress, asyncio.get_running_loop().time())
        if event.name == "snapshot":
            self._begun.set()
        if event.name == "listening" and event.fields.get("role") == SERVER.role:
            self._ports[int(event.fields.get("rank") or 0)] = int(str(event.fields["address"]).rpartition(":")[2])
        if event.name in _SHOWN and (event.name not in _SERVERS or event.fields.get("role") == SERVER.role):
            self._show(event)

    def _show(self, event: Event) -> None:
        self._ending.events[event.name] += 1
        text = event.fields.get(_SHOWN[event.name], "")
        rank = event.fields.get("rank")
        if event.name in _OF_SHARDS:
            whom = f" {event.fields.get('shard')}"
        elif "path" in event.fields:
            whom, text = " server", f"version {event.fields.get('version')}"
        else:
            role = "shard" if event.fields.get("role") == SERVER.role and event.name == "snapshot_failed" else "worker"
            whom = f" {role} {rank}" if rank is not None and event.name != "restarting" else ""
        self._say(f"    {event.name}{whom}: {text}")
        if event.name == "restarting":
            assert self._injector is not None
            child = Child(str(event.fields.get("role")), int(rank or 0))
            if "SIGKILL" in str(text) and child in self._injector.killed:
                self._injector.killed.remove(child)
            else:
                self._ending.unexpected.append(str(text))

    def _who_waits(self, text: str) -> str:
        """Returns who waits for what, and the state of the processes."""
        lines = [text]
        if (status := self._status) is not None:
            lines.append(f"step {status.step} of {status.steps}, version {status.version}: {status.waiting_reason()}")
            lines += [f"  worker {w.rank}: {w.state} at step {w.step}; {w.waiting_for}" for w in status.workers]
        lines += [f"  {child}: pid {pid}, {state}" for child, (pid, state) in job_processes(self._launcher).items()]
        return "\n".join(lines)
