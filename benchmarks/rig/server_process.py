"""A real `ps-server` in a process of its own, for as long as a measurement takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...common.config.sources import LAUNCHER_ENV_NAMES
from ...common.errors import ParamServerError

_START_S = 60.0
_STOP_S = 10.0


class ServerProcess:
    """A started server: its address, and the events it writes. Made by `running_server`."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.pid = process.pid
        self.events: list[dict[str, Any]] = []
        self._process, self._name = process, name
        self._texts: list[str] = []  # lines that are no events: a message for a person
        self._changed = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, name="server-events", daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        """The server's address; waits until it listens."""
        return str(self.wait_for("listening", _START_S)["address"])

    def wait_for(self, event: str, timeout_s: float) -> dict[str, Any]:
        """The first event of this name. ParamServerError, with the server's own words, when it does not come."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = next((item for item in self.events if item.get("event") == event), None)
                if found is not None:
                    return found
                left_s = deadline - time.monotonic()
                if self._has_ended or left_s <= 0:
                    problem = "ended" if self._has_ended else f"said nothing for {timeout_s:g} s"
                    output = "".join(f"\n{line}" for line in self._texts[-20:])
                    raise ParamServerError(f"{self._name} {problem} before '{event}'{output}")
                self._changed.wait(left_s)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            with self._changed:
                if isinstance(event, dict):
                    self.events.append(event)
                else:
                    self._texts.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Kill the server: it has nothing left to write."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(_STOP_S)


@contextmanager
def running_server(*flags: str) -> Iterator[ServerProcess]:
    """`ps-server` on a free port of loopback with these flags, stopped at the end of the block.

    It keeps nothing on record unless they say so.
    """
    with running("paramserver.ps", "--listen", "127.0.0.1:0", "--no-store", *flags) as server:
        yield server


@contextmanager
def running(module: str, *flags: str) -> Iterator[ServerProcess]:
    """A program of ours with these flags, stopped at the end of the block.

    It may still be starting when the block begins, so that several start side by side.
    """
    server = None
    try:
        with undisturbed():
            process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                env={**clean_environment(), "PS_LOG__FORMAT": "json"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            server = ServerProcess(process, module)
        yield server
    finally:
        if server is not None:
            server.stop()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block: a process that it starts is known by then, and is ended."""
    came: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [(each, signal.signal(each, lambda got, _: came.append(got))) for each in signals]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)
    if came:
        signal.raise_signal(came[0])


@contextmanager
def watching(how: str) -> Iterator[tuple[str, ...]]:
    """Flags of a server that records its run (`store`, in a folder of the block), has a `dashboard`, or neither."""
    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        flags = {"store": ("--store", "--set", f"output.track_dir={folder}"), "dashboard": ("--web", "127.0.0.1:0")}
        yield flags.get(how, ())


def clean_environment() -> dict[str, str]:
    """The environment without settings of ours: a benchmark's settings are its flags alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PS_") and name not in LAUNCHER_ENV_NAMES
    }
