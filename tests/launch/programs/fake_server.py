"""Stands in for ps-server: a real process with a real port that says what ps-server says.

It ends when all workers have come and gone. FAKE_SERVER_<mode> or FAKE_SERVER makes it misbehave:
`exit CODE` (before it listens), `die CODE` (once all workers are there), `linger` (never ends by
itself), `stubborn` (also ignores SIGTERM).
"""

import json
import os
import signal
import socket
import sys
import time


def say(event: str, **fields: object) -> None:
    line = {"event": event, "level": "info", "program": "ps-server", "timestamp": time.time(), **fields}
    print(json.dumps(line), file=sys.stderr, flush=True)


def settings() -> dict[str, str]:
    words = sys.argv[1:]
    pairs = [words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set"]
    return dict(pairs)


def status(mode: str, step: int, num_workers: int, num_joined: int) -> None:
    rows = [
        {"rank": rank, "state": "computing", "step": step, "lead": 0, "loss": 0.5, "samples_per_s": 800.0,
         "compute_share": 0.7, "transfer_share": 0.1, "wait_share": 0.2, "waiting_for": ""}
        for rank in range(num_joined)
    ]  # fmt: skip
    waiting = "" if num_joined == num_workers else f"for {num_workers} workers: {num_joined} joined"
    say("status", mode=mode, version=step, elapsed_s=1.0, step=step, steps=10, num_joined=num_joined,
        workers=rows, waiting=waiting)  # fmt: skip


def main() -> int:
    options = settings()
    num_workers, mode = int(options["run.workers"]), options.get("run.mode", "sync")
    todo, _, code = os.environ.get(f"FAKE_SERVER_{mode}", os.environ.get("FAKE_SERVER", "")).partition(" ")
    if todo == "exit":
        say("refused", why="told to")
        return int(code)
    if todo == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    host, _, port = options["server.listen"].rpartition(":")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError:
        print(f"ps-server: cannot listen on {host}:{port}: address in use", file=sys.stderr)
        return 10
    listener.listen()
    say("listening", address=f"{host}:{listener.getsockname()[1]}")
    status(mode, 0, num_workers, 0)
    workers = [listener.accept()[0] for _ in range(num_workers)]
    status(mode, 5, num_workers, num_workers)
    if todo == "die":
        return int(code)
    for worker in workers:
        while worker.recv(4096):
            pass
    while todo in ("linger", "stubborn"):
        signal.pause()
    rows = [{"rank": rank, "steps": 10, "samples": 320, "compute_s": 1.0} for rank in range(num_workers)]
    say("summary", mode=mode, updates=10, version=10, wall_s=1.25, final={"loss": 0.125}, workers=rows)
    return 0


sys.exit(main())
