"""The files that a synchronous contribution passes, from `optimizer.step()` to the new weights, traced in processes.

A file is on the path when it is entered and enters another file of the project in turn. A file that is only called and
returns is a helper. `-s` prints both; docs/architecture.md has the list.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from paramserver.tests.cluster import Cluster

MAX_ON_PATH, MAX_FILES = 39, 82
STEPS = 12


class Call(NamedTuple):
    """One function of `file` is called from another file of the project."""

    at_ns: int  # CLOCK_MONOTONIC, which both processes share
    caller: str
    file: str
    function: str


def read_calls(path: Path) -> list[Call]:
    return [Call(int(at), *words) for at, *words in map(str.split, path.read_text().splitlines())]


def calls_of_steps(worker: list[Call], server: list[Call]) -> list[list[Call]]:
    """The calls of both processes during each training step, in the order of time."""
    begins = [call.at_ns for call in worker if call.function == "_take_step"]
    ends = [call.at_ns for call in worker if call.function == "<end>"]
    both = sorted(worker + server)
    return [[call for call in both if begin <= call.at_ns <= end] for begin, end in zip(begins, ends, strict=True)]


def test_a_contribution_passes_few_files(cluster: Cluster) -> None:
    run = ("--mode", "sync", "--workers", "1", "--steps", str(STEPS), "--task", "xor")
    traced = str(cluster.scripts / "traced.py")
    server = cluster.fork("server", traced, "server.txt", "paramserver.ps", "--listen", "127.0.0.1:0", *run)
    address = server.event("listening")["address"]
    worker = cluster.fork("worker", traced, "worker.txt", "paramserver.worker", "--rank", "0", "--server", address)
    assert [worker.wait(), server.wait()] == [0, 0], worker.output + server.output
    calls = [read_calls(cluster.folder / name) for name in ("worker.txt", "server.txt")]
    # Ticks and heartbeats come between some steps: the shortest one has none of them.
    step = min(calls_of_steps(*calls)[2:-2], key=lambda calls: len({call.file for call in calls}))
    callers, entries = {call.caller for call in step}, Counter(call.file for call in step)
    on_path = [file for file in entries if file in callers]
    for file, count in entries.items():
        functions = ", ".join(dict.fromkeys(call.function for call in step if call.file == file))
        print(f"{'path' if file in callers else '':5} {count:3}  {file:40} {functions}")
    print(len(on_path), "files on the path,", len(entries), "in all")
    assert len(on_path) <= MAX_ON_PATH
    assert len(entries) <= MAX_FILES
