"""Programs that are forked from processes which have imported what they need, and groups of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.tests.cluster import Forked, Zygote, end_well, zygote
from paramserver.tests.ports import free_port

MEMBER = "paramserver.tests.replica_group.member"
STAGES = "paramserver.tests.replica_group.stages"
# Programs that import what takes long, and so are forked from a process of their own.
NEEDS = {"on_lightning": "lightning", "on_huggingface": "transformers", "on_accelerate": "accelerate", STAGES: "torch"}
SERVER = "paramserver.ps.main"


class Program:
    """A module whose `main` forked processes run."""

    def __init__(self, module: str) -> None:
        self._module, needs = module, NEEDS.get(module)
        if needs is not None and importlib.util.find_spec(needs) is None:
            pytest.skip(f"{needs} is not installed: pip install -c constraints.txt -e '.[trainers]'")
        self._zygote = zygote() if needs is None else Zygote(module)

    def fork(self, name: str, folder: Path, *argv: str, **environ: str) -> Forked:
        return self._zygote.fork(name, folder, ("-m", self._module, *argv), self._zygote.environ | environ)

    def stop(self) -> None:
        if self._zygote is not zygote():
            self._zygote.stop()


class Programs(dict[str, Program]):
    def __missing__(self, module: str) -> Program:
        self[module] = Program(module)
        return self[module]


@pytest.fixture(scope="session")
def forks() -> Iterator[Programs]:
    forks = Programs()
    yield forks
    for program in forks.values():
        program.stop()


class Run:
    """A server, and workers each of which is a group of processes."""

    def __init__(self, forks: Programs, folder: Path) -> None:
        self.forks, self.folder = forks, folder
        self.address, self.port = "", 0  # of the server; of the newest group
        self.processes: list[Forked] = []

    def serve(self, *flags: str) -> Forked:
        listen = ("--listen", "127.0.0.1:0", "--summary", str(self.folder / "s.json"))
        server = self.forks[SERVER].fork("server", self.folder, *listen, *flags)
        self.processes.append(server)
        self.address = server.event("listening")["address"]
        return server

    def group(
        self, rank: int, size: int, *words: str, absent: int = -1, life: int = 0, of: str = MEMBER,
        is_rest: bool = False, **env: str,
    ) -> list[Forked]:  # fmt: skip
        """The processes of one worker, as torchrun would start them; `is_rest`: of the one that was started last."""
        if not is_rest:
            self.port = free_port()
        environ = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port), "PS_SERVER": self.address, "PS_WORKER__GROUP": "true",
            "PS_WORKER__RANK": str(rank),
        }  # fmt: skip
        found = []
        for inner in range(size):
            if inner != absent:
                extra = env.get(f"inner{inner}", "")
                more = dict(part.split("=", 1) for part in extra.split()) | {
                    key: value for key, value in env.items() if not key.startswith("inner")
                }
                variables = environ | {"RANK": str(inner), "LOCAL_RANK": str(inner)} | more
                name = f"w{rank}-{inner}-{life}"
                first = (str(self.folder), f"w{rank}") if of == MEMBER else ()
                found.append(self.forks[of].fork(name, self.folder, *first, *words, **variables))
        self.processes += found
        return found

    def end(self) -> None:
        """All end well: workers first, for which a server waits."""
        end_well(*reversed(self.processes))

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "s.json").read_text())  # type: ignore[no-any-return]

    def stop(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(9)


@pytest.fixture
def run(forks: Programs, tmp_path: Path) -> Iterator[Run]:
    run = Run(forks, tmp_path)
    yield run
    run.stop()
