"""Programs that are forked from processes which have imported what they need, and groups of them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.tests.cluster import Process

PROGRAMS = Path(__file__).parent / "trainers" / "programs"
NEEDS = {"on_lightning": "lightning", "on_huggingface": "transformers", "on_accelerate": "accelerate"}
MEMBER = "paramserver.tests.replica_group.member"
SERVER = "paramserver.ps.main"


class Fork:
    """As much of a Popen as `Process` uses."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self._code = pid, Path(f"{log}.code")

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self._code), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Forked(Process):
    def __init__(self, name: str, log: Path, pid: int) -> None:
        self.name, self.path, self.popen = name, log, Fork(pid, log)  # type: ignore[assignment]


class Zygote:
    def __init__(self, module: str) -> None:
        skipped = (*("PS_", "RANK", "WORLD_SIZE"), "LOCAL_RANK")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(skipped)}
        environ |= {"PS_LOG__FORMAT": "json", "OMP_NUM_THREADS": "1", "PS_SERVER__ABSENT_S": "0"}
        told = os.environ.get("PYTHONPATH")  # of another checkout than the one that is installed
        environ["PYTHONPATH"] = os.pathsep.join([str(PROGRAMS), *([told] if told else [])])
        environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        self._popen = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "zygote.py"), module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True,
        )  # fmt: skip
        assert self._popen.stdout.readline() == "ready\n"

    def fork(self, name: str, folder: Path, *argv: str, **environ: str) -> Forked:
        log = folder / f"{name}.log"
        log.touch()
        print(json.dumps({"log": str(log), "environ": environ, "argv": argv}), file=self._popen.stdin, flush=True)
        return Forked(name, log, int(self._popen.stdout.readline()))

    def stop(self) -> None:
        self._popen.send_signal(signal.SIGKILL)  # its children die with it
        self._popen.wait()


class Zygotes(dict[str, Zygote]):
    def __missing__(self, module: str) -> Zygote:
        needs = NEEDS.get(module)
        if needs is not None and importlib.util.find_spec(needs) is None:
            pytest.skip(f"{needs} is not installed: pip install -c constraints.txt -e '.[trainers]'")
        self[module] = Zygote(module)
        return self[module]


@pytest.fixture(scope="module")
def forks() -> Iterator[Zygotes]:
    forks = Zygotes()
    yield forks
    for fork in forks.values():
        fork.stop()


class Run:
    """A server, and workers each of which is a group of processes."""

    def __init__(self, forks: Zygotes, folder: Path) -> None:
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
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.port = listener.getsockname()[1]
        place = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port), "PS_SERVER": self.address, "PS_WORKER__GROUP": "true",
            "PS_WORKER__RANK": str(rank),
        }  # fmt: skip
        found = []
        for inner in range(size):
            if inner != absent:
                own = env.get(f"inner{inner}", "")
                more = dict(part.split("=", 1) for part in own.split()) | {
                    key: value for key, value in env.items() if not key.startswith("inner")
                }
                told = place | {"RANK": str(inner), "LOCAL_RANK": str(inner)} | more
                name = f"w{rank}-{inner}-{life}"
                first = (str(self.folder), f"w{rank}") if of == MEMBER else ()
                found.append(self.forks[of].fork(name, self.folder, *first, *words, **told))
        self.processes += found
        return found

    def stop(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(9)


@pytest.fixture
def run(forks: Zygotes, tmp_path: Path) -> Iterator[Run]:
    run = Run(forks, tmp_path)
    yield run
    run.stop()
