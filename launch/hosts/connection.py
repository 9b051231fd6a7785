"""The launcher's side of an agent: the command it is behind (`agent.py`), and the conversation with it.

What is said to the agent goes through a thread that may wait, and that says `beat` when there is nothing else:
a launcher whose terminal was stopped with Ctrl-S still lives. What comes back is read on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.config.sources import LAUNCHER_ENV_NAMES
from ..supervise.exits import HOST_LOST
from ..view.events import LineSplitter
from . import agent

BOOTSTRAP = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
_CLOSE_S = 5.0
_MAX_READ = 1 << 14  # more would keep a signal waiting while a chatty child's lines are shown
_TOOK_BYTES = 1 << 15
_NUM_LAST_LINES = 20


def agent_command(*drop: str, passes_on: bool = False) -> tuple[str, ...]:
    """The command of an agent where this package is installed; see `agent.main`."""
    options = {"limit_s": None, "drop": [*sorted(LAUNCHER_ENV_NAMES), *drop], "passes_on": passes_on}
    return (sys.executable, "-I", "-S", agent.__file__, json.dumps(options))


@dataclass(frozen=True, kw_only=True)
class Route:
    """How to an agent, and when it is lost."""

    name: str  # of its host, in sentences
    command: Sequence[str]
    env: Mapping[str, str] | None = None  # of the command; None: the launcher's own
    folder: str | None = None
    sends_source: bool = False  # the command is an interpreter with BOOTSTRAP
    lost_after_s: float | None = None  # neither side has heard the other for so long; None: a pipe says when it ends
    connect_s: float | None = None  # for the agent's first word
    is_left_alone: bool = False  # a signal is not how it ends: it may end by itself after the launcher has


class Unreachable(Exception):
    """There is no agent. `code` is the command's exit code, None if it did not end by itself."""

    def __init__(self, code: int | None, said: list[str]) -> None:
        super().__init__(said[-1] if said else f"exit code {code}")
        self.code = code
        self.said = said


class Guardian:
    """A process that outlives a killed launcher by the moment it takes to kill the groups it was told of."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", agent.__file__, "guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guardian, which kills the groups that were not forgotten."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # someone may have killed it; the run does not depend on it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


@dataclass
class _Running:
    on_data: Callable[[bytes], None]
    on_exit: Callable[[int, str], None]


class Connection:
    """One agent, from the start of the command it is behind to its end."""

    def __init__(
        self, route: Route, guardian: Guardian | None = None, on_said: Callable[[str], None] | None = None
    ) -> None:
        """`guardian` kills what the command has started beside the agent; `on_said` gets the command's own lines."""
        self.name = route.name
        self.hello: dict[str, Any] = {}
        self.is_lost = False
        self.code: int | None = None  # of the command, when it has ended by itself
        self._route = route
        self._guardian = guardian
        self._on_said = on_said
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, _Running] = {}
        self._written: dict[int, asyncio.Future[str]] = {}
        self._num_ids = 0
        self._unread = b""
        self._num_taken = 0  # bytes of what came that the agent was not told of
        self._out_of: tuple[int, int] | None = None  # whose output comes next, and how many bytes of it
        self._said = LineSplitter()
        self._last_said: list[str] = []  # by the command, not the agent
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._to_say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._popen: subprocess.Popen[bytes] | None = None
        self._heard = 0.0

    # ---- opening and closing

    def begin(self) -> None:
        """Start the command; from now on processes can be started. Raises Unreachable."""
        route = self._route
        try:
            self._popen = popen = subprocess.Popen(
                route.command,
                env=route.env,
                cwd=route.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is the launcher's
                preexec_fn=None if route.is_left_alone else agent.end_with(os.getpid()),
            )
        except OSError as error:
            self.is_lost = True
            raise Unreachable(127, [f"{error.filename}: {error.strerror}"]) from None
        if self._guardian is not None:
            self._guardian.watch(popen.pid)
        assert popen.stdout is not None and popen.stderr is not None
        for pipe, read in ((popen.stdout, self._read), (popen.stderr, self._read_said)):
            os.set_blocking(pipe.fileno(), False)
            self._loop.add_reader(pipe.fileno(), read)
        if route.sends_source:
            call = f"\nmain({route.lost_after_s!r}, {sorted(LAUNCHER_ENV_NAMES)!r})\n"
            source = Path(agent.__file__).read_bytes() + call.encode()
            self._to_say.put(b"%d\n%b" % (len(source), source))
        threading.Thread(target=self._talk, args=(popen,), daemon=True).start()

    async def open(self, sweep: dict[str, Any] | None = None) -> None:
        """Start the command, and wait for the agent. Raises Unreachable.

        `sweep`: the hello of a connection that was lost, whose agent is killed if it still lives.
        """
        self.begin()
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), self._route.connect_s)
        except TimeoutError:
            self._lose("did not answer in time")
        if self.is_lost:
            raise Unreachable(self.code, self._last_said)
        if sweep and sweep["since"]:
            self._say({"do": "sweep", "pid": sweep["pid"], "since": sweep["since"]})

    def begin_close(self) -> None:
        """Let the agent end everything, and itself."""
        if self._popen is not None and not self.is_lost:
            self._forget_pipes()
            self._to_say.put(None)

    def close(self, end: float | None = None) -> None:
        """Wait for that, until `end` (monotonic seconds). Nothing is reported any more."""
        popen, self._popen = self._popen, None
        if popen is None or self.is_lost:
            return
        assert popen.stdout is not None
        end = time.monotonic() + _CLOSE_S if end is None else end
        with suppress(OSError):
            while (left := end - time.monotonic()) > 0 and select.select([popen.stdout], [], [], left)[0]:
                if not os.read(popen.stdout.fileno(), _MAX_READ):
                    break
        self.code = self._reap(popen, max(0.1, end - time.monotonic()))

    def _forget_pipes(self) -> None:
        assert self._popen is not None
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                self._loop.remove_reader(pipe.fileno())

    # ---- processes and files

    def start(
        self, message: dict[str, Any], on_data: Callable[[bytes], None], on_exit: Callable[[int, str], None]
    ) -> int:
        """Start a process; its id. `on_exit` gets its code and, if it could not be started or was lost, why."""
        self._num_ids += 1
        if self.is_lost:
            self._loop.call_soon(on_exit, HOST_LOST, f"{self.name} was lost")
            return self._num_ids
        self._running[self._num_ids] = _Running(on_data, on_exit)
        self._say({"do": "start", "id": self._num_ids, **message})
        return self._num_ids

    def end(self, number: int) -> None:
        self._say({"do": "end", "id": number})

    def kill(self, number: int) -> None:
        self._say({"do": "kill", "id": number})

    async def run(self, argv: Sequence[str], env: dict[str, str]) -> str:
        """What a small program says, run with the host's interpreter from the home directory there."""
        done: asyncio.Future[None] = self._loop.create_future()
        output = bytearray()

        def on_exit(code: int, why: str) -> None:
            output.extend(why.encode())
            if not done.done():
                done.set_result(None)

        words = [self.hello["python"], *argv]
        self.start({"argv": words, "env": env, "folder": "~", "sharing": 0}, output.extend, on_exit)
        await done
        return output.decode("utf-8", "replace")

    async def write(self, path: str, folder: str, content: bytes) -> str:
        """Write a file there; empty, or what went wrong."""
        if self.is_lost:
            return f"{self.name} was lost"
        self._num_ids += 1
        done = self._written[self._num_ids] = self._loop.create_future()
        message = {"do": "write", "id": self._num_ids, "path": path, "folder": folder, "size": len(content)}
        self._to_say.put(json.dumps(message).encode() + b"\n" + content)
        return await done

    # ---- the conversation

    def _say(self, message: dict[str, Any]) -> None:
        self._to_say.put(json.dumps(message).encode() + b"\n")

    def _talk(self, popen: subprocess.Popen[bytes]) -> None:
        """The thread that writes. It touches nothing but the queue and the pipe."""
        assert popen.stdin is not None
        beat_s = None if self._route.lost_after_s is None else agent.BEAT_S
        with suppress(OSError, ValueError):
            while True:
                try:
                    data = self._to_say.get(timeout=beat_s)
                except queue.Empty:
                    # Nothing before the agent listens: what its source is read with would swallow it.
                    data = b'{"do": "beat"}\n' if self._ready.done() else b""
                if data is None:
                    break
                popen.stdin.write(data)
                popen.stdin.flush()
        with suppress(OSError):
            popen.stdin.close()

    def _read(self) -> None:
        assert self._popen is not None and self._popen.stdout is not None
        try:
            data = os.read(self._popen.stdout.fileno(), _MAX_READ)
        except BlockingIOError:
            return
        if not data:
            self._lose("the connection was closed", wait_s=1.0)
            return
        self._heard = self._loop.time()
        self._unread += data
        self._num_taken += len(data)
        while self._take():
            pass
        if self._num_taken >= _TOOK_BYTES and self._ready.done():
            self._say({"do": "took", "size": self._num_taken})
            self._num_taken = 0

    def _take(self) -> bool:
        """Take one line or one piece of output from what was read; False when none is complete."""
        if self._out_of is not None:
            number, size = self._out_of
            if len(self._unread) < size:
                return False
            data, self._unread = self._unread[:size], self._unread[size:]
            self._out_of = None
            if number in self._running:
                self._running[number].on_data(data)
            return True
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return False
        self._unread = rest
        if not self._ready.done():
            self._introduce(line)
        else:
            try:
                self._hear(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self._lose(f"something else than our agent said {line[:80]!r}")
                return False
        return True

    def _introduce(self, line: bytes) -> None:
        """The agent's first line; a shell's start-up files may have printed others before it."""
        try:
            hello = json.loads(line)
        except ValueError:
            return
        if isinstance(hello, dict) and hello.get("magic") == agent.MAGIC:
            self.hello = hello
            self._ready.set_result(None)
            if self._route.lost_after_s is not None:
                self._watch(self._loop.time(), self._route.lost_after_s)

    def _hear(self, message: dict[str, Any]) -> None:
        if "out" in message:
            self._out_of = (message["out"], message["size"])
        elif "exit" in message and message["exit"] in self._running:
            self._running.pop(message["exit"]).on_exit(message["code"], message["why"])
        elif "wrote" in message:
            self._written.pop(message["wrote"]).set_result(message["error"])

    def _read_said(self) -> None:
        assert self._popen is not None and self._popen.stderr is not None
        try:
            data = os.read(self._popen.stderr.fileno(), _MAX_READ)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._popen.stderr.fileno())
        self._note_said(self._said.feed(data))

    def _note_said(self, lines: list[str]) -> None:
        """Lines of the command itself: kept for a sentence on why there is no agent, or shown."""
        self._last_said = [*self._last_said, *(line.strip() for line in lines if line.strip())][-_NUM_LAST_LINES:]
        if self._on_said is not None:
            for line in lines:
                self._on_said(line)

    def _watch(self, due: float, lost_after_s: float) -> None:
        """Once a second: has the host been heard? Time in which this launcher stood still does not count."""
        if self.is_lost or self._popen is None:
            return
        now = self._loop.time()
        if now - due > 1.0:
            self._heard = now
        if now - self._heard > lost_after_s:
            self._lose(f"nothing was heard for {lost_after_s:g} s")
            return
        self._loop.call_later(1.0, self._watch, now + 1.0, lost_after_s)

    def _lose(self, why: str, *, wait_s: float = 0.0) -> None:
        """The connection is over: so is, there, everything that was started over it."""
        if self.is_lost or self._popen is None:
            return
        self.is_lost = True
        self._forget_pipes()
        self._to_say.put(None)
        self.code = self._reap(self._popen, wait_s)
        if not self._ready.done():
            self._ready.set_result(None)
        reason = f"{self.name} was lost: {why}" + (f" ({self._last_said[-1]})" if self._last_said else "")
        running, self._running = self._running, {}
        for process in running.values():
            process.on_exit(HOST_LOST, reason)
        for done in self._written.values():
            done.set_result(reason)
        self._written.clear()

    def _reap(self, popen: subprocess.Popen[bytes], wait_s: float) -> int | None:
        """End the client and keep its last words. Its exit code, None if it did not end by itself."""
        with suppress(subprocess.TimeoutExpired):
            popen.wait(wait_s)
        code = popen.poll()
        agent.kill_group(popen.pid)  # with a ProxyCommand it may have started
        popen.wait()
        if self._guardian is not None:
            self._guardian.forget(popen.pid)
        assert popen.stderr is not None
        with suppress(OSError):
            while data := os.read(popen.stderr.fileno(), _MAX_READ):
                self._note_said(self._said.feed(data))
        self._note_said(self._said.rest())
        for pipe in (popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()
        return code
