"""The agent: starts processes for the launcher, passes on their output, and ends them all with itself.

Every backend has one: a child of the launcher (local), at the end of a connection (ssh), a step of a job (slurm).
Over ssh its source is sent ahead and run by the host's interpreter, so it imports only the standard library, and runs
on Python 3.8. (It is also used to look up the host's version of paramserver, so it cannot be part of that.) Elsewhere
it is started as a file, without the package:

    python -I -S agent.py OPTIONS      the options of `main`, in JSON

Standard input and output are one conversation in JSON lines. The launcher sends

    {"do": "start", "id": 1, "argv": [...], "env": {...}, "folder": "~/x", "sharing": 2, "results": "VARIABLE"}
    {"do": "end" | "kill", "id": 1}
    {"do": "write", "id": 2, "path": "task.py", "folder": "~/x", "size": 100}, then 100 bytes
    {"do": "listen", "id": 3, "port": 0}                  a socket to measure by; the output is its port
    {"do": "ping", "id": 4, "address": "10.0.0.1:4711", "num": 7, "limit_s": 2.5}    the output: seconds, or a reason
    {"do": "sweep", "pid": 4711, "since": "..."}          the agent of an earlier connection
    {"do": "took", "size": 65536}                         output that the launcher has handled, in bytes
    {"heartbeat": 1}

and the agent, after a first line with MAGIC,

    {"out": 1, "size": 20}, then 20 bytes        output, as it was written
    {"results": 1, "size": 20}, then 20 bytes    a piece of what the process left in the file of its results
    {"exit": 1, "code": -9, "why": ""}           of a process, a write, a listen or a ping
    {"heartbeat": 1}

The results of a process have any length, and no line does. So a process with `results` inherits an open file, whose
descriptor is in that variable, and what it wrote there follows its output.

Each process leads a session and a process group of its own: a terminal's Ctrl-C does not reach it, and killing the
group kills everything it has started. Nothing outlives the conversation. At the end of standard input, or when the
launcher has been silent for `limit_s` (a connection that broke unnoticed), the agent kills every group. If the agent
itself is killed, the kernel kills its children (PR_SET_PDEATHSIG, on Linux; grandchildren such as a DataLoader's do
not inherit it), and a forked guardian kills the groups.

The main thread reads and starts processes, because a child dies with the *thread* that started it. One thread writes.
Each process has a thread that reads its output and one that waits for its end.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MAGIC = "paramserver-agent-1"
HEARTBEAT_S = 2.0
CANNOT_START = 126
_MAX_READ = 1 << 14
_RESULTS_PIECE = 1 << 16
_MAX_AHEAD = 1 << 18  # output that the launcher has not handled; beyond it, children block on their pipes
_NUM_LAST_READS = 256  # after a process's end: more than a pipe's content; a daemon that it left may write for ever,
_LAST_READS_S = 1.0  # or be silent
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """One conversation and its processes. For the arguments see `main`."""

    def __init__(self, limit_s: float | None, drop: frozenset[str], passes_on: bool) -> None:
        self._guardian = Guardian()
        self._limit_s = limit_s
        self._drop = drop
        self._passes_on = passes_on
        self._popens: dict[int, subprocess.Popen[bytes]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._handled = threading.Condition()
        self._num_ahead = 0  # bytes of output that the launcher has not handled

    def run(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: children ignore it too
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, end_of_input)
        in_thread(talk, self._outbox, 1, HEARTBEAT_S if self._limit_s is not None else None)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s or 0)
        while (line := sys.stdin.buffer.readline()).endswith(b"\n"):  # the reader that has read this source
            signal.setitimer(signal.ITIMER_REAL, self._limit_s or 0)
            self._do(json.loads(line))
        popens = list(self._popens.values())
        for popen in popens:
            kill_group(popen.pid)
        for popen in popens:
            popen.wait()
        self._guardian.close()

    def _on_signal(self, *_: object) -> None:
        if not self._passes_on:
            end_of_input()
            return
        for popen in list(self._popens.values()):
            popen.terminate()

    def _do(self, message: dict[str, Any]) -> None:
        action, number = message.get("do"), message.get("id", 0)
        if action == "start":
            self._start(message)
        elif action == "write":
            problem = write_file(message["folder"], message["path"], sys.stdin.buffer.read(message["size"]))
            self._send({"exit": number, "code": 0, "why": problem})
        elif action == "listen":
            self._result(number, listen, message["port"])
        elif action == "ping":
            in_thread(self._result, number, ping, message["address"], message["num"], message["limit_s"])
        elif action == "took":
            with self._handled:
                self._num_ahead -= message["size"]
                self._handled.notify_all()
        elif action == "sweep":  # kill the agent of an earlier connection; its guardian kills its processes
            if message["since"] and started_at(message["pid"]) == message["since"]:
                with suppress(OSError):
                    os.kill(message["pid"], signal.SIGKILL)
        elif (popen := self._popens.get(number)) is not None:  # another thread removes it at its end
            if action == "end":
                popen.terminate()
            elif action == "kill":
                kill_group(popen.pid)

    def _send(self, message: dict[str, Any], data: bytes = b"") -> None:
        self._outbox.put(json.dumps(message).encode() + b"\n" + data)

    def _send_output(self, number: int, data: bytes) -> None:
        self._send({"out": number, "size": len(data)}, data)
        with self._handled:
            self._num_ahead += len(data)

    def _result(self, number: int, work: Callable[..., Any], *args: Any) -> None:
        """Send what `work` returns as output, or the problem."""
        why = ""
        try:
            self._send_output(number, json.dumps(work(*args)).encode())
        except OSError as error:
            why = error.strerror or str(error)
        self._send({"exit": number, "code": 0, "why": why})

    def _start(self, message: dict[str, Any]) -> None:
        number = message["id"]
        env = {name: value for name, value in os.environ.items() if name not in self._drop}
        if message["sharing"] and not env.get("OMP_NUM_THREADS"):
            env["OMP_NUM_THREADS"] = str(max(1, num_cores() // message["sharing"]))
        env.update(message["env"])
        argv = [os.path.expanduser(message["argv"][0]), *message["argv"][1:]]
        results = None
        try:
            if message.get("results"):
                results = tempfile.TemporaryFile()  # noqa: SIM115  (open until its process has ended)
                env[message["results"]] = str(results.fileno())
            popen = subprocess.Popen(
                argv, env=env, cwd=os.path.expanduser(message["folder"]), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with(os.getpid()), pass_fds=() if results is None else (results.fileno(),),
            )  # fmt: skip
        except OSError as error:
            self._send({"exit": number, "code": CANNOT_START, "why": f"{error.filename}: {error.strerror}"})
            return
        self._guardian.watch(popen.pid)
        self._popens[number] = popen
        in_thread(self._await_end, number, popen, in_thread(self._pass_on, number, popen), results)

    def _pass_on(self, number: int, popen: subprocess.Popen[bytes]) -> None:
        """Pass on output at the launcher's pace, so that events do not wait behind megabytes of a chatty child."""
        assert popen.stdout is not None
        num_last = 0
        with popen.stdout as pipe:
            while num_last < _NUM_LAST_READS and (data := os.read(pipe.fileno(), _MAX_READ)):
                self._send_output(number, data)
                with self._handled:
                    self._handled.wait_for(lambda: self._num_ahead < _MAX_AHEAD or popen.returncode is not None)
                num_last += popen.returncode is not None

    def _await_end(
        self, number: int, popen: subprocess.Popen[bytes], reader: threading.Thread, results: IO[bytes] | None
    ) -> None:
        popen.wait()
        kill_group(popen.pid)  # the group keeps its number while anything in it is alive
        with self._handled:
            self._handled.notify_all()
        reader.join(_LAST_READS_S)
        self._guardian.forget(popen.pid)
        del self._popens[number]
        if results is not None:
            with results:
                results.seek(0)
                while piece := results.read(_RESULTS_PIECE):
                    self._send({"results": number, "size": len(piece)}, piece)
        self._send({"exit": number, "code": popen.returncode, "why": ""})


class Guardian:
    """A forked child that kills the watched process groups once this process is gone."""

    def __init__(self) -> None:
        read, self._tell = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(read)
            return
        os.setsid()
        os.close(self._tell)
        null = os.open(os.devnull, os.O_RDWR)
        for end in (0, 1, 2):  # sshd waits until nobody has the connection open
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
        self._send(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        self._send(b"-%d\n" % group)

    def close(self) -> None:
        """End the guardian, which kills the groups that are still watched."""
        os.close(self._tell)
        with suppress(OSError):
            os.waitpid(self._pid, 0)

    def _send(self, line: bytes) -> None:
        with suppress(OSError):  # somebody may have killed it; the processes do not depend on it
            os.write(self._tell, line)


def talk(outbox: queue.SimpleQueue[bytes | None], descriptor: int, heartbeat_s: float | None) -> None:
    """Write the messages of the queue, up to a None, and a heartbeat when there is none for `heartbeat_s`."""
    with suppress(OSError):  # the reader notices that the connection is gone
        while True:
            try:
                data = outbox.get(timeout=heartbeat_s)
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
    """Make the reader of standard input find its end; a signal wakes one that blocks."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def write_file(folder: str, name: str, content: bytes) -> str:
    """Write a file atomically, and return the problem, if any."""
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


def listen(port: int) -> int:
    """Accept connections and close them, on all addresses of this host, for as long as the agent lives. Returns the
    port."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    server = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)

    def accept() -> None:
        with suppress(OSError):
            while True:
                server.accept()[0].close()

    in_thread(accept)
    return int(server.getsockname()[1])


def ping(address: str, num: int, limit_s: float) -> float | str:
    """Returns the least seconds of `num` connects, each a round trip; the reason if the address cannot be reached."""
    least_s, why = float("inf"), ""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), limit_s) as first:  # it tries all of a name
            family, there = first.family, first.getpeername()
        for _ in range(num):
            with socket.socket(family, socket.SOCK_STREAM) as client:
                client.settimeout(limit_s)
                began = time.perf_counter()
                client.connect(there)
                least_s = min(least_s, time.perf_counter() - began)
    except socket.timeout:  # noqa: UP041  (Python 3.8)
        why = f"no answer within {limit_s} s"
    except OSError as error:
        why = error.strerror or str(error)
    return least_s if least_s < float("inf") else why


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started_at(pid: int) -> str:
    """Returns the start time of a process, which tells it from a later one of the same pid; "" if unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def kill_group(group: int) -> None:
    with suppress(OSError):  # it is gone; macOS: EPERM for a group of zombies
        os.killpg(group, signal.SIGKILL)


def end_with(parent: int) -> Callable[[], None] | None:
    """Returns a function that a new process calls before exec, so that the kernel kills it when its parent ends."""
    if sys.platform != "linux":
        return None
    import ctypes  # before the fork: nothing may be imported between fork and exec

    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def main(limit_s: float | None, drop: list[str], passes_on: bool = False) -> None:
    """Send the first line, and serve until the connection ends.

    `limit_s`: how long the launcher may be silent; None: for ever, and no heartbeats are sent. `drop`: variables of
    the agent's environment that no child gets. `passes_on`: the agent passes signals on to its processes, which end in
    good order when Slurm cancels a job or its time is over; otherwise a signal ends everything.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would reap the children
    agent = Agent(limit_s, frozenset(drop), passes_on)
    step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
    hello = {"magic": MAGIC, "pid": os.getpid(), "since": started_at(os.getpid()), "python": sys.executable}
    os.write(1, b"\n" + json.dumps({**hello, "step": step}).encode() + b"\n")
    agent.run()


if __name__ == "__main__" and "__file__" in globals():  # not where its source was sent ahead
    main(**json.loads(sys.argv[1]))
