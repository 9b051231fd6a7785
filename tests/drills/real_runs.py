"""Short real runs of drawn options with a drawn event, whose histories `ps-launch check` must accept.

python -m paramserver.tests.drills.real_runs --seed 1 --most 100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from paramserver.drills.check_main import check_paths
from paramserver.tests.combinations.options import DEFAULTS, OPTIONS, Row, command, is_promised

SCRIPT = Path(__file__).parents[1] / "combinations" / "script.py"
TIMEOUT_S = 150.0
# What happens to a run, and the fault of a row whose flags it needs.
EVENTS = {
    "none": "none", "kill_worker": "kill_worker", "kill_server": "kill_server", "stop_worker": "stop_worker",
    "stop_job": "kill_server", "kill_relay": "kill_worker", "pause": "kill_worker", "set": "kill_server",
    "evict": "stop_worker",
}  # fmt: skip
# Options of a mode that a run takes, and options that change while it trains.
_BOUNDS = {
    "sync": ("backup_workers=1", "straggler_timeout_s=0.2"), "localsgd": ("straggler_timeout_s=0.2",),
    "ssp": ("staleness=0", "staleness=1"), "dssp": ("staleness=1",), "async": ("pull_every=2",),
    "async_diloco": ("quorum=1",),
}  # fmt: skip
_CHANGES: dict[str, Any] = {"staleness": 2, "buffer": 1, "straggler_timeout_s": 0.5, "backup_workers": 1}


class Drawn(NamedTuple):
    row: Row
    event: str
    bound: str  # an option of the mode; empty: none
    at: int  # the event comes after so many contributions

    def __str__(self) -> str:
        chosen = [f"{name}={value}" for name, value in self.row.items() if value != DEFAULTS[name]]
        return " ".join([f"event={self.event} at={self.at}", *filter(None, [self.bound]), *chosen])


class Recorded(NamedTuple):
    drawn: Drawn
    code: int | None  # of the last process of the launcher; None: it was killed, as it did not end
    num_lines: int
    problems: list[str]  # of `ps-launch check`
    output: str


def drawn(seed: int) -> Drawn:
    """Return the options of a run."""
    chance = random.Random(seed)
    while True:
        event = chance.choice([*EVENTS])
        row = {name: chance.choice(values) for name, values in OPTIONS.items()} | {"fault": EVENTS[event]}
        row["workers"] = chance.choice(("2", "3")) if event != "kill_relay" else "2"
        if event == "kill_relay":
            row["feature"] = "regions"
        if is_promised(row) and not (row["feature"].startswith("regions") and row["workers"] == "3"):
            break
    bounds = _BOUNDS.get(row["mode"], ()) if row["feature"] == "none" else ()
    return Drawn(row, event, chance.choice(["", *bounds]), chance.randint(3, 12))


def record(it: Drawn, folder: Path) -> Recorded:
    """Run it in a new folder, and check its history."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [*command(it.row, SCRIPT, folder), "--web", "--set", "server.status_interval_s=0.1"]
    words += ["--set", f"policy.{it.bound}"] if it.bound else []
    code = _run(it, words, folder)
    if it.event == "stop_job" and code == 143:
        code = _run(it._replace(event="none"), words, folder)
    histories = [str(path) for path in sorted(folder.glob("history*.jsonl"))]
    output = (folder / "output").read_text(errors="replace")
    if not histories:
        return Recorded(it, code, 0, [], output)
    verdict = check_paths(histories, [])
    problems = [str(problem) for problem in verdict.problems]
    if code == 0 and verdict.last_op != "end":
        problems.append(f"called cut: its last line is {verdict.last_op}")
    return Recorded(it, code, verdict.num_lines, problems, output)


def _run(it: Drawn, words: list[str], folder: Path) -> int | None:
    environ = {**os.environ, "ROW": json.dumps(it.row), "NOTES": str(folder), "PS_RUNSTORE": f"{folder}/store"}
    environ |= {"PS_WEB_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("ab") as output:
        job = psutil.Popen(
            [sys.executable, "-m", "paramserver.launch", *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=folder,
        )  # fmt: skip
        until = time.monotonic() + TIMEOUT_S
        while job.poll() is None and time.monotonic() < until and _num_accepted(folder) < it.at:
            time.sleep(0.02)
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # the run has ended
            _HAPPENS.get(it.event, lambda *_: None)(job, folder)
        try:
            return job.wait(max(1.0, until - time.monotonic()))
        except psutil.TimeoutExpired:
            for each in [*job.children(recursive=True), job]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            job.wait()
            return None


def _num_accepted(folder: Path) -> int:
    return sum(path.read_bytes().count(b'"op":"accept"') for path in folder.glob("history*.jsonl"))


def _first(job: psutil.Popen, text: str) -> psutil.Process:
    """Return the last process of the job with this text in its command."""
    found = [child for child in job.children(recursive=True) if text in " ".join(child.cmdline())]
    if not found:
        raise psutil.NoSuchProcess(job.pid)
    return found[-1]


def _kill(text: str) -> Callable[[psutil.Popen, Path], None]:
    return lambda job, folder: _first(job, text).send_signal(signal.SIGKILL)


def _stop_worker(job: psutil.Popen, folder: Path) -> None:
    worker = _first(job, "script.py")
    worker.suspend()
    time.sleep(1.0)
    worker.resume()


def _control(job: psutil.Popen, folder: Path, *orders: dict[str, Any]) -> None:
    """Give orders to the server, as its page does. One that it refuses is no mistake: the run may end."""
    found = re.findall(r"http://(127\.0\.0\.1:\d+)/", (folder / "output").read_text(errors="replace"))
    for order in orders if found else ():
        head = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        url = f"http://{found[0]}/api/runs/live/controls"
        request = urllib.request.Request(url, json.dumps(order).encode(), head)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=10).close()
        time.sleep(0.2)


def _pause(job: psutil.Popen, folder: Path) -> None:
    _control(job, folder, {"do": "pause", "rank": 1}, {"do": "set", "name": "lr_scale", "value": 0.5},
             {"do": "resume", "rank": 1})  # fmt: skip


def _set(job: psutil.Popen, folder: Path) -> None:
    changes = [{"do": "set", "name": name, "value": value} for name, value in _CHANGES.items()]
    _control(job, folder, {"do": "snapshot"}, *changes, {"do": "set", "name": "lr_scale", "value": 0.9})


def _evict(job: psutil.Popen, folder: Path) -> None:
    _control(job, folder, {"do": "evict", "rank": 1})


_HAPPENS: dict[str, Callable[[psutil.Popen, Path], None]] = {
    "kill_worker": _kill("script.py"), "kill_server": _kill("paramserver.ps"), "kill_relay": _kill("paramserver.relay"),
    "stop_worker": _stop_worker, "stop_job": lambda job, folder: job.send_signal(signal.SIGTERM),
    "pause": _pause, "set": _set, "evict": _evict,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m paramserver.tests.drills.real_runs")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each run has the next one")
    parser.add_argument("--most", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where runs leave their files; default: a folder that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.at_once) as pool:
        seeds = range(options.seed, options.seed + options.most)
        folder = options.folder or Path(temporary)
        found = pool.map(lambda seed: record(drawn(seed), folder / str(seed)), seeds)
        num_wrong = 0
        for seed, it in zip(seeds, found, strict=True):
            num_wrong += bool(it.problems)
            print(f"{seed} code {it.code} {it.num_lines} lines {it.drawn}", flush=True)
            for problem in it.problems[:5]:
                print("    FALSE ALARM", problem, flush=True)
        print(f"{options.most} runs, {num_wrong} false alarms")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
