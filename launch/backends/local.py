"""Processes on this machine, started by one agent, a child of the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.config.schema import Config
from ..hosts.connection import Connection, Route, agent_command
from ..plan.hosts import THIS_MACHINE
from ..plan.process import ProcessSpec
from .base import AgentBackend, OnExit, OnLine, Running, Site


class LocalBackend(AgentBackend):
    """See `base.Backend`."""

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site | None = None) -> None:
        super().__init__(on_line, on_exit, site or Site(config=Config()))
        self._connection: Connection | None = None

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:
        self._connected()

    def start(self, spec: ProcessSpec) -> None:
        running = self._running[spec.child] = Running(spec)
        self._start_with(self._connected(), running, spec.env, ".")

    def close(self) -> None:
        self._close([self._connection] if self._connection is not None else [])

    def _connected(self) -> Connection:
        """The agent, or another one if someone has killed it."""
        if self._connection is None or self._connection.is_lost:
            self._connection = Connection(Route(name=THIS_MACHINE, command=agent_command()))
            self._connection.begin()
        return self._connection


ENTRY = LocalBackend
