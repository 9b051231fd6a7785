"""Processes on other machines, over the system's ssh: one connection and one agent per host.

The agent (`launch/agent.py`) starts the host's processes and ends them all when the connection ends, however it
ends; this side speaks to it through a `Connection`. A host that was lost is connected to anew when one of its
processes is started again, after what may be left there of the lost connection has been killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.errors import ParamServerError, UsageError
from ...common.version import PROGRAM_VERSION
from ..connection import Connection, ssh_command
from ..events import LineSplitter
from ..exits import CANNOT_START, HOST_LOST
from ..files import code_file
from ..guardian import Guardian
from ..host_check import INSTALLED, REACHES, check_installed, check_reaches, joined, last_json
from ..hosts import Host
from ..plan import WILDCARDS, Child, ProcessSpec
from .base import Backend, OnExit, OnLine, Site, command_text, handed_on, with_host

_REACH_S = 5.0


@dataclass
class _Running:
    """A process, from the wish to start it to its end."""

    spec: ProcessSpec
    host: Host
    splitter: LineSplitter = field(default_factory=LineSplitter)
    connection: Connection | None = None
    number: int = 0
    is_unwanted: bool = False  # ended before it was started


class SshBackend(Backend):
    """See `base.Backend`."""

    spans_hosts = True
    takes_hosts = True

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        assert site.hosts
        self._on_line = on_line
        self._on_exit = on_exit
        self._site = site
        self._hosts = {host.host: host for host in site.hosts}
        self._connections: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Future[Connection]] = {}
        self._running: dict[Child, _Running] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._is_closed = False
        self._guardian = Guardian()

    # ---- before the start

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:
        by_host: dict[str, list[ProcessSpec]] = {}
        for spec in specs:
            by_host.setdefault(self._host(spec).host, []).append(spec)
        await _all(self._prepare_host(self._hosts[name], its) for name, its in by_host.items())

    async def _prepare_host(self, host: Host, specs: Sequence[ProcessSpec]) -> None:
        connection = await self._connected(host)
        folder = host.folder(self._site.folder)
        path = code_file(self._site.config) if self._site.config.launch.sync_code else None
        if path is not None and any(spec.child.role == "worker" for spec in specs):
            problem = await connection.write(path, folder, Path(path).read_bytes())
            if problem:
                raise UsageError(
                    f"{host.host}: cannot copy {path}: {problem}", fix="workdir: must be yours to write to"
                )
        asked = {
            "folder": folder,
            "needs": sorted({path for spec in specs for path in spec.needs}),
            "leaves": sorted({path for spec in specs for path in spec.leaves}),
        }
        said = await connection.run(["-c", INSTALLED, json.dumps(asked)], dict(host.env))
        found = last_json(said)
        if not isinstance(found, dict):
            last = said.strip().rpartition("\n")[2]
            raise UsageError(f"{host.host}: cannot look at what is installed there: {last}", fix="try its interpreter")
        check_installed(host, found, PROGRAM_VERSION, folder)

    def reach(self, child: Child, address: str) -> str:
        running = self._running.get(child)
        if running is None:
            return address
        named = running.host.address or running.host.host
        there = f"[{named}]" if ":" in named else named
        return with_host(address, dict.fromkeys(WILDCARDS, there))

    async def check_reach(self, addresses: Mapping[Child, str], specs: Sequence[ProcessSpec]) -> None:
        names = {str(child): address for child, address in addresses.items()}
        hosts = {self._host(spec).host: self._host(spec) for spec in specs}
        await _all(self._check_reach(host, names) for host in hosts.values())

    async def _check_reach(self, host: Host, addresses: Mapping[str, str]) -> None:
        connection = await self._connected(host)
        answers = last_json(await connection.run(["-c", REACHES, str(_REACH_S), *addresses.values()], {}))
        if isinstance(answers, list):  # otherwise the host was lost, which its processes will say
            check_reaches(host, addresses, answers)

    # ---- processes

    def start(self, spec: ProcessSpec) -> None:
        running = self._running[spec.child] = _Running(spec, self._host(spec))
        self._task(self._start(running))

    async def _start(self, running: _Running) -> None:
        spec, host = running.spec, running.host
        try:
            connection = await self._connected(host)
        except ParamServerError as error:
            if not running.is_unwanted:
                self._ended(running, HOST_LOST, error.message)
            return
        if running.is_unwanted:
            return
        message = {
            "argv": list(spec.argv),
            "env": {**handed_on(os.environ), **spec.env},
            "folder": host.folder(self._site.folder),
            "sharing": spec.sharing,
        }
        running.connection = connection
        running.number = connection.start(
            message,
            lambda data: self._said(running, running.splitter.feed(data)),
            lambda code, why: self._ended(running, code, why),
        )

    def terminate(self, child: Child) -> None:
        self._end(child, Connection.end)

    def kill(self, child: Child) -> None:
        self._end(child, Connection.kill)

    def _end(self, child: Child, how: Any) -> None:
        running = self._running.get(child)
        if running is None or running.is_unwanted:
            return
        if running.connection is None:  # its host may take long to answer, and nothing of it is there yet
            running.is_unwanted = True
            asyncio.get_running_loop().call_soon(self._ended, running, -signal.SIGTERM, "")
        else:
            how(running.connection, running.number)

    def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for connection in self._connections.values():
            connection.begin_close()
        for connection in self._connections.values():
            connection.close()
        self._guardian.close()

    def _said(self, running: _Running, lines: Iterable[str]) -> None:
        if not self._is_closed:
            for line in lines:
                self._on_line(running.spec.child, line)

    def _ended(self, running: _Running, code: int, why: str) -> None:
        if self._is_closed:
            return
        self._said(running, running.splitter.rest())
        if why:
            self._said(running, [f"cannot start {why}" if code == CANNOT_START else why])
        del self._running[running.spec.child]
        self._on_exit(running.spec.child, code)

    # ---- hosts

    def _host(self, spec: ProcessSpec) -> Host:
        return self._hosts[spec.host] if spec.host else self._site.hosts[0]

    async def _connected(self, host: Host) -> Connection:
        """The host's connection, opened once for all that ask at the same time. Raises ParamServerError."""
        known = self._connections.get(host.host)
        if known is not None and not known.is_lost:
            return known
        opening = self._opening.get(host.host)
        if opening is None:
            opening = self._opening[host.host] = self._task(self._open(host, known.hello if known else None))
            opening.add_done_callback(lambda _: self._opening.pop(host.host))
        return await asyncio.shield(opening)

    async def _open(self, host: Host, sweep: dict[str, Any] | None) -> Connection:
        launch = self._site.config.launch
        connection = Connection(host, launch, host.interpreter(self._site.folder), self._guardian)
        self._connections[host.host] = connection
        try:
            await connection.open(sweep)
        except ParamServerError:
            connection.hello = sweep or {}  # what is to be swept stays so
            raise
        return connection

    def _task(self, work: Any) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @classmethod
    def dry_run(cls, specs: Sequence[ProcessSpec], site: Site) -> list[str]:
        hosts = {host.host: host for host in site.hosts}
        lines = []
        for name in dict.fromkeys(spec.host for spec in specs):
            command = ssh_command(hosts[name], site.config.launch, hosts[name].interpreter(site.folder))
            lines.append(f"[{name}] {shlex.join(command)}")
        for spec in specs:
            folder = hosts[spec.host].folder(site.folder)
            lines.append(f"[{spec.child} on {spec.host}] cd {shlex.quote(folder)} && {command_text(spec)}")
        return lines


async def _all(checks: Iterable[Awaitable[None]]) -> None:
    """Run them at the same time; one error for all that went wrong."""
    results = await asyncio.gather(*checks, return_exceptions=True)
    problems = [result for result in results if isinstance(result, ParamServerError)]
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ParamServerError):
            raise result
    if problems:
        raise joined(problems)


ENTRY = SshBackend
