"""Real launchers with stand-in programs, and a way to see which processes are left of them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paramserver.common.config.schema import Config
from paramserver.common.config.sources import load_config
from paramserver.launch.backends.base import Site
from paramserver.launch.hosts.remote import hosts_of
from paramserver.tests.cluster import run_forked
from paramserver.tests.engines.slurm import SlurmCluster, missing
from paramserver.tests.late import come_late
from paramserver.tests.marks import marked_processes
from paramserver.tests.remote.sshd import Sshd, hosts_yaml, need_sshd

PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER = str(PROGRAMS / "launch_with_fakes.py")
DEADLINE_S = 120.0


class Marked:
    """Processes that carry a mark in their environment, with everything they start."""

    launcher = LAUNCHER
    on_hangup = signal.SIG_DFL  # whatever the tests themselves were started with, as by nohup

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        """A Python program; both outputs are pipes."""
        return subprocess.Popen(
            [sys.executable, *argv],
            env=self._environ(env),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, self.on_hangup),
        )

    def _environ(self, env: dict[str, str]) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PS_", "FAKE_"))}
        return {**clean, "PS_TEST_MARK": self.mark, **env}

    def launch(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        return self.start(LAUNCHER, *argv, **env)

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A launcher's whole life; whatever it was, nothing of it may be left."""
        done = run_forked(self.folder, LAUNCHER, *argv, environ=self._environ(env))
        assert self.left() == []
        return done

    def left(self) -> list[str]:
        """What still runs and carries the mark."""
        return list(marked_processes(self.mark).values())


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Marked]:
    marked = Marked(tmp_path)
    yield marked
    for process in marked_processes(marked.mark):
        with suppress(psutil.Error):
            process.kill()


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Poll a condition; the test fails when it does not come true."""

    def wait(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not true within {deadline_s} s"
            time.sleep(0.01)  # the pause of a poll, not a guess at how long something takes

    return wait


@pytest.fixture
def read_until() -> Callable[..., str]:
    """Read lines of a pipe up to the one that contains all words, which is returned."""

    def read(pipe: Iterator[str], *words: str) -> str:
        seen = []
        for line in pipe:
            seen.append(line)
            if all(word in line for word in words):
                come_late()
                return line
        raise AssertionError(f"no line with {words} in:\n{''.join(seen)}")

    return read


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    need_sshd()
    daemon = Sshd(tmp_path_factory.mktemp("sshd"))
    yield daemon
    daemon.close()


@pytest.fixture
def local_site() -> Site:
    return Site(config=Config())


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm_site(slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    return Site(config=Config(), folder=str(tmp_path))


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install -c constraints.txt -e '.[ray]'")
    argv = [sys.executable, str(PROGRAMS / "ray_nodes.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdin is not None and nodes.stdout is not None
        address = nodes.stdout.readline().strip()
        assert address, "no Ray cluster"
        yield address
        nodes.stdin.close()


@pytest.fixture
def ray_site(ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Three nodes on this machine; also in the environment, for a launcher that is started."""
    monkeypatch.setenv("PS_LAUNCH__RAY_ADDRESS", ray_address)
    return Site(config=load_config(None, {}, [], dict(os.environ)).config, folder=str(tmp_path))


@pytest.fixture
def ssh_site(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Two hosts; also in the environment, for a launcher that is started."""
    monkeypatch.setenv("PS_LAUNCH__SSH", sshd.ssh)
    monkeypatch.setenv("PS_LAUNCH__HOSTS", hosts_yaml(tmp_path / "hosts.yaml", "node2", "node3"))
    config = load_config(None, {}, [], dict(os.environ)).config
    yield Site(config=config, hosts=hosts_of(config), folder=str(tmp_path))
    end = time.monotonic() + DEADLINE_S
    while sshd.left():
        assert time.monotonic() < end, f"left on the hosts: {sshd.left()}"
        time.sleep(0.01)
