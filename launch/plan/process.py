"""A process of a run: its name, and what starts it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # and where this machine itself reaches them


class Child(NamedTuple):
    """The stable name of a process of the run. Server 0 coordinates; further ones are its shards."""

    role: str  # "server" or "worker"
    rank: int

    def __str__(self) -> str:
        if self.role == "server":
            return f"server shard {self.rank}" if self.rank else "server"
        return f"{self.role} {self.rank}"


SERVER = Child("server", 0)


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `env` is added to the environment the backend gives."""

    child: Child
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str = ""  # where it was placed; "": where the backend likes
    sharing: int = 0  # processes that divide that host's cores; 0: the number of threads is not the launcher's to set
    needs: tuple[str, ...] = ()  # files it reads,
    leaves: tuple[str, ...] = ()  # and writes, as it finds them where it runs
