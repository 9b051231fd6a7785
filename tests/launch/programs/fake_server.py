"""Stands in for ps-server: a real process with a real port that says what ps-server says.

It ends when all workers have said goodbye; one that comes back after an accident is let go on at
once. FAKE_SERVER_<mode> or FAKE_SERVER makes it misbehave:
`exit CODE` (before it listens), `die CODE` and `kill` (by SIGKILL; once all workers are there),
`stubborn` (never ends by itself, and ignores SIGTERM). After the word `once` only the first process that
starts in this directory does so. FAKE_ADDRESS is where it says that it listens.

As a shard of several (server.shard) it listens and ends with the coordinator, of which it learns from a file named
after the coordinator's port. FAKE_SHARD may be `kill`: once the coordinator has said that it has a snapshot.

With checkpoint.dir it keeps a snapshot: who has said goodbye. It is taken as ps-server would take
it: with resume `never` from the start, otherwise from what is there.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

GOODBYE = b"!"
ASKED: list[int] = []  # signals


class Asked(SystemExit):
    """Asked to end."""


def ask_to_end(number: int, _: object) -> None:
    ASKED.append(number)
    raise Asked(143)


RANK = 128  # and its number: the first byte of a worker


def say(event: str, **fields: object) -> None:
    line = {"event": event, "level": "info", "program": "ps-server", "timestamp": time.time(), **fields}
    print(json.dumps(line), file=sys.stderr, flush=True)


def results(**fields: object) -> None:
    """Hand over the results; a part or none of them as FAKE_RESULTS says."""
    text = json.dumps(fields)
    if (todo := os.environ.get("FAKE_RESULTS", "")) != "none":
        os.write(int(os.environ["PS_RESULTS_DESCRIPTOR"]), text[: len(text) // 2 if todo == "part" else None].encode())


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
    say("status", mode=mode, version=step, elapsed_s=1.0, step=step, steps=10, num_workers=num_joined,
        workers=rows, waiting=waiting)  # fmt: skip


def todo_of(text: str, marker: Path) -> tuple[str, str]:
    """What to do and its code; nothing when it was to be done once and has been."""
    words = text.split()
    if words[:1] == ["once"]:
        if marker.exists():
            return "", ""
        marker.touch()
        del words[0]
    return (*words, "", "")[:2]


class Snapshot:
    """How many workers have said goodbye, in a file if there is a place for it."""

    def __init__(self, options: dict[str, str]) -> None:
        folder = options.get("checkpoint.dir")
        self.path = Path(folder) / "snapshot" if folder else None
        self.num_goodbyes = 0
        if self.path and self.path.exists() and options.get("checkpoint.resume") != "never":
            self.num_goodbyes = int(self.path.read_text())
            say("resumed", num_goodbyes=self.num_goodbyes)

    def take(self) -> None:
        if self.path:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(str(self.num_goodbyes))
            say("snapshot", num_goodbyes=self.num_goodbyes)


def serve(listener: socket.socket, snapshot: Snapshot, num_workers: int, all_are_there) -> None:
    """Let workers go on once all are there, and each later one at once, until all have said goodbye."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    waiting: list[socket.socket] = []
    is_open = False
    while snapshot.num_goodbyes < num_workers:
        try:
            ready = selector.select(0 if ASKED else None)
        except Asked:
            continue  # the goodbyes that are here count first
        if ASKED and not ready:
            sys.exit(143)
        for key, _ in ready:
            if key.fileobj is listener:
                waiting.append(listener.accept()[0])
                selector.register(waiting[-1], selectors.EVENT_READ)
                continue
            data = key.fileobj.recv(4096)
            if data and data[0] >= RANK:
                say("admitted", rank=data[0] - RANK)
            if data.endswith(GOODBYE):
                snapshot.num_goodbyes += 1
                snapshot.take()
            elif not data:
                selector.unregister(key.fileobj)
                if key.fileobj in waiting:
                    waiting.remove(key.fileobj)
        if not is_open and len(waiting) + snapshot.num_goodbyes >= num_workers:
            is_open = True
            all_are_there()
        while is_open and waiting:
            waiting.pop().sendall(b".")


def main() -> int:
    options = settings()
    shard = int(options.get("server.shard", "0"))
    num_workers, mode = int(options["run.workers"]), options.get("run.mode", "sync")
    text = os.environ.get(f"FAKE_SERVER_{mode}", os.environ.get("FAKE_SERVER", ""))
    todo, code = todo_of(os.environ.get("FAKE_SHARD", "") if shard else text, Path(f"server-{mode}-{shard}.once"))
    if todo == "exit":
        say("refused", why="told to")
        return int(code)
    if todo == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, ask_to_end)
    host, _, port = options["server.listen"].rpartition(":")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError:
        print(f"ps-server: cannot listen on {host}:{port}: address in use", file=sys.stderr)
        return 10
    listener.listen()
    port = listener.getsockname()[1]
    more = {"resume": options.get("checkpoint.resume")} if shard else {}
    say("listening", address=os.environ.get("FAKE_ADDRESS", f"{host}:{port}"), **more)
    if shard:
        while todo == "kill":
            time.sleep(0.2)
            if (Path(options["checkpoint.dir"]) / "snapshot").exists():
                os.kill(os.getpid(), signal.SIGKILL)
        while not Path(f"done-{options['server.coordinator'].rpartition(':')[2]}").exists():
            time.sleep(0.01)
        return 0
    status(mode, 0, num_workers, 0)
    snapshot = Snapshot(options)

    def all_are_there() -> None:
        status(mode, 5, num_workers, num_workers)
        snapshot.take()
        if todo == "die":
            sys.exit(int(code))
        if todo == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    serve(listener, snapshot, num_workers, all_are_there)
    if "server.shards" in options:
        Path(f"done-{port}").touch()
    while todo == "stubborn":  # not pause(): a signal that comes just before it would be heard after it
        time.sleep(0.05)
    rows = [{"rank": rank, "steps": 10, "samples": 320, "compute_s": 1.0} for rank in range(num_workers)]
    results(mode=mode, version=10, wall_s=1.25, final={"loss": 0.125}, workers=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
