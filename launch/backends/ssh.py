"""Processes on other machines, over the system's ssh: one connection and one agent per host.

The agent (`launch/hosts/agent.py`) starts the host's processes, and ends them all when the connection ends, whatever
the cause. When a process of a lost host is started again, the backend connects anew and first kills what the lost
connection may have left there.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...common.config.schema import LaunchConfig
from ...common.errors import ParamServerError, UnreachableError, UsageError
from ...common.version import PROGRAM_VERSION
from ..hosts.agent import Guardian
from ..hosts.connection import BOOTSTRAP, Connection, Unreachable
from ..hosts.host_check import INSTALLED, check_installed, ssh_problem
from ..plan.hosts import THIS_MACHINE, Child, Host, ProcessSpec
from ..plan.settings import code_file
from ..view import object_in
from .base import Backend, OnExit, OnLine, Running, Site, T, command_text

_REACH_S = 5.0


class SshBackend(Backend):
    """See `base.Backend`."""

    spans_hosts = True
    takes_hosts = True

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        assert site.hosts
        super().__init__(on_line, on_exit, site)
        self._hosts = {host.host: host for host in site.hosts}
        self._newest: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Future[Connection]] = {}
        self._guardian = Guardian()

    # ---- before the start

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:
        by_host: dict[str, list[ProcessSpec]] = {}  # in order: the first problem's exit code counts
        for spec in specs:
            by_host.setdefault(self._host(spec).host, []).append(spec)
        await _all(self._prepare_host(self._hosts[name], its_specs) for name, its_specs in by_host.items())

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
        files = {name: sorted({path for spec in specs for path in getattr(spec, name)}) for name in ("needs", "leaves")}
        output = await connection.run(["-c", INSTALLED, json.dumps({"folder": folder, **files})], dict(host.env))
        found = next(filter(None, map(object_in, reversed(output.splitlines()))), None)
        if found is None:
            last = output.strip().rpartition("\n")[2]
            raise UsageError(f"{host.host}: cannot check its installation: {last}", fix="try its interpreter")
        check_installed(host, found, PROGRAM_VERSION, folder)

    async def check_reach(self, addresses: Mapping[Child, str], specs: Sequence[ProcessSpec]) -> None:
        async def check(host: Host) -> None:
            connection = await self._connected(host)
            with suppress(Unreachable):  # the host was lost, and its processes report it
                connects = {"num": 1, "limit_s": _REACH_S}
                pings = (connection.measure("ping", address=address, **connects) for address in addresses.values())
                for (server, address), trip in zip(addresses.items(), await asyncio.gather(*pings), strict=True):
                    if isinstance(trip, str):  # the reason
                        raise UnreachableError(
                            f"{host.host}: cannot reach the {server} at {address}: {trip}",
                            fix="give the server's host an address: that others can reach, and let the port through "
                            "its firewall (a fixed one with --port)",
                        )

        await _all(check(self._hosts[name]) for name in dict.fromkeys(self._host(spec).host for spec in specs))

    # ---- processes

    async def _agent(self, running: Running) -> tuple[Connection, Mapping[str, str], str]:
        host = self._host(running.spec)
        self._addresses[running.spec.child] = host.address or host.host
        return await self._connected(host), {}, host.folder(self._site.folder)

    async def close(self) -> None:
        await super().close()
        self._guardian.close()

    # ---- hosts

    async def connections(self) -> list[Connection]:
        """Returns a connection to each host. Raises one ParamServerError for all that have none."""
        return await _all(self._connected(host) for host in self._site.hosts)

    def _host(self, spec: ProcessSpec) -> Host:
        return self._hosts[spec.host] if spec.host else self._site.hosts[0]

    async def _connected(self, host: Host) -> Connection:
        """Returns the host's connection, opened once for all concurrent callers. Raises ParamServerError."""
        known = self._newest.get(host.host)
        if known is not None and not known.is_lost:
            return known
        opening = self._opening.get(host.host)
        if opening is None:
            work = self._open(host, known.hello if known else None)
            opening = self._opening[host.host] = self._until_closed(asyncio.create_task(work))
            opening.add_done_callback(lambda _: self._opening.pop(host.host))
        return await asyncio.shield(opening)

    async def _open(self, host: Host, sweep: dict[str, Any] | None) -> Connection:
        launch, python = self._site.config.launch, host.interpreter(self._site.folder)
        connection = self._newest[host.host] = self._connection(
            name=host.host,
            command=ssh_command(host, launch, python),
            sends_source=True,
            lost_after_s=launch.lost_after_s,
            # ssh limits its own connecting to connect_s; the interpreter there needs time too.
            connect_s=2 * launch.connect_s + 5,
            guardian=self._guardian,
        )
        try:
            await connection.open(sweep)
        except Unreachable as error:
            connection.hello = sweep or {}  # the next attempt sweeps it
            raise ssh_problem(host, error.code, error.output, python) from None
        return connection

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


def ssh_command(host: Host, launch: LaunchConfig, python: str) -> list[str]:
    """Returns the command that starts the agent on a host. It contains no secrets: those go over the connection."""
    if host.host == THIS_MACHINE:
        return [os.path.expanduser(python), "-I", "-u", "-c", BOOTSTRAP]
    options = {
        "BatchMode": "yes",  # nobody can type a password
        "ConnectTimeout": f"{max(1, round(launch.connect_s))}",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",  # uses an existing master, but does not become one
    }
    words = [*shlex.split(launch.ssh), "-T", "-x", *(f"-o{name}={value}" for name, value in options.items())]
    words += ["-l", host.user] if host.user else []
    words += ["-p", str(host.port)] if host.port else []
    return [*words, "--", host.host, f"exec {_shell_path(python)} -I -u -c {shlex.quote(BOOTSTRAP)}"]


def _shell_path(path: str) -> str:
    """Returns the path quoted for a shell, except the ~ of a home."""
    if not path.startswith("~"):
        return shlex.quote(path)
    home, slash, rest = path.partition("/")
    return home + slash + (shlex.quote(rest) if rest else "")


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Returns the results of concurrent work. Raises one error for all its ParamServerErrors."""
    problems, results = [], []
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, ParamServerError):
            problems.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            results.append(result)
    if len(problems) > 1:  # a line with a fix for each; the first decides the exit code
        lines = [f"{each.message} ({each.fix})" if each.fix else each.message for each in problems]
        raise type(problems[0])("\n".join(lines))
    if problems:
        raise problems[0]
    return results


ENTRY = SshBackend
