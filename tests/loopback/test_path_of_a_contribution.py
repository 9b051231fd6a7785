"""The files that a synchronous contribution passes, from `optimizer.step()` to the new weights, and how many functions
are called for it, traced in processes. The bounds only ever go down.

A file is on the path when it is entered and enters another file of the project in turn. A file that is only called and
returns is a helper. `-s` prints both; docs/architecture.md has the list.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import pytest

from paramserver.tests.cluster import Cluster, end_well

MAX_ON_PATH, MAX_FILES, MAX_CALLS = 20, 40, 112  # calls: those from another file of the project
STEPS = 12


class Call(NamedTuple):
    """One function of `file` is called from a file of the project."""

    at_ns: int  # CLOCK_MONOTONIC, which both processes share
    caller: str
    file: str
    function: str


def read_calls(path: Path) -> list[Call]:
    return [Call(int(at), *words) for at, *words in map(str.split, path.read_text().splitlines())]


def trace(cluster: Cluster, run: Sequence[str], *worker_argv: str) -> list[list[Call]]:
    """The calls of a worker and of its server, each a process."""
    traced = str(cluster.scripts / "traced.py")
    server = cluster.fork("server", traced, "server.txt", "paramserver.ps", "--listen", "127.0.0.1:0", *run)
    environ = {"PS_SERVER": server.event("listening")["address"], "RANK": "0", "PS_WORKER__TRANSPORTS": "direct,grpc"}
    worker = cluster.fork("worker", traced, "worker.txt", *worker_argv, **environ)
    end_well(worker, server)
    return [read_calls(cluster.folder / name) for name in ("worker.txt", "server.txt")]


def calls_of_steps(worker: list[Call], server: list[Call]) -> list[list[Call]]:
    """The calls of both processes during each training step, in the order of time."""
    begins = [call.at_ns for call in worker if call[2:] == ("worker/training/optimizer.py", "_take_step")]
    ends = [call.at_ns for call in worker if call.function == "<end>"]
    both = sorted(worker + server)
    return [[call for call in both if begin <= call.at_ns <= end] for begin, end in zip(begins, ends, strict=True)]


def test_a_contribution_passes_few_files(cluster: Cluster) -> None:
    run = ("--mode", "sync", "--workers", "1", "--steps", str(STEPS), "--task", "xor")
    calls = [
        [call for call in found if call.caller != call.file or call.function in ("_take_step", "<end>")]
        for found in trace(cluster, run, "paramserver.worker", "--rank", "0")
    ]
    # Ticks and heartbeats come between some steps: the shortest one has none of them.
    step = min(calls_of_steps(*calls)[2:-2], key=lambda calls: len({call.file for call in calls}))
    callers, entries = {call.caller for call in step}, Counter(call.file for call in step)
    on_path = [file for file in entries if file in callers]
    for file, count in entries.items():
        functions = ", ".join(dict.fromkeys(call.function for call in step if call.file == file))
        print(f"{'path' if file in callers else '':5} {count:3}  {file:40} {functions}")
    print(len(on_path), "files on the path,", len(entries), "in all,", len(step), "calls from file to file")
    assert len(on_path) <= MAX_ON_PATH
    assert len(entries) <= MAX_FILES
    assert len(step) <= MAX_CALLS


@pytest.mark.parametrize(("mode", "most"), [("sync", (86, 111)), ("async", (86, 114)), ("localsgd", (84, 102))])
def test_an_exchange_calls_few_functions(cluster: Cluster, mode: str, most: tuple[int, int]) -> None:
    """Of the project, from one `optimizer.step()` to the next, over a direct connection: worker and server."""
    run = ("--mode", mode, "--workers", "1", "--steps", "80", "--set", "policy.local_steps=1")
    found = trace(cluster, run, "paramserver.tests.loopback.scripts.constant", "26", "0.5")
    begins = [call.at_ns for call in found[0] if call[2:] == ("worker/training/optimizer.py", "_take_step")][20:]
    counts = [
        median_low(sum(begin <= call.at_ns < end for call in calls) for begin, end in itertools.pairwise(begins))
        for calls in found
    ]
    assert counts[0] <= most[0] and counts[1] <= most[1], counts
