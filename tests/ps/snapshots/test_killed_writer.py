"""A writer of snapshots killed at any moment loses nothing."""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from paramserver.ps.snapshots.files import candidates, next_incarnation
from paramserver.ps.snapshots.manifest import WEIGHTS, load
from paramserver.tests.cluster import DEADLINE_S
from paramserver.tests.ps.snapshots.making import hidden, load_newest, snapshot

# Forks a writer for every line it reads, so that torch is loaded once.
WRITERS = """
import os, sys, torch
from pathlib import Path
from paramserver.ps.snapshots.files import next_incarnation, prune
from paramserver.tests.ps.snapshots.making import snapshot
torch.set_num_threads(1)
place = Path(sys.argv[1])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        version, incarnation = int(line), next_incarnation(place)
        os.write(1, b"pid %d\\n" % os.getpid())
        while True:
            version += 1
            snapshot(place, version, incarnation)
            os.write(1, b"%d\\n" % version)
            prune(place, 2)
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


def test_a_writer_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    chance = random.Random(1)
    program = [sys.executable, "-c", WRITERS, str(tmp_path)]
    writers = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert writers.stdin is not None and writers.stdout is not None
    num_leftovers = durable = 0
    try:
        for _ in range(20):
            writers.stdin.write(b"%d\n" % durable)
            output = read_until(writers, b"pid ")
            pid = int(output.rsplit(b"pid ")[1].split(b"\n")[0])
            time.sleep(chance.uniform(0, 0.02))  # when, not whether: any moment will do
            os.kill(pid, signal.SIGKILL)
            output += read_until(writers, b"gone\n")
            versions = [int(line) for line in output.split(b"\n") if line.isdigit()]
            durable = check_after_kill(tmp_path, max([durable, *versions]))
            num_leftovers += bool(hidden(tmp_path))
    finally:
        writers.kill()
        writers.wait()
        writers.stdin.close()
        writers.stdout.close()
    assert num_leftovers > 0, "no kill came while something was written"
    snapshot(tmp_path, durable + 1, next_incarnation(tmp_path))
    assert hidden(tmp_path) == []


def read_until(process: subprocess.Popen[bytes], end: bytes) -> bytes:
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + DEADLINE_S
    while end not in output or not output.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        assert ready, f"no {end!r} in {output!r}"
        output += os.read(process.stdout.fileno(), 4096)
    return output


def check_after_kill(folder: Path, durable: int) -> int:
    """The newest is whole and at least what was said to be durable; no other is damaged either."""
    if not candidates(folder):
        assert durable == 0
        return 0
    newest = load_newest(folder)
    assert newest is not None and newest.path == candidates(folder)[0]
    version = newest.manifest.version
    assert durable <= version <= durable + 1
    assert hashlib.sha256((newest.path / WEIGHTS).read_bytes()).hexdigest() == newest.manifest.files[WEIGHTS].sha256
    for path in candidates(folder):
        loaded = load(path)
        assert torch.equal(loaded.files[WEIGHTS]["w"], torch.full((3, 2), float(loaded.manifest.version)))
    return version
