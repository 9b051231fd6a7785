"""Runs a row with real processes, and judges what it did."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from .options import DEFAULTS, OPTIONS, Row, command, is_promised
from .reference import Key, Steps, is_exact, train
from .script import BATCH, EPOCHS, SAMPLES, accumulate_of

SCRIPT = Path(__file__).with_name("script.py")
TIMEOUT_S = 150.0
_SLACK = 2e-5
_LAUNCH = (sys.executable, "-m", "paramserver.launch")


@dataclass
class Judgement:
    row: Row
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""

    @property
    def is_well(self) -> bool:
        return not self.problems


def notes_of(folder: Path) -> list[dict[str, Any]]:
    """Return what the processes noted, in order. A kill may cut the last line of a process."""
    found = []
    for path in folder.glob("notes-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return sorted(found, key=lambda note: float(note["at"]))


def steps_of(notes: list[dict[str, Any]]) -> Steps:
    """Return the batches of each process and training step. The newest attempt at a step is the one that counts."""
    found: dict[Key, dict[int, list[list[int]]]] = {}
    for note in notes:
        if note["op"] == "step":
            region, rank, process = note["key"]
            found.setdefault((region, rank, process), {})[note["step"]] = note["ids"]
    return found


def run(row: Row, folder: Path) -> Judgement:
    """Run a row in a new folder, and judge it."""
    row = {**DEFAULTS, **row}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    judgement = Judgement(row)
    begun = time.monotonic()
    environ = {**os.environ, "ROW": json.dumps(row), "NOTES": str(folder), "PS_RUNSTORE": f"{folder}/store"}
    with (folder / "output").open("wb") as output:
        process = psutil.Popen(
            [*_LAUNCH, *command(row, SCRIPT, folder)], stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=folder
        )
        hit = _break(row, process, folder, begun) if row["fault"] != "none" else True
        try:
            code = process.wait(max(1.0, TIMEOUT_S - (time.monotonic() - begun)))
        except psutil.TimeoutExpired:
            code = None
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    judgement.seconds = time.monotonic() - begun
    judgement.output = (folder / "output").read_text(errors="replace")
    if code is None:
        judgement.problems.append(f"no end after {TIMEOUT_S:.0f} s")
    elif code != 0:
        judgement.problems.append(f"exit code {code}")
    if "Traceback (most recent call last)" in judgement.output:
        judgement.problems.append("a traceback")
    if not hit:
        judgement.problems.append("the run ended before its fault")
    if judgement.is_well:
        _judge(row, folder, judgement.problems)
    return judgement


def _break(row: Row, process: psutil.Popen, folder: Path, begun: float) -> bool:
    """Wait for the second step of the highest rank, then kill or stop a process. Return whether one was hit."""
    while process.poll() is None and time.monotonic() - begun < TIMEOUT_S:
        notes = notes_of(folder)
        rank = max((note["key"][1] for note in notes), default=0)
        late = [note for note in notes if note["op"] == "step" and note["key"][1] == rank and note["step"] >= 2]
        if not late:
            time.sleep(0.02)
            continue
        victims = [psutil.Process(late[-1]["pid"])]
        if row["fault"] == "kill_server":
            children = process.children(recursive=True)
            victims = [child for child in children if "paramserver.ps" in " ".join(child.cmdline())][:1]
        for victim in victims:
            if row["fault"] == "stop_worker":
                victim.suspend()
                time.sleep(2.0)
                victim.resume()
            else:
                victim.send_signal(signal.SIGKILL)
        return bool(victims)
    return False


def _judge(row: Row, folder: Path, problems: list[str]) -> None:
    """Add what is wrong: batches, counts, history, weights."""
    steps = steps_of(notes_of(folder))
    summary = json.loads((folder / "summary.json").read_text())
    _judge_batches(row, steps, problems)
    samples = sum(len(batch) for mine in steps.values() for batches in mine.values() for batch in batches)
    if summary["samples"] != samples:
        problems.append(f"the script noted {samples} samples, the summary has {summary['samples']}")
    histories = sorted(str(path) for path in folder.glob("history*.jsonl"))
    proof = subprocess.run([*_LAUNCH, "check", *histories], capture_output=True, text=True, check=False)
    if proof.returncode:
        problems.append(f"ps-launch check: {' '.join((proof.stdout + proof.stderr).split())[-300:]}")
    saved = load_file(folder / "saved.safetensors")
    finals = [torch.load(path) for path in folder.glob("final-*.pt")]
    expected = int(row["workers"]) * (2 if row["feature"] in ("group", "pipeline") else 1)
    if len({tuple(final["key"]) for final in finals}) != expected:
        problems.append(f"{len(finals)} processes came to their end, not {expected}")
    for final in finals:
        for name, tensor in final["model"].items():
            if (tensor.numel() or row["feature"] != "pipeline") and not torch.equal(tensor, saved[name]):
                problems.append(f"{name} of process {final['key']} is not what was saved")
                break
    if is_exact(row):
        for name, tensor in train(row, steps).items():
            distance = (tensor.detach() - saved[name]).abs().max().item()
            if not distance <= (_SLACK if tensor.dtype is torch.float32 else 1e-9):
                problems.append(f"{name} is {distance:.1e} from a plain run on the same batches")
                break


def _judge_batches(row: Row, steps: Steps, problems: list[str]) -> None:
    """Each sample is used once in each pass, and each process takes as many steps as its batches make."""
    num_shares = len(steps)
    accumulate = accumulate_of(row)
    per_pass = SAMPLES // num_shares if num_shares else 0
    for key, mine in steps.items():
        if sorted(mine) != list(range(len(mine))):
            problems.append(f"process {key} lacks steps: it has {sorted(mine)}")
    if row["loop"] == "steps":
        return
    per_batch = BATCH // 2 if row["feature"] == "group" else BATCH  # the processes of a worker share its batches
    wanted = EPOCHS * math.ceil(math.ceil(per_pass / per_batch) / accumulate)
    for key, mine in steps.items():
        if len(mine) != wanted:
            problems.append(f"process {key} took {len(mine)} steps, not {wanted}")
    used = sorted(i for mine in steps.values() for batches in mine.values() for batch in batches for i in batch)
    if used != sorted([*range(SAMPLES)] * EPOCHS):
        missing = sorted({*range(SAMPLES)} - set(used))
        problems.append(f"{len(used)} of {SAMPLES * EPOCHS} samples were used; never: {missing[:9]}")


def reduced(row: Row, folder: Path) -> Row:
    """Return the fewest options of a row that still fails: each that can be its default is."""
    smallest = dict(row)
    for name in reversed(list(OPTIONS)):
        if smallest[name] == DEFAULTS[name]:
            continue
        smaller = {**smallest, name: DEFAULTS[name]}
        if is_promised(smaller) and not run(smaller, folder).is_well:
            smallest = smaller
    return smallest
