"""A process of a run: its name, and how to start it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # with the addresses at which this machine reaches them


@dataclass(frozen=True)
class Child:
    """The stable name of a process of the run. Server 0 is the coordinator. The others are shards, or relays."""

    role: str  # "server", "worker" or "serve"
    rank: int
    region: str = field(default="", compare=False)  # of a relay

    def __str__(self) -> str:
        if self.region:
            return f"relay {self.region}"
        if self.role == "server":
            return f"server shard {self.rank}" if self.rank else "server"
        return self.role if self == SERVE else f"{self.role} {self.rank}"


SERVER = Child("server", 0)
SERVE = Child("serve", 0)  # ps-serve beside the run


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `env` is added to the backend's environment."""

    child: Child
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str = ""  # of its placement; "": the backend decides
    sharing: int = 0  # processes that share that host's cores; 0: the launcher sets no number of threads
    needs: tuple[str, ...] = ()  # files that it reads on its host
    leaves: tuple[str, ...] = ()  # files that it writes there
    reports: bool = False  # the results of the run
