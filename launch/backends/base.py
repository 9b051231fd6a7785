"""What a backend does: start processes somewhere, report their lines and their end, end them.

It runs on the launcher's event loop, so it calls `on_line` and `on_exit` from there, one at a
time. What every backend promises (tests/launch/test_backend_contract.py):

- each line a process wrote comes before the report of its end;
- each started process is reported to have ended exactly once, also one that cannot be started
  (exits.CANNOT_START, after a line that says why) or whose host is lost (exits.HOST_LOST);
- the launcher's PS_ variables reach every process, its own place (RANK, PS_SERVER, ...) none;
- `kill` ends a process and everything it started; so does the process's own end;
- when the launcher dies, whatever the cause, nothing it started stays behind.

To add one: a file in this folder with `ENTRY = YourBackend`, a subclass of `Backend`. How it gets to know
what it needs:

- once, the `Site`: the whole configuration (a backend's own settings are fields of `LaunchConfig` in
  common/config/schema.py), the hosts of --hosts, and the folder the launcher was started in;
- with each process, its `ProcessSpec`: command line, environment, and, where the plan has placed it,
  the `host` (a name of `Site.hosts`, "" means wherever the backend likes) and `sharing`, the number of the
  run's processes of that kind on its host, by which the host's cores are divided (`threads`); 0 means that
  OMP_NUM_THREADS is not the launcher's to set. `needs` and `leaves` are the files it reads and writes there.

`spans_hosts` tells the planner that processes may land on other machines. Then their settings travel as --set
instead of as --config FILE, servers listen on all addresses (0.0.0.0) unless told where, and the summary is
written by the launcher. The life of a backend in a job:

    __init__ ─> prepare() ─> start(server) ... its `listening` event ─> reach(), for each server
             ─> start(shards) ─> check_reach(addresses) ─> start(workers) ... ─> close()

The contract test builds each backend with the fixture `<name>_site`, which gives its `Site`.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ...common.config.schema import Config
from ...common.config.sources import LAUNCHER_ENV_NAMES
from ..hosts.connection import Connection
from ..plan.hosts import Host
from ..plan.process import WILDCARDS, Child, ProcessSpec
from ..supervise.exits import CANNOT_START
from ..view.events import LineSplitter

OnLine = Callable[[Child, str], None]
OnExit = Callable[[Child, int], None]

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)
_FILE = re.compile(r"^PS_SECURITY__")  # of these, only where the secret is


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a backend is told once."""

    config: Config
    hosts: tuple[Host, ...] = ()  # of --hosts
    folder: str = "."  # where the launcher was started


class Backend(ABC):
    """Built inside the running event loop. `prepare`, `check_reach`, `reach` and `dry_run` have defaults."""

    spans_hosts: ClassVar[bool] = False
    takes_hosts: ClassVar[bool] = False  # whether --hosts is for this one

    @abstractmethod
    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None: ...

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:  # noqa: B027  (nothing, by default)
        """Before anything starts: see that these can. Raises ParamServerError, a line for each host that cannot."""

    @abstractmethod
    def start(self, spec: ProcessSpec) -> None:
        """Start a process; its failure to start is reported as its end."""

    @abstractmethod
    def terminate(self, child: Child) -> None:
        """Ask for an end in good order. Nothing happens when it has ended."""

    @abstractmethod
    def kill(self, child: Child) -> None:
        """End it and everything it started at once. Nothing happens when it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Kill what is left and give back what the backend holds; nothing is reported any more."""

    def reach(self, child: Child, address: str) -> str:
        """Where the run's other processes connect to a server that says it listens on `address`."""
        return with_host(address, WILDCARDS)

    async def check_reach(  # noqa: B027
        self, addresses: Mapping[Child, str], specs: Sequence[ProcessSpec]
    ) -> None:
        """Before the workers (`specs`) start: see that they can connect. Raises ParamServerError as prepare."""

    @classmethod
    def dry_run(cls, specs: Sequence[ProcessSpec], site: Site) -> list[str]:
        """The commands that would start these, for people to read; no secrets in them."""
        return [f"[{spec.child}] {command_text(spec)}" for spec in specs]


@dataclass
class Running:
    """A process, from the wish to start it to its end."""

    spec: ProcessSpec
    splitter: LineSplitter = field(default_factory=LineSplitter)
    connection: Connection | None = None  # with the agent that has it; None: that is not there yet
    number: int = 0  # the agent's for it
    is_unwanted: bool = False  # ended before it was started


class AgentBackend(Backend):
    """What backends have in common whose processes an agent starts (`launch/hosts/agent.py`), wherever it is."""

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._site = site
        self._running: dict[Child, Running] = {}
        self._is_closed = False

    def terminate(self, child: Child) -> None:
        # Only the leader: what it has started is its to end, and a DataLoader whose
        # processes die under it fails instead of draining.
        self._end(child, Connection.end)

    def kill(self, child: Child) -> None:
        self._end(child, Connection.kill)

    def _end(self, child: Child, how: Callable[[Connection, int], None]) -> None:
        running = self._running.get(child)
        if running is None or running.is_unwanted:
            return
        if running.connection is None:  # its host may take long to answer, and nothing of it is there yet
            running.is_unwanted = True
            asyncio.get_running_loop().call_soon(self._ended, running, -signal.SIGTERM, "")
        else:
            how(running.connection, running.number)

    def _start_with(
        self, connection: Connection, running: Running, env: Mapping[str, str], folder: str, sharing: int = 0
    ) -> None:
        """Let the agent start it, `env` added to the agent's environment."""
        running.connection = connection
        message = {"argv": list(running.spec.argv), "env": dict(env), "folder": folder, "sharing": sharing}
        running.number = connection.start(
            message,
            lambda data: self._said(running, running.splitter.feed(data)),
            lambda code, why: self._ended(running, code, why),
        )

    def _said(self, running: Running, lines: Iterable[str]) -> None:
        if not self._is_closed:
            for line in lines:
                self._on_line(running.spec.child, line)

    def _ended(self, running: Running, code: int, why: str) -> None:
        """It has ended; `why` it could not be started or was lost, if so."""
        if self._is_closed:
            return
        self._said(running, running.splitter.rest())
        if why:
            self._said(running, [f"cannot start {why}" if code == CANNOT_START else why])
        del self._running[running.spec.child]
        self._on_exit(running.spec.child, code)

    def _close(self, connections: Iterable[Connection]) -> None:
        """End the agents, all at the same time, and with them what they have started."""
        self._is_closed = True
        connections = list(connections)
        for connection in connections:
            connection.begin_close()
        for connection in connections:
            connection.close()
        self._running.clear()


def with_host(address: str, hosts: Mapping[str, str]) -> str:
    """`address` with its host replaced where `hosts` says so."""
    host, _, port = address.rpartition(":")
    return f"{hosts.get(host, host)}:{port}"


def command_text(spec: ProcessSpec) -> str:
    """What a person would type in a shell; a variable that is named like a secret is not shown."""
    shown = {
        name: "..." if _SECRET.search(name) and not _FILE.match(name) else value
        for name, value in sorted(spec.env.items())
    }
    env = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
    return " ".join([*env, shlex.join(spec.argv)])


def handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's PS_ variables: settings and the token. Not its own place in a job it is part of."""
    return {name: value for name, value in environ.items() if name.startswith("PS_") and name not in LAUNCHER_ENV_NAMES}


def threads(num_cores: int, sharing: int) -> int:
    """A process's share of its host's cores, at least one."""
    return max(1, num_cores // max(1, sharing))
