"""Launchers whose processes run on the hosts of a real sshd; nothing of a test may be left there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.tests.launch.conftest import DEADLINE_S, Marked, marked, read_until, sshd, wait_until
from paramserver.tests.remote.sshd import Sshd, hosts_yaml

__all__ = ["marked", "read_until", "sshd", "wait_until"]


_GONE_S = 2.0


class Remote:
    """A hosts file, launchers that use it, and what they left."""

    def __init__(self, sshd: Sshd, marked: Marked) -> None:
        self.sshd = sshd
        self.marked = marked
        self.folder = marked.folder
        self._entries: tuple[str, ...] = ()
        self._workdir: Path | None = None

    def hosts(self, *entries: str, workdir: Path | None = None) -> None:
        self._entries, self._workdir = entries, workdir

    def launch(self, *argv: str, **env: str) -> Any:
        """A launcher with the stand-in programs, which are told by FAKE_ variables what to do."""
        return self.marked.launch("--hosts", "hosts.yaml", *argv, **self._env(env))

    def run(self, *argv: str, **env: str) -> Any:
        """The same to its end, after which nothing is left anywhere, at once."""
        run = self.marked.run("--hosts", "hosts.yaml", *argv, **self._env(env))
        assert self.sshd.left() == []
        return run

    def _env(self, env: dict[str, str]) -> dict[str, str]:
        """The launcher's own variables; the others are the hosts', which get them from the file."""
        theirs = {name: value for name, value in env.items() if not name.startswith("PS_")}
        hosts_yaml(self.folder / "hosts.yaml", *self._entries, workdir=self._workdir, env=theirs)
        return {"PS_LAUNCH__SSH": self.sshd.ssh, **{name: env[name] for name in env.keys() - theirs.keys()}}

    def left(self) -> list[str]:
        """What still runs; what has just been killed has a moment to be gone."""
        end = time.monotonic() + _GONE_S
        while (found := [*self.sshd.left(), *self.marked.left()]) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def until_running(self, count: int) -> None:
        """Wait for so many processes on the hosts: one that has just been forked may not be recognised yet."""
        end = time.monotonic() + DEADLINE_S
        while len(self.sshd.running()) < count:
            assert time.monotonic() < end, self.sshd.running()
            time.sleep(0.02)


@pytest.fixture
def remote(sshd: Sshd, marked: Marked) -> Iterator[Remote]:
    yield Remote(sshd, marked)
    end = time.monotonic() + DEADLINE_S
    while sshd.left():
        assert time.monotonic() < end, f"left on the hosts: {sshd.left()}"
        time.sleep(0.01)
