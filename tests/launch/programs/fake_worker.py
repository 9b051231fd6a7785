"""Stands in for ps-worker, and for a user's script (then RANK and PS_SERVER are its arguments).

FAKE_WORKER_<rank> or FAKE_WORKER makes it misbehave, at once after it has connected:
`exit CODE`, `crash` (uncaught exception), `hang` (drained by SIGTERM), `stubborn` (ignores
SIGTERM), `family` (hangs, with a child process), `orphan CODE` (ends and leaves a child),
`chatty` (prints for ever).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

SLEEPER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def say(event: str, **fields: object) -> None:
    line = {"event": event, "level": "info", "program": "ps-worker", "timestamp": time.time(), **fields}
    print(json.dumps(line), file=sys.stderr, flush=True)


def place() -> tuple[int, str]:
    if "--rank" in sys.argv:
        return int(sys.argv[sys.argv.index("--rank") + 1]), sys.argv[sys.argv.index("--server") + 1]
    return int(os.environ["RANK"]), os.environ["PS_SERVER"]


def misbehave(todo: str, code: str) -> None:
    if todo == "exit":
        sys.exit(int(code))
    if todo == "crash":
        raise RuntimeError("a mistake in the user's task")
    if todo in ("family", "orphan"):
        child = subprocess.Popen([sys.executable, "-S", "-c", SLEEPER])
        say("has_child", pid=child.pid)
    if todo == "orphan":
        sys.exit(int(code))
    while todo == "chatty":
        print("still here", flush=True)
    if todo in ("hang", "family", "stubborn"):
        say("hanging")
        while True:
            signal.pause()


def main() -> None:
    rank, server = place()
    todo, _, code = os.environ.get(f"FAKE_WORKER_{rank}", os.environ.get("FAKE_WORKER", "")).partition(" ")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if todo == "stubborn" else lambda *_: sys.exit(143))
    print(f"hello from {rank}, arguments {sys.argv[1:]}")
    connection = None
    if server != "none":
        host, _, port = server.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    say("joined", rank=rank, pid=os.getpid(), group=os.getpgrp(), threads=os.environ.get("OMP_NUM_THREADS"))
    misbehave(todo, code)
    if connection is None:
        rows = [{"rank": 0, "steps": 10, "samples": 640}]
        say("summary", mode="sync", updates=10, wall_s=2.5, final={"loss": 0.25}, workers=rows)
    else:
        connection.close()


main()
