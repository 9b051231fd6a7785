"""The launcher's hand where processes run: starts them, passes on what they say, ends them all with itself.

Every backend has one: a child of the launcher (local), at the end of a connection (ssh), a step of a job (slurm).
Over ssh its source is sent ahead and run by the host's interpreter, so it imports nothing of ours and nothing
that is not in the standard library, and runs on Python 3.8. (What version of paramserver the host has is looked
up through it: it could not be part of that.) Elsewhere it is started as a file, without the package:

    python -I -S agent.py OPTIONS      the options of `main`, in JSON

Standard input and output are one conversation in JSON lines. The launcher says

    {"do": "start", "id": 1, "argv": [...], "env": {...}, "folder": "~/x", "sharing": 2}
    {"do": "end" | "kill", "id": 1}
    {"do": "write", "id": 2, "path": "task.py", "folder": "~/x", "size": 100}, then 100 bytes
    {"do": "sweep", "pid": 4711, "since": "..."}          an agent of an earlier connection
    {"do": "took", "size": 65536}                         so many bytes of output have been dealt with
    {"heartbeat": 1}

and the agent, after a first line with MAGIC,

    {"out": 1, "size": 20}, then 20 bytes        as they were written
    {"exit": 1, "code": -9, "why": ""}           of a process, or of a write
    {"heartbeat": 1}

Each process leads a session and a process group of its own: a terminal's Ctrl-C does not reach it, and it can be
killed with all it has started. Nothing outlives the conversation. At the end of standard input, or when the
launcher has not been heard for `limit_s` (a connection that broke down without a word), every group is killed.
Should someone kill the agent itself, its children go with it (PR_SET_PDEATHSIG, on Linux; it is not inherited,
so what those have started, as a DataLoader does, stays), and a forked guardian kills the groups.

The main thread listens and starts processes (a child dies with the *thread* that started it); one thread talks, and
each process has one that reads its output and one that waits for its end.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MAGIC = "paramserver-agent-1"
HEARTBEAT_S = 2.0
CANNOT_START = 126
_MAX_READ = 1 << 14
_MAX_AHEAD = 1 << 18  # output the launcher has not taken; then children wait in their own pipes
_NUM_LAST_READS = 256  # after a process's end: more than a pipe holds; a daemon it left may write for ever,
_LAST_READS_S = 1.0  # or be silent
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """One connection, and the processes that live as long as it does. For the arguments see `main`."""

    def __init__(self, limit_s: float | None, drop: frozenset[str], passes_on: bool) -> None:
        self._guardian = Guardian()
        self._limit_s = limit_s
        self._drop = drop
        self._passes_on = passes_on
        self._popens: dict[int, subprocess.Popen[bytes]] = {}
        self._to_say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._taking = threading.Condition()
        self._num_ahead = 0  # bytes of output that the launcher has not taken

    def run(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: children are to ignore it too
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, end_of_input)
        in_thread(talk, self._to_say, 1, HEARTBEAT_S if self._limit_s is not None else None)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s or 0)
        while (line := sys.stdin.buffer.readline()).endswith(b"\n"):  # the reader that has read our source
            signal.setitimer(signal.ITIMER_REAL, self._limit_s or 0)
            self._do(json.loads(line))
        self._end_all()

    def _on_signal(self, *_: object) -> None:
        if not self._passes_on:
            end_of_input()
            return
        for popen in list(self._popens.values()):
            popen.terminate()

    def _do(self, message: dict[str, Any]) -> None:
        what, number = message.get("do"), message.get("id", 0)
        if what == "start":
            self._start(message)
        elif what == "write":
            problem = write_file(message["folder"], message["path"], sys.stdin.buffer.read(message["size"]))
            self._say({"exit": number, "code": 0, "why": problem})
        elif what == "took":
            with self._taking:
                self._num_ahead -= message["size"]
                self._taking.notify_all()
        elif what == "sweep":
            sweep(message["pid"], message["since"])
        elif (popen := self._popens.get(number)) is not None:  # another thread takes it out when it has ended
            if what == "end":
                popen.terminate()
            elif what == "kill":
                kill_group(popen.pid)

    def _say(self, message: dict[str, Any], data: bytes = b"") -> None:
        self._to_say.put(json.dumps(message).encode() + b"\n" + data)

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
        self._guardian.watch(popen.pid)
        self._popens[number] = popen
        in_thread(self._await_end, number, popen, in_thread(self._pass_on, number, popen))

    def _pass_on(self, number: int, popen: subprocess.Popen[bytes]) -> None:
        """What a process writes, as fast as the launcher takes it: no chatty child is to be megabytes ahead of news."""
        assert popen.stdout is not None
        num_last = 0
        with popen.stdout as pipe:
            while num_last < _NUM_LAST_READS and (data := os.read(pipe.fileno(), _MAX_READ)):
                self._say({"out": number, "size": len(data)}, data)
                with self._taking:
                    self._num_ahead += len(data)
                    self._taking.wait_for(lambda: self._num_ahead < _MAX_AHEAD or popen.returncode is not None)
                num_last += popen.returncode is not None

    def _await_end(self, number: int, popen: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        popen.wait()
        kill_group(popen.pid)  # its number stays the group's as long as anything it started is alive
        with self._taking:
            self._taking.notify_all()
        reader.join(_LAST_READS_S)
        self._guardian.forget(popen.pid)
        del self._popens[number]
        self._say({"exit": number, "code": popen.returncode, "why": ""})

    def _end_all(self) -> None:
        popens = list(self._popens.values())
        for popen in popens:
            kill_group(popen.pid)
        for popen in popens:
            popen.wait()
        self._guardian.close()


class Guardian:
    """A forked child that kills the process groups it was told of once this process is gone."""

    def __init__(self) -> None:
        read, self._tell = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(read)
            return
        os.setsid()
        os.close(self._tell)
        null = os.open(os.devnull, os.O_RDWR)
        for end in (0, 1, 2):  # sshd waits until nobody holds the connection
            os.dup2(null, end)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        groups: set[int] = set()
        with os.fdopen(read, "r") as lines:
            for line in lines:
                (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
        for group in groups:
            kill_group(group)
        os._exit(0)

    def watch(self, group: int) -> None:
        self._say(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        self._say(b"-%d\n" % group)

    def close(self) -> None:
        """End it, and the groups that were not forgotten."""
        os.close(self._tell)
        with suppress(OSError):
            os.waitpid(self._pid, 0)

    def _say(self, line: bytes) -> None:
        with suppress(OSError):  # someone may have killed it; what runs does not depend on it
            os.write(self._tell, line)


def talk(to_say: queue.SimpleQueue[bytes | None], descriptor: int, heartbeat_s: float | None) -> None:
    """Say what is in the queue, up to a None, and that one lives when there is nothing to say for `heartbeat_s`."""
    with suppress(OSError):  # whoever reads knows that the connection is gone
        while True:
            try:
                data = to_say.get(timeout=heartbeat_s)
            except queue.Empty:
                data = b'{"heartbeat": 1}\n'
            if data is None:
                break
            while data:
                data = data[os.write(descriptor, data) :]
    with suppress(OSError):
        os.close(descriptor)


def in_thread(work: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def end_of_input(*_: object) -> None:
    """Let who reads standard input find its end, also one that waits there: a signal wakes it."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def write_file(folder: str, name: str, content: bytes) -> str:
    """A file as a whole or not at all; what went wrong, if anything did."""
    path = os.path.join(os.path.expanduser(folder), name)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                if file.read() == content:
                    return ""
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
        return f"{path}: {error.strerror}"
    return ""


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
    main(**json.loads(sys.argv[1]))
