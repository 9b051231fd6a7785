"""Stands in for ps-worker, and for a user's script (then PS_WORKER__RANK and PS_SERVER are its arguments).

It looks for a server that is gone, as ps-worker does. FAKE_WORKER_<rank> or FAKE_WORKER makes it
misbehave once all workers have connected, so that every one of them has said what it says:
`exit CODE`, `kill` (by SIGKILL), `hang` (drained by SIGTERM), `stubborn` (ignores SIGTERM), `family`
(hangs, with a child process), `orphan CODE` (ends and leaves a child), `chatty` (prints for ever).
After the word `once` only the first process of the rank that starts in this directory does so.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from fake_server import GOODBYE, RANK, todo_of

SLEEPER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
GIVE_UP_S = 10.0


def say(event: str, **fields: object) -> None:
    line = {"event": event, "level": "info", "program": "ps-worker", "timestamp": time.time(), **fields}
    print(json.dumps(line), file=sys.stderr, flush=True)


def rank_and_version() -> tuple[int, str]:
    if "--rank" in sys.argv:
        return int(sys.argv[sys.argv.index("--rank") + 1]), sys.argv[sys.argv.index("--server") + 1]
    return int(os.environ["PS_WORKER__RANK"]), os.environ["PS_SERVER"]


def misbehave(todo: str, code: str) -> None:
    if todo == "exit":
        sys.exit(int(code))
    if todo == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if todo in ("family", "orphan"):
        child = subprocess.Popen([sys.executable, "-S", "-c", SLEEPER])
        say("has_child", pid=child.pid)
    if todo == "orphan":
        sys.exit(int(code))
    while todo == "chatty":
        print("still here", flush=True)
    if todo in ("hang", "family", "stubborn"):
        say("hanging")
        while True:  # not pause(): a signal that comes just before it would be heard after it
            time.sleep(0.05)


def join(server: str, rank: int) -> socket.socket:
    """A connection on which the server has said that all are there."""
    host, _, port = server.rpartition(":")
    end = time.monotonic() + GIVE_UP_S
    while True:
        try:
            connection = socket.create_connection((host, int(port)))
            connection.sendall(bytes([RANK + rank]))
            if connection.recv(1):
                return connection
        except OSError:
            if time.monotonic() > end:
                sys.exit(15)
            time.sleep(0.01)


def main() -> None:
    rank, server = rank_and_version()
    text = os.environ.get(f"FAKE_WORKER_{rank}", os.environ.get("FAKE_WORKER", ""))
    todo, code = todo_of(text, Path(f"worker-{rank}.once"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if todo == "stubborn" else lambda *_: sys.exit(143))
    print(f"hello from {rank}, arguments {sys.argv[1:]}", flush=True)
    say("joined", rank=rank, pid=os.getpid(), group=os.getpgrp(), threads=os.environ.get("OMP_NUM_THREADS"))
    connection = join(server, rank) if server != "none" else None
    misbehave(todo, code)
    if connection is None:
        rows = [{"rank": 0, "steps": 10, "samples": 640}]
        summary = {"mode": "sync", "wall_s": 2.5, "final": {"loss": 0.25}, "workers": rows}
        if descriptor := os.environ.get("PS_RESULTS_DESCRIPTOR"):
            os.write(int(descriptor), json.dumps(summary).encode())
    else:
        connection.sendall(GOODBYE)
        connection.close()


main()
