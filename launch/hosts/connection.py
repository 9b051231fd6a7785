"""The launcher's side of an agent (`agent.py`): the command that starts it, and the conversation with it.

A thread writes to the agent. It may block, and it sends `heartbeat` when there is nothing else to send, so that a
launcher whose terminal was stopped with Ctrl-S is still alive for the agent. The event loop reads the replies.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, NamedTuple, TypeVar

from ...common.config.sources import LAUNCHER_ENV_NAMES
from ...common.standstill import Standstill
from ...common.wire.json_text import read_json
from ..supervise.restarts import HOST_LOST
from ..view import LineSplitter, object_in
from . import agent

BOOTSTRAP = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
_CLOSE_S = 5.0
_LOOK_S = 1.0  # between two checks whether the host is silent
_LAST_WORDS_S = 1.0
_TOOK_BYTES = 1 << 15
MAX_LINE_BYTES = 1 << 24  # of a helper's line; asyncio's own 64 KiB are less than the addresses of a large cluster
T = TypeVar("T")
_CLOSED = "the connection was closed"


def agent_command(*drop: str, passes_on: bool = False) -> tuple[str, ...]:
    """Returns the command of an agent where this package is installed. For the arguments see `agent.main`."""
    options = {"limit_s": None, "drop": [*sorted(LAUNCHER_ENV_NAMES), *drop], "passes_on": passes_on}
    return (sys.executable, "-I", "-S", agent.__file__, json.dumps(options))


class Unreachable(Exception):
    """There is no agent. `code`: the command's exit code, None if it did not end by itself; `output`: its lines."""

    def __init__(self, code: int | None, output: Sequence[str]) -> None:
        super().__init__(output[-1] if output else f"exit code {code}")
        self.code, self.output = code, output


class _Watcher(NamedTuple):
    """The callbacks of a process, or of a file to write."""

    on_data: Callable[[bytes], object]
    on_exit: Callable[[int, str], None]
    on_results: Callable[[bytes], object]


@dataclass(kw_only=True, eq=False)
class Connection:
    """One agent, from the start of its command to its end."""

    name: str  # of its host, for sentences
    command: Sequence[str]
    env: Mapping[str, str] | None = None  # of the command; None: the launcher's
    folder: str | None = None
    sends_source: bool = False  # the command is an interpreter with BOOTSTRAP
    lost_after_s: float | None = None  # silence after which it is lost; None: the end of the pipe shows it
    connect_s: float | None = None  # limit for the agent's first message
    is_left_alone: bool = False  # it ends by itself after the launcher, without a signal
    guardian: agent.Guardian | None = None  # kills what the command has started beside the agent
    on_command_line: Callable[[str], None] = lambda line: None  # gets the command's lines, which are not the agent's

    def __post_init__(self) -> None:
        self.hello: dict[str, Any] = {}
        self.code: int | None = None  # of the command, when it has ended by itself
        self._loop = asyncio.get_running_loop()
        self._watchers: dict[int, _Watcher] = {}
        self._ids = itertools.count(1)
        self._last_lines: deque[str] = deque(maxlen=20)  # of the command, not the agent
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[str] = self._loop.create_future()  # the reason
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._life: asyncio.Task[None] | None = None
        self._heard_at = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the connection is over, and with it everything that it has started."""
        return self._over.done()

    # ---- opening and closing

    def begin(self) -> None:
        """Start the command; then processes can be started. Raises Unreachable."""
        try:
            popen = subprocess.Popen(
                self.command, env=self.env, cwd=self.folder, stdin=PIPE, stdout=PIPE, stderr=PIPE, bufsize=0,
                start_new_session=True,  # a terminal's Ctrl-C is for the launcher
                preexec_fn=None if self.is_left_alone else agent.end_with(os.getpid()),
            )  # fmt: skip
        except OSError as error:
            self._lose("there is no such command")
            raise Unreachable(127, [f"{error.filename}: {error.strerror}"]) from None
        if self.guardian is not None:
            self.guardian.watch(popen.pid)
        if self.sends_source:
            call = f"\nmain({self.lost_after_s!r}, {sorted(LAUNCHER_ENV_NAMES)!r})\n"
            source = Path(agent.__file__).read_bytes() + call.encode()
            self._outbox.put(b"%d\n%b" % (len(source), source))
        assert popen.stdin is not None
        heartbeat_s = None if self.lost_after_s is None else agent.HEARTBEAT_S
        agent.in_thread(agent.talk, self._outbox, os.dup(popen.stdin.fileno()), heartbeat_s)
        popen.stdin.close()
        self._life = watched(self._live(popen))

    async def open(self, sweep: dict[str, Any] | None = None) -> None:
        """Start the command, and wait for the agent. Raises Unreachable.

        `sweep`: the hello of a lost connection, whose agent is killed if it is still alive.
        """
        self.begin()
        assert self._life is not None
        await asyncio.wait([self._ready, self._life], timeout=self.connect_s, return_when="FIRST_COMPLETED")
        if not self._ready.done():
            self._lose("did not answer in time")
            await self._life
            raise Unreachable(self.code, self._last_lines)
        if sweep and sweep["since"]:
            self._send({"do": "sweep", "pid": sweep["pid"], "since": sweep["since"]})

    async def close(self) -> None:
        """Let the agent end everything, and itself. Nothing is reported after this."""
        self._watchers.clear()
        self._outbox.put(None)
        if self._life is not None:
            await asyncio.wait([self._life], timeout=_CLOSE_S)
            self._lose("it did not end in time")
            await self._life

    # ---- processes and files

    def start(
        self, message: dict[str, Any], on_data: Callable[[bytes], object], on_exit: Callable[[int, str], None],
        content: bytes = b"", on_results: Callable[[bytes], object] = lambda data: None,
    ) -> int:  # fmt: skip
        """Start a process, and return its id. `on_exit` gets its code, and why it did not start or was lost."""
        number = next(self._ids)
        if self.is_lost:
            self._loop.call_soon(on_exit, HOST_LOST, f"{self.name} was lost")
        else:
            self._watchers[number] = _Watcher(on_data, on_exit, on_results)
            self._send({"do": "start", "id": number, **message}, content)
        return number

    def end(self, number: int, action: str) -> None:
        """Ask a process to end (`end`), or kill it and everything that it has started (`kill`)."""
        self._send({"do": action, "id": number})

    async def run(self, argv: Sequence[str], env: dict[str, str]) -> str:
        """Run a small program with the host's interpreter in the home directory there, and return its output."""
        words = [self.hello["python"], *argv]
        return "".join(await self._done({"argv": words, "env": env, "folder": "~", "sharing": 0}))

    async def write(self, path: str, folder: str, content: bytes) -> str:
        """Write a file there, and return the problem, if any."""
        message = {"do": "write", "path": path, "folder": folder, "size": len(content)}
        return (await self._done(message, content))[1]

    async def measure(self, action: str, **how: Any) -> Any:
        """Measure round trips by "listen" or "ping", functions of the agent, and return their result.

        Raises Unreachable where the host is lost.
        """
        output, why = await self._done({"do": action, **how})
        if why:
            raise Unreachable(None, [why])
        return read_json(output)

    async def _done(self, message: dict[str, Any], content: bytes = b"") -> tuple[str, str]:
        """Returns the output of a process, and the reason if it did not start."""
        done: asyncio.Future[str] = self._loop.create_future()
        output = bytearray()

        def on_exit(code: int, why: str) -> None:
            if not done.cancelled():
                done.set_result(why)

        self.start(message, output.extend, on_exit, content)
        why = await done
        return output.decode("utf-8", "replace"), why

    # ---- the conversation

    def _send(self, message: dict[str, Any], content: bytes = b"") -> None:
        self._outbox.put(json.dumps(message).encode() + b"\n" + content)

    def _lose(self, why: str) -> None:
        if not self._over.done():
            self._over.set_result(why)

    async def _live(self, popen: subprocess.Popen[bytes]) -> None:
        """Read until the connection is over, end what is left of the command, and report the loss."""
        assert popen.stdout is not None and popen.stderr is not None
        listening = watched(self._listen(popen.stdout))
        overhearing = watched(self._overhear(popen.stderr))
        why = await self._over
        self._outbox.put(None)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(popen.wait, _LAST_WORDS_S if why == _CLOSED else 0)
        self.code = popen.poll()
        agent.kill_group(popen.pid)  # with a ProxyCommand it may have started
        popen.wait()
        if self.guardian is not None:
            self.guardian.forget(popen.pid)
        await asyncio.wait([overhearing], timeout=_LAST_WORDS_S)
        for task in (listening, overhearing):
            task.cancel()
        reason = f"{self.name} was lost: {why}" + (f" ({self._last_lines[-1]})" if self._last_lines else "")
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers.values():
            watcher.on_exit(HOST_LOST, reason)

    async def _listen(self, pipe: IO[bytes]) -> None:
        """Handle the agent's messages."""
        num_taken = 0
        async with _reading(pipe) as reader:
            with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # its end, or what is no message
                while line := await reader.readuntil():
                    self._heard_at = self._loop.time()
                    message = object_in(line)
                    if not self._ready.done():
                        # A shell's start-up files may have printed other lines before the agent's first.
                        if message.get("magic") == agent.MAGIC:
                            self.hello = message
                            self._ready.set_result(None)
                            if self.lost_after_s is not None:
                                watched(self._watch(self.lost_after_s))
                    elif not message:
                        self._lose(f"the agent sent no message but {line[:80]!r}")
                    elif "out" in message:
                        data = await reader.readexactly(message["size"])
                        num_taken += len(data)
                        if message["out"] in self._watchers:
                            self._watchers[message["out"]].on_data(data)
                    elif "results" in message:
                        data = await reader.readexactly(message["size"])
                        if message["results"] in self._watchers:
                            self._watchers[message["results"]].on_results(data)
                    elif message.get("exit") in self._watchers:
                        self._watchers.pop(message["exit"]).on_exit(message["code"], message["why"])
                    if num_taken >= _TOOK_BYTES:
                        self._send({"do": "took", "size": num_taken})
                        num_taken = 0
                    await asyncio.sleep(0)  # so that signals do not wait for the lines of a chatty child
        self._lose(_CLOSED)

    async def _overhear(self, pipe: IO[bytes]) -> None:
        """Read the lines of the command itself, which explain why there is no agent."""
        splitter = LineSplitter()
        async with _reading(pipe) as reader:
            while True:
                data = await reader.read(1 << 14)
                for line in splitter.feed(data):
                    if line.strip():
                        self._last_lines.append(line.strip())
                    self.on_command_line(line)
                if not data:
                    break

    async def _watch(self, lost_after_s: float) -> None:
        """End the connection when the host is silent. Time in which this launcher stood still does not count."""
        standstill = Standstill(_LOOK_S)
        while not self.is_lost:
            now = self._loop.time()
            self._heard_at = min(now, self._heard_at + standstill.look(now))
            if now - self._heard_at > lost_after_s:
                break
            await asyncio.sleep(_LOOK_S)
        self._lose(f"nothing was heard for {lost_after_s:g} s")


@asynccontextmanager
async def _reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield reader
    finally:
        transport.close()


def watched(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Returns a task whose exception the loop reports, because nobody awaits it."""

    def report(task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.result()

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(report)
    return task
