"""Servers and trainers that are forked from processes which have imported what they need."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.tests.loopback.conftest import Process

PROGRAMS = Path(__file__).parent / "programs"
NEEDS = {"on_lightning": "lightning", "on_huggingface": "transformers", "on_accelerate": "accelerate"}
sys.path.insert(0, str(PROGRAMS))  # for `problem`


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


@pytest.fixture(scope="session")
def zygotes() -> Iterator[Zygotes]:
    zygotes = Zygotes()
    yield zygotes
    for zygote in zygotes.values():
        zygote.stop()
