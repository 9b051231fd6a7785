"""Processes on this machine, started by one agent, a child of the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from ..hosts.connection import Connection, agent_command
from ..plan.hosts import THIS_MACHINE
from .base import Backend, Running


class LocalBackend(Backend):
    """See `base.Backend`."""

    async def _agent(self, running: Running) -> tuple[Connection, Mapping[str, str], str]:
        """The agent, or another one if someone has killed it."""
        if not self._connections or self._connections[-1].is_lost:
            self._connection(name=THIS_MACHINE, command=agent_command()).begin()
        return self._connections[-1], {}, "."


ENTRY = LocalBackend
