"""Starts servers, workers and scripts over loopback, and reads what they say.

Most of them are forked from a process that has imported torch and the product, which takes seconds otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paramserver.tests.late import come_late

SCRIPTS = Path(__file__).parent / "loopback" / "scripts"
PROGRAMS = Path(__file__).parent / "trainers" / "programs"
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

    def until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait for a condition on the outside world, for at most DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.name}: no {description} in {DEADLINE_S} s\n{self.output}"
            assert self.popen.poll() is None or condition(), f"{self.name} ended without {description}\n{self.output}"
            time.sleep(0.01)
        come_late()

    def event(self, name: str) -> dict:
        """The first event of this name, once it is there."""
        self.until(lambda: bool(self.events(name)), f"event '{name}'")
        return self.events(name)[0]

    def snapshot(self, least: int = 1) -> None:
        """Returns once it has a snapshot of this version or a later one."""
        self.until(lambda: any(event["version"] >= least for event in self.events("snapshot")), f"snapshot of {least}")

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code, once the process has ended by itself."""
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGABRT)
            self.popen.wait(DEADLINE_S)
            pytest.fail(f"{self.name} still runs after {deadline_s} s\n{self.output}")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns once the process is gone."""
        self.signal(signal.SIGKILL)
        self.popen.wait(DEADLINE_S)


def at_gates(*processes: Process, gate: str = "") -> None:
    """Returns once all of these have said that they are at their gate."""
    for process in processes:
        process.until(lambda process=process: f"at the gate {gate}".strip() in process.output, f"gate {gate}")


def end_well(*processes: Process) -> None:
    """All of these end by themselves, without a mistake."""
    for process in processes:
        code = process.wait()
        assert not code, f"{process.name}: {code}\n" + "\n".join(f"== {item.name}\n{item.output}" for item in processes)


class Fork:
    """As much of a Popen as `Process` uses."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self._code = pid, Path(f"{log}.code")

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float = DEADLINE_S) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self._code), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(Process):
    def __init__(self, name: str, log: Path, pid: int) -> None:
        self.name, self.path, self.popen = name, log, Fork(pid, log)  # type: ignore[assignment]


class Zygote:
    """A process that has imported `modules` and the product, and forks itself into programs."""

    def __init__(self, *modules: str) -> None:
        skipped = ("PS_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(skipped)}
        self.environ |= {"PS_LOG__FORMAT": "json", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.environ |= {"PS_SERVER__ABSENT_S": "0", "GRPC_ENABLE_FORK_SUPPORT": "0"}
        path = os.pathsep.join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH")]))
        self._popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environ | {"PYTHONPATH": path}, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._popen.stdout.readline() == "ready\n"

    def fork(
        self, name: str, folder: Path, argv: Sequence[str], environ: dict[str, str], errors: Path | None = None
    ) -> Forked:
        """Runs `python ARGV` with this environment; both outputs go to one file, or errors to another."""
        log = folder / f"{name}.log"
        log.touch()
        order = {"log": str(log), "errors": str(errors or log), "environ": environ, "folder": str(folder), "argv": argv}
        print(json.dumps(order), file=self._popen.stdin, flush=True)
        return Forked(name, log, int(self._popen.stdout.readline()))

    def stop(self) -> None:
        self._popen.kill()  # its children die with it
        self._popen.wait()


@cache
def zygote() -> Zygote:
    """The one of this process, which ends with it."""
    started = Zygote()
    atexit.register(started.stop)
    return started


def run_forked(folder: Path, *argv: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python ARGV` to its end, with its outputs in files of the folder."""
    name = f"command{len(list(folder.glob('command*.log')))}"
    errors = folder / f"{name}.errors"
    forked = zygote().fork(name, folder, argv, environ, errors)
    return subprocess.CompletedProcess(argv, forked.wait(1.5 * DEADLINE_S), forked.output, errors.read_text())


class Cluster:
    """Starts servers, workers and scripts in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.address = ""
        self.scripts = SCRIPTS
        self.prefix: tuple[str, ...] = ()  # the command that runs what is started next on another host
        self.forks = True  # servers, workers and scripts; otherwise each is a Python of its own
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("PS_", "RANK", "WORLD_SIZE"))}
        self._env |= {"PS_LOG__FORMAT": "json", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._env |= {"PS_SERVER__ABSENT_S": "0"}  # tests that kill a worker for good do not wait for it

    def start(self, name: str, *argv: str, **env: str) -> Process:
        process = Process(name, [*self.prefix, sys.executable, *argv], self._env | env, self.folder)
        self.processes.append(process)
        return process

    def fork(self, name: str, *argv: str, **env: str) -> Process:
        """The same, sooner."""
        if self.prefix or not self.forks or "PYTHONPATH" in env:
            return self.start(name, *argv, **env)
        self.processes.append(zygote().fork(name, self.folder, argv, self._env | env))
        return self.processes[-1]

    def server(self, *flags: str, **env: str) -> Process:
        """ps-server on a free port; returns once it listens."""
        listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
        process = self.fork(f"server{len(self.processes)}", "-m", "paramserver.ps", *listen, *flags, **env)
        self.address = process.event("listening")["address"]
        return process

    def shard(self, number: int, shards: int, *flags: str, **env: str) -> Process:
        """Another shard of the server started last; registers with it by itself."""
        argv = ("-m", "paramserver.ps", "--shard", str(number), "--shards", str(shards))
        where = ("--coordinator", self.address, *(() if "--listen" in flags else ("--listen", "127.0.0.1:0")))
        return self.fork(f"shard{number}-{len(self.processes)}", *argv, *where, *flags, **env)

    def shards(self, shards: int, *flags: str) -> list[Process]:
        """All other shards of the server started last."""
        return [self.shard(number, shards, *flags) for number in range(1, shards)]

    def worker(self, rank: int, *flags: str, **env: str) -> Process:
        name = f"worker{rank}-{len(self.processes)}"
        argv = ("-m", "paramserver.worker", "--rank", str(rank), "--server", self.address, *flags)
        return self.fork(name, *argv, **env)

    def script(self, rank: int, script: str | Path, *args: str, **env: str) -> Process:
        """A training script of the user's own, told its place by the environment."""
        path = SCRIPTS / script if isinstance(script, str) else script
        environ = {"RANK": str(rank), "PS_SERVER": self.address}
        return self.fork(f"script{rank}-{len(self.processes)}", str(path), *args, **(environ | env))

    def command(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of the programs to its end: `command("ps", "--mode", "x")`."""
        words = ("-m", f"paramserver.{argv[0]}", *argv[1:])
        env = self._env | {"PS_LOG__FORMAT": "text"} | env
        return run_forked(self.folder, *words, environ=env)

    def summary(self) -> dict[str, Any]:
        """What the server has written with `--summary s.json`."""
        return json.loads((self.folder / "s.json").read_text())  # type: ignore[no-any-return]

    def history(self, is_checked: bool = False) -> list[dict[str, Any]]:
        """What it has written with `--history h.jsonl`, in which `ps-launch check` finds nothing wrong."""
        if is_checked:
            checked = self.command("launch", "check", "h.jsonl")
            assert checked.returncode == 0, checked.stdout + checked.stderr
        return [json.loads(line) for line in (self.folder / "h.jsonl").read_text().splitlines()]

    def stop(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has just been forked
                    os.killpg(process.popen.pid, signal.SIGKILL)
                process.kill()


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
