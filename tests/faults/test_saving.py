"""Signals while results are written: a file is whole or not there, the exit code says it, and nobody sees a traceback.

Whoever writes is stopped in the middle (SIGSTOP), so that the signals find it there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from paramserver.tests.cluster import DEADLINE_S, Cluster, Process

TASK = ("--task", f"{Path(__file__).parent / 'scripts' / 'large.py'}:Large", "--batch-size", "4")
OUTPUTS = ("--steps", "3", "--save", "w.safetensors", "--summary", "s.json")
TERM, INT = signal.SIGTERM, signal.SIGINT

pytestmark = pytest.mark.slow


def served(cluster: Cluster, *flags: str) -> Process:
    server = cluster.server("--workers", "1", *TASK, *OUTPUTS, *flags)
    cluster.worker(0, *TASK)
    return server


def alone(cluster: Cluster, *flags: str) -> Process:
    return cluster.start("alone", "-m", "paramserver.worker", "--server", "none", *TASK, *OUTPUTS, *flags)


def launched(cluster: Cluster, *flags: str) -> Process:
    graces = ("--set", "launch.grace_s=0.5")  # over long before all is written
    return cluster.start("launch", "-m", "paramserver.launch", "-n", "1", *TASK, *OUTPUTS, *graces, *flags)


def written(name: str) -> Callable[[Process, Path], bool]:
    """A file is being written, or a folder."""
    return lambda process, folder: any(folder.glob(name))


def shown(process: Process, folder: Path) -> bool:
    return '"event": "summary"' in process.output


def server_of(launcher: Process) -> int | None:
    children = psutil.Process(launcher.popen.pid).children(recursive=True)
    return next((child.pid for child in children if "paramserver.ps" in " ".join(child.cmdline())), None)


def stopped(process: Process, folder: Path, is_there: Callable[[Process, Path], bool]) -> int:
    """Who writes, once it does."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_there(process, folder):
        assert process.popen.poll() is None and time.monotonic() < deadline, process.output
        time.sleep(0.001)
    pid = server_of(process) if process.name == "launch" else process.popen.pid
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
    return pid or process.popen.pid


WEIGHTS, BEST = written(".w.safetensors.*.tmp"), written(".best.safetensors.*.tmp")


@pytest.mark.parametrize(
    ("start", "flags", "at", "signals"),
    [
        (served, ("--eval-every", "1"), BEST, (TERM, TERM)),
        (served, ("--checkpoint-dir", "kept"), written("kept/.writing-*3-*"), (INT, INT)),
        (served, (), shown, (INT, INT)),
        (alone, (), WEIGHTS, (INT,)),
        (launched, (), WEIGHTS, (INT,)),
        (launched, (), WEIGHTS, (TERM, TERM)),
    ],
)
def test_what_is_written_is_whole_or_not_there(
    cluster: Cluster, start: Callable[..., Process], flags: tuple[str, ...], at: Callable, signals: tuple[int, ...]
) -> None:
    process = start(cluster, *flags)
    writer = stopped(process, cluster.folder, at)
    for number in signals:
        with suppress(ProcessLookupError):
            process.signal(number)
        time.sleep(0.1 if process.name == "launch" else 0)
    if process.name == "launch" and len(signals) == 1:  # longer than its patience with others
        time.sleep(1)
    with suppress(ProcessLookupError):
        os.kill(writer, signal.SIGCONT)
    code = process.wait()
    assert code in (0, -signals[0], 128 + signals[0]), process.output
    assert not any(word in process.output for word in ("Traceback", "Exception ignored")), process.output
    files = [path for path in (cluster.folder / "w.safetensors", cluster.folder / "best.safetensors") if path.exists()]
    assert all(load_file(path)["weight"].shape == (4096, 4096) for path in files)
    if code == 0 or len(signals) == 1:
        assert cluster.folder / "w.safetensors" in files and (cluster.folder / "s.json").exists()
    if at is shown:
        assert code == 0, "all was written before"
