"""The contract of a launch backend: start processes somewhere, report their lines and their end, end them.

Agents (`launch/hosts/agent.py`) start the processes, wherever those are. A backend runs on the launcher's event loop
and calls `on_line` and `on_exit` from there. Every backend promises (tests/launch/test_backend_contract.py):

- `on_line` gets each line of a process before `on_exit` gets its end.
- `on_exit` reports each started process exactly once, also one that cannot be started (exits.CANNOT_START, after a
  line with the reason) or whose host is lost (exits.HOST_LOST).
- The launcher's PS_ variables reach every process. Its own rank and address (RANK, PS_SERVER, ...) reach none.
- What a process with `reports` writes to the descriptor of its results arrives whole, whatever its length.
- `kill` ends a process and everything it has started; so does the process's own end.
- When the launcher dies, whatever the cause, nothing that it started stays behind.

To add one: a file in this folder with `ENTRY = YourBackend`, a subclass of `Backend`. Its settings are fields of
`LaunchConfig` (common/config/sections/launching.py). `spans_hosts` says that processes may run on other machines: their
settings then travel as --set instead of --config FILE, servers listen on all addresses (0.0.0.0) unless configured,
and the launcher writes the summary. The life of a backend in a job:

    __init__ ─> prepare() ─> start(server) ... its `listening` event ─> reach(), for each server
             ─> start(shards) ─> check_reach(addresses) ─> start(workers) ... ─> close()

The contract test builds each backend with the fixture `<name>_site`, which returns its `Site`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ...common.config.addresses import join_address
from ...common.config.schema import Config
from ...common.config.sources import LAUNCHER_ENV_NAMES
from ...common.errors import ParamServerError
from ...common.reporting.summary import RESULTS_VARIABLE
from ..hosts.connection import MAX_LINE_BYTES, Connection, Unreachable, watched
from ..plan.hosts import WILDCARDS, Child, Host, ProcessSpec
from ..supervise.restarts import CANNOT_START, HOST_LOST
from ..view import LineSplitter

OnLine = Callable[[Child, str], None]
OnExit = Callable[[Child, int], None]
T = TypeVar("T")
_END_S = 15.0

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)
_FILE = re.compile(r"^PS_SECURITY__")  # paths of secrets, not secrets


@dataclass(frozen=True, kw_only=True)
class Site:
    """The configuration of a backend."""

    config: Config
    hosts: tuple[Host, ...] = ()  # of --hosts
    folder: str = "."  # where the launcher was started


@dataclass
class Running:
    """A process, from the decision to start it to its end."""

    spec: ProcessSpec
    splitter: LineSplitter = field(default_factory=LineSplitter)
    connection: Connection | None = None  # to its agent, once there is one
    number: int = 0  # its id with the agent
    is_unwanted: bool = False  # ended before it was started
    results: bytearray = field(default_factory=bytearray)


class Backend(ABC):
    """Base of all backends, built inside the running event loop. Each implements `_agent`."""

    spans_hosts: ClassVar[bool] = False
    takes_hosts: ClassVar[bool] = False  # it reads --hosts
    has_agent_each: ClassVar[bool] = False  # every process has its own agent

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        self._on_line, self._on_exit, self._site = on_line, on_exit, site
        self._running: dict[Child, Running] = {}
        self._addresses: dict[Child, str] = {}  # of the hosts of processes, where there are several hosts
        self._connections: list[Connection] = []  # all that were ever made
        self._tasks: set[asyncio.Future[Any]] = set()
        self._is_closed = False
        self.results: dict[Child, bytes] = {}  # of each that has ended and was to report any; complete before `on_exit`

    @abstractmethod
    async def _agent(self, running: Running) -> tuple[Connection, Mapping[str, str], str]:
        """Returns the agent that starts the process, variables that the process's own precede, and the folder.

        Raises Unreachable where there is no agent, and ParamServerError where its host is lost.
        """

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:  # noqa: B027  (nothing, by default)
        """Check that these can start. Raises ParamServerError with a line for each host that cannot."""

    def reach(self, child: Child, address: str) -> str:
        """Returns the address at which the run's other processes reach a server that listens on `address`."""
        host, _, port = address.rpartition(":")
        if host not in WILDCARDS:
            return address
        return join_address(self._addresses.get(child, WILDCARDS[host]), int(port))

    async def check_reach(  # noqa: B027
        self, addresses: Mapping[Child, str], specs: Sequence[ProcessSpec]
    ) -> None:
        """Check that the workers (`specs`) can connect to the servers. Raises ParamServerError as `prepare` does."""

    @classmethod
    def dry_run(cls, specs: Sequence[ProcessSpec], site: Site) -> list[str]:
        """Returns the commands that would start these, for people, without secrets."""
        return [f"[{spec.child}] {command_text(spec)}" for spec in specs]

    def start(self, spec: ProcessSpec) -> None:
        """Start a process. If it cannot start, `on_exit` reports that as its end."""
        running = self._running[spec.child] = Running(spec)
        self._until_closed(watched(self._start(running)))

    async def _start(self, running: Running) -> None:
        try:
            connection, env, folder = await self._agent(running)
        except (ParamServerError, Unreachable) as error:
            if not running.is_unwanted:
                self._ended(running, HOST_LOST if isinstance(error, ParamServerError) else CANNOT_START, str(error))
            return
        if running.is_unwanted:
            return
        running.connection = connection
        running.number = connection.start(
            {"argv": running.spec.argv, "env": {**_own_settings(), **env, **running.spec.env}, "folder": folder,
             "sharing": running.spec.sharing, "results": RESULTS_VARIABLE if running.spec.reports else ""},
            lambda data: self._lines(running, running.splitter.feed(data)),
            lambda code, why: self._ended(running, code, why),
            on_results=running.results.extend,
        )  # fmt: skip

    def terminate(self, child: Child) -> None:
        """Ask a process to end in good order. Does nothing when it has ended.

        Only the leader gets the signal: a DataLoader whose processes die first fails instead of draining.
        """
        self._end(child, "end")

    def kill(self, child: Child) -> None:
        """Kill a process and everything it has started. Does nothing when it has ended."""
        self._end(child, "kill")

    def _end(self, child: Child, action: str) -> None:
        running = self._running.get(child)
        if running is None or running.is_unwanted:
            return
        if running.connection is None:  # its host may take long to reply, and nothing has started there yet
            running.is_unwanted = True
            asyncio.get_running_loop().call_soon(self._ended, running, -signal.SIGTERM, "")
        else:
            running.connection.end(running.number, action)

    def _lines(self, running: Running, lines: Iterable[str]) -> None:
        if not self._is_closed:
            for line in lines:
                self._on_line(running.spec.child, line)

    def _ended(self, running: Running, code: int, why: str) -> None:
        """Report the end. `why`: the reason if it did not start or was lost."""
        if self._is_closed:
            return
        connection = running.connection
        if self.has_agent_each and connection is not None:
            if connection.is_lost:
                code, why = self._lost(running, connection)
            else:  # its agent has no other process
                watched(connection.close())
        self._lines(running, running.splitter.feed(b""))
        if why:
            self._lines(running, [f"cannot start {why}" if code == CANNOT_START else why])
        del self._running[running.spec.child]
        self.results[running.spec.child] = bytes(running.results)
        self._on_exit(running.spec.child, code)

    def _lost(self, running: Running, connection: Connection) -> tuple[int, str]:
        """Returns exit code and reason of a process that was lost with its own agent."""
        return HOST_LOST, f"{connection.name} was lost"

    def _threads_env(self, num_threads: int) -> dict[str, str]:
        """Returns the variable for a process's number of threads, unless the user has chosen one."""
        is_chosen = self._site.config.worker.threads is not None or "OMP_NUM_THREADS" in os.environ
        return {} if is_chosen else {"OMP_NUM_THREADS": str(num_threads)}

    def _connection(self, **how: Any) -> Connection:
        self._connections.append(Connection(**how))
        return self._connections[-1]

    def _until_closed(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Kill what is left, and release the backend's resources. Nothing is reported after this."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(connection.close() for connection in self._connections))


async def start_helper(*argv: str, **how: Any) -> Process:
    """Start a child that lives until its input is closed."""
    return await asyncio.create_subprocess_exec(
        *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=MAX_LINE_BYTES, **how
    )


async def end_helper(process: Process, *, terminates: bool = False) -> None:
    """Close its input, and kill it when its end takes too long."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(ProcessLookupError):
        if terminates:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def command_text(spec: ProcessSpec, *before: str) -> str:
    """Returns the command for a shell, without the values of variables that are named like secrets."""
    env = []
    for name, value in sorted(spec.env.items()):
        is_secret = _SECRET.search(name) and not _FILE.match(name)
        env.append(f"{name}={'...' if is_secret else shlex.quote(value)}")
    return " ".join([*env, shlex.join([*before, *spec.argv])])


def _own_settings() -> dict[str, str]:
    """Returns the launcher's PS_ variables: settings and the token, not its own rank and address."""
    names = (name for name in os.environ if name.startswith("PS_") and name not in LAUNCHER_ENV_NAMES)
    return {name: os.environ[name] for name in names}
