"""Measures whether a pipeline speeds up a task's model: its layers, the link, the cut, and the time of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ...common.config.sources import load_config
from ...common.errors import UsageError
from ...common.wire.json_text import read_json
from .measure import task_of

_GROUP = "paramserver.worker.replica_group"


def examine_pipeline(path: str | None, sets: list[str], as_json: bool) -> int:
    """Measure with as many processes as a worker has (launch.group), print, and return the exit code.

    Raises UsageError.
    """
    config = load_config(path, {}, sets, {}, is_worker=False).config
    if config.launch.group < 2:
        message = "flag --pipeline: launch.group is 1, but a pipeline needs several processes in a worker"
        raise UsageError(message, fix="--set launch.group=2")
    plan = {"task": task_of(config), "worker": config.worker.model_dump(mode="json")}
    script = str(Path(__file__).with_name("stages.py"))
    command = [sys.executable, "-m", _GROUP, str(config.launch.group), script, json.dumps(plan)]
    threads = config.worker.threads or max(1, (os.cpu_count() or 1) // config.launch.group)
    environ = {"OMP_NUM_THREADS": str(threads), **os.environ}  # as the launcher divides the cores
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environ)
    lines = [line.removeprefix("STAGES ") for line in done.stdout.splitlines() if line.startswith("STAGES ")]
    if done.returncode or not lines:
        return done.returncode or 1
    found = read_json(lines[0])
    print(lines[0] if as_json else "\n".join(sentences(found)))
    return 0


def sentences(found: dict[str, Any]) -> list[str]:
    """Returns the results of the measurement as sentences."""
    times = " + ".join(f"{1000 * item:.1f}" for item in found["stage_s"])
    mb, counts = found["border_bytes"] / 1e6, " + ".join(map(str, found["counts"]))
    schedule = f"With {found['microbatches']} microbatches and {found['schedule']}"
    # M + S - 1 turns of the slowest stage. A turn takes at least as long as one message in each direction.
    turn_s = max(max(found["stage_s"]), 2 * found["link_s"])
    expected = (found["microbatches"] + (len(found["stage_s"]) - 1) * (found["bubble"] > 0)) * turn_s
    alone, measured = found["alone_s"], found["measured_s"]
    lines = [
        f"The layers are cut into {counts}; a microbatch takes {times} ms in the stages.",
        f"Between two stages a microbatch sends {mb:.2f} MB in each direction, in {1000 * found['link_s']:.1f} ms.",
        f"{schedule} a process waits {found['bubble']:.0%} of a step (the bubble); more microbatches make it smaller.",
        f"A step should take {1000 * expected:.0f} ms; measured here: {1000 * measured:.0f} ms, and "
        f"{1000 * alone:.0f} ms in one process.",
    ]
    if min(expected, measured) > alone:
        lines.append("A pipeline is slower than one process here: use it only if the model is too large for one.")
    return lines
