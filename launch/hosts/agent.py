"""The launcher's hand where processes run: starts them, passes on what they say, ends them all with itself.

Every backend has one: a child of the launcher (local), at the end of a connection (ssh), a step of a job (slurm).
Over ssh its source is sent ahead and run by the host's interpreter, so it imports nothing of ours and nothing
that is not in the standard library, and runs on Python 3.8. (What version of paramserver the host has is looked
up through it: it could not be part of that.) Elsewhere it is started as a file, without the package:

    python -I -S agent.py OPTIONS      the options of `main`, in JSON
    python -I -S agent.py guard        only the guardian, of groups named on standard input

Standard input and output are one conversation in JSON lines. The launcher says

    {"do": "start", "id": 1, "argv": [...], "env": {...}, "folder": "~/x", "sharing": 2}
    {"do": "end" | "kill", "id": 1}
    {"do": "write", "id": 2, "path": "task.py", "folder": "~/x", "size": 100}, then 100 bytes
    {"do": "sweep", "pid": 4711, "since": "..."}          an agent of an earlier connection
    {"do": "took", "size": 65536}                         so much of what the agent said has been dealt with
    {"do": "beat"}

and the agent, after a first line with MAGIC,

    {"out": 1, "size": 20}, then 20 bytes        as they were written
    {"exit": 1, "code": -9, "why": ""}
    {"wrote": 2, "error": ""}
    {"beat": 1}

Each process leads a session and a process group of its own: a terminal's Ctrl-C does not reach it, and it can be
killed with all it has started. Nothing outlives the conversation. At the end of standard input, or when the
launcher has not been heard for `limit_s` (a connection that broke down without a word), every group is killed.
Should someone kill the agent itself, its children go with it (PR_SET_PDEATHSIG, on Linux; it is not inherited,
so what those have started, as a DataLoader does, stays), and a forked guardian kills the groups.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAGIC = "paramserver-agent-1"
BEAT_S = 2.0
CANNOT_START = 126
_MAX_READ = 1 << 14
_MAX_AHEAD = 1 << 18  # said, and not yet taken by the launcher; then children wait in their own pipes


class Agent:
    """One connection, and the processes that live as long as it does. For the arguments see `main`."""

    def __init__(self, limit_s: float | None, drop: frozenset[str], passes_on: bool) -> None:
        self._guardian_pid, self._guardian = fork_guardian()
        self._limit_s = limit_s
        self._drop = drop
        self._passes_on = passes_on
        self._selector = selectors.DefaultSelector()
        self._popens: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[int, IO[bytes]] = {}  # their outputs
        self._unread = b""  # what the launcher said and is not complete
        self._writing: dict[str, Any] | None = None  # the file whose bytes come next
        self._unsent = bytearray()
        self._ahead = 0  # bytes said that the launcher has not taken, those unsent among them
        self._heard = self._beaten = time.monotonic()
        self._is_over = False

    def run(self) -> None:
        self._selector.register(0, selectors.EVENT_READ, "launcher")
        wake_read, wake_write = os.pipe()
        for end in (0, 1, wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: children are to ignore it too
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self._selector.register(wake_read, selectors.EVENT_READ, "signal")
        try:
            while not self._is_over:
                self._turn(wake_read)
        finally:
            self._end_all()

    def _on_signal(self, *_: object) -> None:
        if not self._passes_on:
            self._is_over = True
            return
        for popen in self._popens.values():
            popen.terminate()

    def _turn(self, wake_read: int) -> None:
        for key, _ in self._selector.select(0.5):
            if key.data == "launcher":
                self._listen()
            elif key.data == "signal":
                os.read(wake_read, 4096)
            elif key.data != "out" and self._ahead < _MAX_AHEAD:
                self._read(key.data)
        for number, popen in list(self._popens.items()):
            if popen.poll() is not None:
                self._report_end(number, popen)
        now = time.monotonic()
        if self._limit_s is not None:
            self._is_over = self._is_over or now - self._heard > self._limit_s
            if now - self._beaten >= BEAT_S and not self._unsent:
                self._beaten = now
                self._say({"beat": 1})
        self._flush()
        # Far ahead, nothing more is read: a chatty child waits, and what matters is not behind megabytes of lines.
        wanted = self._ahead < _MAX_AHEAD
        for number, pipe in self._pipes.items():
            if wanted != (pipe in self._selector.get_map()):
                if wanted:
                    self._selector.register(pipe, selectors.EVENT_READ, number)
                else:
                    self._selector.unregister(pipe)

    # ---- the conversation

    def _listen(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_over = True
            return
        self._heard = time.monotonic()
        self._unread += data
        while True:
            if self._writing is not None:
                message, size = self._writing, self._writing["size"]
                if len(self._unread) < size:
                    return
                content, self._unread = self._unread[:size], self._unread[size:]
                self._writing = None
                self._write(message, content)
            line, newline, rest = self._unread.partition(b"\n")
            if not newline:
                return
            self._unread = rest
            self._do(json.loads(line.decode()))

    def _do(self, message: dict[str, Any]) -> None:
        what, number = message["do"], message.get("id")
        if what == "start":
            self._start(message)
        elif what == "write":
            self._writing = message
        elif what == "took":
            self._ahead -= message["size"]
        elif what == "sweep":
            sweep(message["pid"], message["since"])
        elif number in self._popens:
            if what == "end":
                self._popens[number].terminate()
            elif what == "kill":
                kill_group(self._popens[number].pid)

    def _say(self, message: dict[str, Any], data: bytes = b"") -> None:
        frame = json.dumps(message).encode() + b"\n" + data
        self._unsent += frame
        self._ahead += len(frame)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(1, self._unsent[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:  # the connection is gone
            self._is_over = True
        watched = 1 in self._selector.get_map()
        if self._unsent and not watched:
            self._selector.register(1, selectors.EVENT_WRITE, "out")
        elif watched and not self._unsent:
            self._selector.unregister(1)

    # ---- processes

    def _start(self, message: dict[str, Any]) -> None:
        number = message["id"]
        env = {name: value for name, value in os.environ.items() if name not in self._drop}
        if message["sharing"] and "OMP_NUM_THREADS" not in env:
            env["OMP_NUM_THREADS"] = str(max(1, num_cores() // message["sharing"]))
        env.update(message["env"])
        argv = [os.path.expanduser(message["argv"][0]), *message["argv"][1:]]
        try:
            popen = subprocess.Popen(
                argv,
                env=env,
                cwd=os.path.expanduser(message["folder"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with(os.getpid()),
            )
        except OSError as error:
            self._say({"exit": number, "code": CANNOT_START, "why": f"{error.filename}: {error.strerror}"})
            return
        assert popen.stdout is not None
        self._tell_guardian(b"+%d\n" % popen.pid)
        os.set_blocking(popen.stdout.fileno(), False)
        self._popens[number] = popen
        self._pipes[number] = popen.stdout
        self._selector.register(popen.stdout, selectors.EVENT_READ, number)

    def _read(self, number: int) -> bool:
        """Pass on what is in the pipe; False when there is nothing more."""
        pipe = self._pipes.get(number)
        if pipe is None:
            return False
        try:
            data = os.read(pipe.fileno(), _MAX_READ)
        except BlockingIOError:
            return False
        if data:
            self._say({"out": number, "size": len(data)}, data)
        else:  # closed its output, and may go on without
            self._forget_pipe(number)
        return bool(data)

    def _forget_pipe(self, number: int) -> None:
        pipe = self._pipes.pop(number, None)
        if pipe is not None:
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.close()

    def _report_end(self, number: int, popen: subprocess.Popen[bytes]) -> None:
        del self._popens[number]
        kill_group(popen.pid)  # its number stays the group's as long as anything it started is alive
        for _ in range(256):  # more than a pipe holds; a daemon it left may write for ever
            if not self._read(number):
                break
        self._forget_pipe(number)
        self._tell_guardian(b"-%d\n" % popen.pid)
        self._say({"exit": number, "code": popen.returncode, "why": ""})

    def _end_all(self) -> None:
        for popen in self._popens.values():
            kill_group(popen.pid)
        for popen in self._popens.values():
            popen.wait()
        os.close(self._guardian)
        with suppress(OSError):
            os.waitpid(self._guardian_pid, 0)

    def _tell_guardian(self, line: bytes) -> None:
        with suppress(OSError):  # someone may have killed it; what runs does not depend on it
            os.write(self._guardian, line)

    def _write(self, message: dict[str, Any], content: bytes) -> None:
        """A file as a whole or not at all."""
        path = os.path.join(os.path.expanduser(message["folder"]), message["path"])
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    if file.read() == content:
                        self._say({"wrote": message["id"], "error": ""})
                        return
            descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".paramserver-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                os.chmod(temporary, 0o644)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            self._say({"wrote": message["id"], "error": f"{path}: {error.strerror}"})
        else:
            self._say({"wrote": message["id"], "error": ""})


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started_at(pid: int) -> str:
    """What tells a process from a later one of the same number; "" where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def sweep(pid: int, since: str) -> None:
    """Kill the agent of an earlier connection; its guardian kills what it had started."""
    if since and started_at(pid) == since:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    with suppress(OSError):  # nobody left; macOS: EPERM for a group of zombies
        os.killpg(group, signal.SIGKILL)


def end_with(parent: int) -> Callable[[], None] | None:
    """What a new process does before exec: ask the kernel to be killed when its parent ends."""
    if sys.platform != "linux":
        return None
    import ctypes  # before the fork: between fork and exec nothing may be loaded

    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def fork_guardian() -> tuple[int, int]:
    """A child that kills the groups it was told of once this process is gone: its pid, and the pipe to tell it by."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return pid, write
    os.setsid()
    os.close(write)
    null = os.open(os.devnull, os.O_RDWR)
    for end in (0, 1, 2):  # sshd waits until nobody holds the connection
        os.dup2(null, end)
    with os.fdopen(read, "r") as lines:
        guard(lines)
    os._exit(0)


def guard(lines: Iterable[str]) -> None:
    """Keep the set of groups (`+GROUP`, `-GROUP`) until the lines end, then kill what is in it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)


def main(limit_s: float | None, drop: list[str], passes_on: bool = False) -> None:
    """Introduce oneself and serve until the connection ends.

    `limit_s`: how long the launcher may be silent, None for ever (then nobody needs to say that he lives).
    `drop`: the variables of the agent's own environment that no child gets. `passes_on`: a signal to the agent is
    for its processes (Slurm cancels a job or its time is over: they end in good order), not the end of all.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored one, inherited, would reap children behind our back
    agent = Agent(limit_s, frozenset(drop), passes_on)
    step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
    hello = {"magic": MAGIC, "pid": os.getpid(), "since": started_at(os.getpid()), "python": sys.executable}
    os.write(1, b"\n" + json.dumps({**hello, "step": step}).encode() + b"\n")
    agent.run()


if __name__ == "__main__" and "__file__" in globals():  # not where its source was sent ahead
    if sys.argv[1] == "guard":
        guard(sys.stdin)
    else:
        main(**json.loads(sys.argv[1]))
