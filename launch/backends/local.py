"""Processes on this machine, each the leader of its own session and process group.

A session of its own keeps a terminal's Ctrl-C away from the children: only the launcher gets
it, and drains them. A process group per child is what can be killed with all it has started.
One thread: pipes are read when the event loop says so, and SIGCHLD tells of ends. (asyncio's
own subprocesses wait in a thread each, and see an end only when no grandchild holds the pipe.)
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass, field

from ...common.config.sources import LAUNCHER_ENV_NAMES
from ..events import LineSplitter
from ..exits import CANNOT_START
from ..guardian import Guardian
from ..lifelines import end_with, kill_group
from ..plan import Child, ProcessSpec
from .base import Backend, OnExit, OnLine, Site

_MAX_READ_BYTES = 1 << 14  # more would keep a signal waiting while a chatty child's lines are shown


@dataclass
class _Running:
    child: Child
    popen: subprocess.Popen[bytes]
    pipe: int  # its standard output and error, in the order they were written
    splitter: LineSplitter = field(default_factory=LineSplitter)


class LocalBackend(Backend):
    """See `base.Backend`."""

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site | None = None) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._running: dict[Child, _Running] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._guardian = Guardian()

    def start(self, spec: ProcessSpec) -> None:
        # A place of the launcher's own (RANK, SLURM_PROCID, ...) is not its children's.
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV_NAMES}
        try:
            popen = subprocess.Popen(
                spec.argv,
                env={**inherited, **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with(os.getpid()),
            )
        except OSError as error:
            self._loop.call_soon(self._report_failed_start, spec.child, f"{spec.argv[0]}: {error.strerror}")
            return
        self._guardian.watch(popen.pid)
        assert popen.stdout is not None
        pipe = os.dup(popen.stdout.fileno())
        popen.stdout.close()
        os.set_blocking(pipe, False)
        running = self._running[spec.child] = _Running(spec.child, popen, pipe)
        self._loop.add_reader(pipe, self._read, running)

    def terminate(self, child: Child) -> None:
        # Only the leader: what it has started is its to end, and a DataLoader whose
        # processes die under it fails instead of draining.
        if child in self._running:
            self._running[child].popen.terminate()

    def kill(self, child: Child) -> None:
        if child in self._running:
            kill_group(self._running[child].popen.pid)

    def close(self) -> None:
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for running in self._running.values():
            kill_group(running.popen.pid)
            running.popen.wait()
            self._release(running)
        self._running.clear()
        self._guardian.close()

    def _report_failed_start(self, child: Child, why: str) -> None:
        self._on_line(child, f"cannot start {why}")
        self._on_exit(child, CANNOT_START)

    def _read(self, running: _Running) -> bool:
        """Pass on what is in the pipe; False when there is nothing more."""
        try:
            data = os.read(running.pipe, _MAX_READ_BYTES)
        except BlockingIOError:
            return False
        for line in running.splitter.feed(data):
            self._on_line(running.child, line)
        if not data:  # closed its output, and may go on without
            self._loop.remove_reader(running.pipe)
        return bool(data)

    def _reap(self) -> None:
        """Report every process that has ended, in the order they were started."""
        for child, running in list(self._running.items()):
            code = running.popen.poll()
            if code is None or child not in self._running:
                continue
            del self._running[child]
            # Its number stays the group's as long as anything it started is alive.
            kill_group(running.popen.pid)
            for _ in range(256):  # more than a pipe holds; a daemon it left may write for ever
                if not self._read(running):
                    break
            for line in running.splitter.rest():
                self._on_line(child, line)
            self._release(running)
            self._on_exit(child, code)

    def _release(self, running: _Running) -> None:
        self._guardian.forget(running.popen.pid)
        self._loop.remove_reader(running.pipe)
        os.close(running.pipe)


ENTRY = LocalBackend
