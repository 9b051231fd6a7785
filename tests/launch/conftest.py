"""Real launchers with stand-in programs, and a way to see which processes are left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER = str(PROGRAMS / "launch_with_fakes.py")
DEADLINE_S = 15.0


class Marked:
    """Processes that carry a mark in their environment, with everything they start."""

    launcher = LAUNCHER

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        """A Python program; both outputs are pipes."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PS_", "FAKE_"))}
        return subprocess.Popen(
            [sys.executable, *argv],
            env={**clean, "PS_TEST_MARK": self.mark, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        return self.start(LAUNCHER, *argv, **env)

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A launcher's whole life; whatever it was, nothing of it may be left."""
        process = self.launch(*argv, **env)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert self.left() == []
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def left(self) -> list[str]:
        """What still runs and carries the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PS_TEST_MARK") == self.mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Marked]:
    marked = Marked(tmp_path)
    yield marked
    for process in psutil.process_iter():
        try:
            if process.environ().get("PS_TEST_MARK") == marked.mark:
                process.kill()
        except psutil.Error:
            continue


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
                return line
        raise AssertionError(f"no line with {words} in:\n{''.join(seen)}")

    return read
