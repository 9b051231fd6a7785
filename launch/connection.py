"""The launcher's side of one host: the ssh client, and the conversation with the agent behind it.

What is said to the host goes through a thread that may wait, and that says `beat` when there is nothing else:
a launcher whose terminal was stopped with Ctrl-S still lives. What comes back is read on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.config.schema import LaunchConfig
from ..common.config.sources import LAUNCHER_ENV_NAMES
from . import agent
from .events import LineSplitter
from .exits import HOST_LOST
from .guardian import Guardian
from .host_check import ssh_problem
from .hosts import THIS_MACHINE, Host
from .lifelines import end_with, kill_group

_BOOTSTRAP = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
_CLOSE_S = 5.0
_MAX_READ = 1 << 14  # more would keep a signal waiting while a chatty child's lines are shown
_TOOK_BYTES = 1 << 15
_NUM_LAST_LINES = 20


def ssh_command(host: Host, launch: LaunchConfig, python: str) -> list[str]:
    """The command that starts the agent on a host. It holds nothing secret: all else is said over the connection."""
    if host.host == THIS_MACHINE:
        return [os.path.expanduser(python), "-I", "-u", "-c", _BOOTSTRAP]
    options = {
        "BatchMode": "yes",  # there is nobody to type a password
        "ConnectTimeout": f"{max(1, round(launch.connect_s))}",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",  # an existing one is used, but this one is not to become others' master
    }
    words = [*shlex.split(launch.ssh), "-T", "-x", *(f"-o{name}={value}" for name, value in options.items())]
    words += ["-l", host.user] if host.user else []
    words += ["-p", str(host.port)] if host.port else []
    return [*words, "--", host.host, f"exec {_shell_path(python)} -I -u -c {shlex.quote(_BOOTSTRAP)}"]


def _shell_path(path: str) -> str:
    """Quoted for a shell, but for the ~ of a home."""
    if not path.startswith("~"):
        return shlex.quote(path)
    home, slash, rest = path.partition("/")
    return home + slash + (shlex.quote(rest) if rest else "")


@dataclass
class _Running:
    on_data: Callable[[bytes], None]
    on_exit: Callable[[int, str], None]


class Connection:
    """One host, from the start of ssh to the end of the agent."""

    def __init__(self, host: Host, launch: LaunchConfig, python: str, guardian: Guardian) -> None:
        self.host = host
        self.hello: dict[str, Any] = {}
        self._launch = launch
        self._python = python
        self._guardian = guardian
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, _Running] = {}
        self._written: dict[int, asyncio.Future[str]] = {}
        self._num_ids = 0
        self._unread = b""
        self._num_taken = 0  # bytes of what came that the agent was not told of
        self._out_of: tuple[int, int] | None = None  # whose output comes next, and how many bytes of it
        self._said = LineSplitter()
        self._last_said: list[str] = []  # of ssh itself
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._to_say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._popen: subprocess.Popen[bytes] | None = None
        self._code: int | None = None  # of ssh, when it has ended by itself
        self._heard = 0.0
        self.is_lost = False

    # ---- opening and closing

    async def open(self, sweep: dict[str, Any] | None = None) -> None:
        """Start ssh and the agent. Raises ParamServerError. `sweep`: the hello of a connection that was lost."""
        try:
            self._popen = popen = subprocess.Popen(
                ssh_command(self.host, self._launch, self._python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is the launcher's
                preexec_fn=end_with(os.getpid()),
            )
        except OSError as error:
            self.is_lost = True
            raise ssh_problem(self.host, 127, [f"{error.filename}: {error.strerror}"], self._python) from None
        self._guardian.watch(popen.pid)
        assert popen.stdout is not None and popen.stderr is not None
        for pipe, read in ((popen.stdout, self._read), (popen.stderr, self._read_said)):
            os.set_blocking(pipe.fileno(), False)
            self._loop.add_reader(pipe.fileno(), read)
        drop = sorted(LAUNCHER_ENV_NAMES)
        source = Path(agent.__file__).read_bytes() + f"\nmain({self._launch.lost_after_s!r}, {drop!r})\n".encode()
        threading.Thread(target=self._talk, args=(popen,), daemon=True).start()
        self._to_say.put(b"%d\n%b" % (len(source), source))
        try:
            # ssh has a limit of its own for the connection; the interpreter there needs a moment too.
            await asyncio.wait_for(asyncio.shield(self._ready), 2 * self._launch.connect_s + 5)
        except TimeoutError:
            self._lose("did not answer in time")
        if self.is_lost:
            raise ssh_problem(self.host, self._code, self._last_said, self._python)
        if sweep and sweep["since"]:
            self._say({"do": "sweep", "pid": sweep["pid"], "since": sweep["since"]})

    def begin_close(self) -> None:
        """Let the agent end everything, and itself."""
        if self._popen is not None and not self.is_lost:
            self._forget_pipes()
            self._to_say.put(None)

    def close(self) -> None:
        """Wait for that. Nothing is reported any more."""
        popen, self._popen = self._popen, None
        if popen is None or self.is_lost:
            return
        assert popen.stdout is not None
        end = time.monotonic() + _CLOSE_S
        with suppress(OSError):
            while (left := end - time.monotonic()) > 0 and select.select([popen.stdout], [], [], left)[0]:
                if not os.read(popen.stdout.fileno(), _MAX_READ):
                    break
        self._reap(popen, max(0.1, end - time.monotonic()))

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
            self._loop.call_soon(on_exit, HOST_LOST, f"{self.host.host} was lost")
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
            return f"{self.host.host} was lost"
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
        is_first = True
        with suppress(OSError, ValueError):
            while True:
                try:
                    data = self._to_say.get(timeout=None if is_first else agent.BEAT_S)
                except queue.Empty:
                    # Nothing before the agent listens: what its source is read with would swallow it.
                    data = b'{"do": "beat"}\n' if self._ready.done() else b""
                if data is None:
                    break
                is_first = False
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
            self._watch(self._loop.time())

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
        self._last_said = [*self._last_said, *self._said.feed(data)][-_NUM_LAST_LINES:]

    def _watch(self, due: float) -> None:
        """Once a second: has the host been heard? Time in which this launcher stood still does not count."""
        if self.is_lost or self._popen is None:
            return
        now = self._loop.time()
        if now - due > 1.0:
            self._heard = now
        if now - self._heard > self._launch.lost_after_s:
            self._lose(f"nothing was heard for {self._launch.lost_after_s:g} s")
            return
        self._loop.call_later(1.0, self._watch, now + 1.0)

    def _lose(self, why: str, *, wait_s: float = 0.0) -> None:
        """The connection is over: so is, there, everything that was started over it."""
        if self.is_lost or self._popen is None:
            return
        self.is_lost = True
        self._forget_pipes()
        self._to_say.put(None)
        self._code = self._reap(self._popen, wait_s)
        if not self._ready.done():
            self._ready.set_result(None)
        reason = f"{self.host.host} was lost: {why}" + (f" ({self._last_said[-1]})" if self._last_said else "")
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
        kill_group(popen.pid)  # with a ProxyCommand it may have started
        popen.wait()
        self._guardian.forget(popen.pid)
        assert popen.stderr is not None
        with suppress(OSError):
            while data := os.read(popen.stderr.fileno(), _MAX_READ):
                self._last_said += self._said.feed(data)
        self._last_said = [line.strip() for line in [*self._last_said, *self._said.rest()] if line.strip()]
        for pipe in (popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()
        return code
