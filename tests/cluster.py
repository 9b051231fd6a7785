"""Starts the real executables over loopback, and reads what they say.

Every process is started here, waited for here, and killed by its own pid at the end of the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paramserver.tests.late import come_late

SCRIPTS = Path(__file__).parent / "loopback" / "scripts"
DEADLINE_S = 120.0


class Process:
    """One child with its output in a file; `events()` are the JSON lines it has written."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.name = name
        self.path = folder / f"{name}.log"
        env = {"PYTHONFAULTHANDLER": "1"} | env  # one that hangs says where, see wait
        with self.path.open("wb") as file:
            self.popen = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, cwd=folder, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")

    def events(self, name: str | None = None) -> list[dict]:
        found = []
        for line in self.output.split("\n")[:-1]:  # what follows the last line's end is still being written
            if line.startswith("{") and line.endswith("}"):
                event = json.loads(line)
                if name is None or event.get("event") == name:
                    found.append(event)
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition on the outside world, for at most DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.name}: no {what} in {DEADLINE_S} s\n{self.output}"
            assert self.popen.poll() is None or condition(), f"{self.name} ended without {what}\n{self.output}"
            time.sleep(0.01)
        come_late()

    def event(self, name: str) -> dict:
        """The first event of this name, once it is there."""
        self.until(lambda: bool(self.events(name)), f"event '{name}'")
        return self.events(name)[0]

    def wait(self) -> int:
        """The exit code, once the process has ended by itself."""
        try:
            return self.popen.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGABRT)
            self.popen.wait(DEADLINE_S)
            pytest.fail(f"{self.name} still runs after {DEADLINE_S} s\n{self.output}")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)


class Cluster:
    """Starts servers, workers and scripts in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.address = ""
        self.scripts = SCRIPTS
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("PS_", "RANK", "WORLD_SIZE"))}
        self._env |= {"PS_LOG__FORMAT": "json", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._env |= {"PS_SERVER__ABSENT_S": "0"}  # tests that kill a worker for good do not wait for it

    def start(self, name: str, *argv: str, **env: str) -> Process:
        process = Process(name, [sys.executable, *argv], self._env | env, self.folder)
        self.processes.append(process)
        return process

    def server(self, *flags: str, **env: str) -> Process:
        """ps-server on a free port; returns once it listens."""
        listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
        process = self.start(f"server{len(self.processes)}", "-m", "paramserver.ps", *listen, *flags, **env)
        self.address = process.event("listening")["address"]
        return process

    def shard(self, number: int, shards: int, *flags: str, **env: str) -> Process:
        """Another shard of the server started last; registers with it by itself."""
        argv = ("-m", "paramserver.ps", "--shard", str(number), "--shards", str(shards))
        where = ("--coordinator", self.address, *(() if "--listen" in flags else ("--listen", "127.0.0.1:0")))
        return self.start(f"shard{number}-{len(self.processes)}", *argv, *where, *flags, **env)

    def worker(self, rank: int, *flags: str, **env: str) -> Process:
        name = f"worker{rank}-{len(self.processes)}"
        argv = ("-m", "paramserver.worker", "--rank", str(rank), "--server", self.address, *flags)
        return self.start(name, *argv, **env)

    def script(self, rank: int, script: str | Path, *args: str, **env: str) -> Process:
        """A training script of the user's own, told its place by the environment."""
        path = SCRIPTS / script if isinstance(script, str) else script
        place = {"RANK": str(rank), "PS_SERVER": self.address}
        return self.start(f"script{rank}-{len(self.processes)}", str(path), *args, **(place | env))

    def command(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of the programs to its end: `command("ps", "--mode", "x")`."""
        return subprocess.run(
            [sys.executable, "-m", f"paramserver.{argv[0]}", *argv[1:]],
            capture_output=True, text=True, timeout=1.5 * DEADLINE_S, env=self._env | {"PS_LOG__FORMAT": "text"} | env,
            cwd=self.folder, check=False,
        )  # fmt: skip

    def stop(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                os.killpg(process.popen.pid, signal.SIGKILL)
                process.popen.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests of a module, for those that leave nothing behind."""
    cluster = Cluster(tmp_path_factory.mktemp("shared"))
    yield cluster
    cluster.stop()
