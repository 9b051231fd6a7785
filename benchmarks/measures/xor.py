"""Worker-steps per second of the xor task: whole runs of the real programs, beside the same task in baselines.

Ours is `ps-launch -n 4 --task xor --mode async --batch-size 32`; the rate is the contributions of all
workers through the time from the first weights to the last contribution, both of the run's summary.
Baselines train the same model on the same batches with the same optimizer. Runs take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ...common.errors import ParamServerError
from ..baselines.run import chosen_running
from ..output.report import Report, median
from ..output.tables import number_table, page
from ..rig.server_process import clean_environment
from ..rig.turns import Contestant, Measured, Samples, measure

_RUN_S = 600.0
_NUM_SAMPLES = 50_000
_SEED = 0


@dataclass(frozen=True)
class XorOptions:
    workers: int
    steps: int
    runs: int
    batch_size: int
    mode: str
    optimizer: str
    lr: float = 0.05

    def task(self) -> Any:
        """The task of one worker."""
        from ...worker.tasks.xor import Xor

        return Xor(num_samples=_NUM_SAMPLES, seed=_SEED)


def measure_xor(options: XorOptions, baseline_names: Sequence[str] = ()) -> Report:
    """Measure ours and installed baselines."""
    with chosen_running(baseline_names, "xor") as (baselines, lines):
        contestants: dict[str, Callable[[], Contestant]] = {"paramserver": partial(_launched, options)}
        contestants |= {baseline.name: partial(baseline.xor, options) for baseline in baselines}
        found = measure(contestants, num_turns=options.runs, warmup=0)
    rates = {name: _rates(samples) for name, samples in found.items()}
    ours = rates.pop("paramserver")
    results = {
        "ours": ours,
        "baselines": rates,
        "ratios": {name: ours["steps_per_s"] / rate["steps_per_s"] for name, rate in rates.items()},
    }
    config = {**vars(options), "num_samples": _NUM_SAMPLES, "baselines": list(rates)}
    return Report("xor", config, results, _table(options, results, lines))


@contextmanager
def _launched(options: XorOptions) -> Iterator[Measured]:
    """Each count is a whole run; part step is seconds per step of all workers together."""

    def measured(count: int) -> Samples:
        return {"step": [_run(options) for _ in range(count)]}

    yield measured


def _run(options: XorOptions) -> float:
    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        path = Path(folder) / "summary.json"
        command = [
            sys.executable, "-m", "paramserver.launch", "-n", str(options.workers), "--task", "xor",
            "--mode", options.mode, "--batch-size", str(options.batch_size), "--steps", str(options.steps),
            "--optimizer", options.optimizer, "--lr", str(options.lr), "--seed", str(_SEED),
            "--set", f"task.args.num_samples={_NUM_SAMPLES}", "--summary", str(path),
        ]  # fmt: skip
        done = subprocess.run(
            command, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RUN_S
        )
        if done.returncode != 0:
            raise ParamServerError(f"ps-launch ended with {done.returncode}\n{done.stderr[-2000:]}")
        summary = json.loads(path.read_text(encoding="utf-8"))
    return float(summary["wall_s"]) / sum(worker["training_steps"] for worker in summary["workers"])


def _rates(samples: Samples) -> dict[str, float]:
    return {"steps_per_s": 1 / median(samples["step"]), "best_steps_per_s": 1 / min(samples["step"])}


def _table(options: XorOptions, results: dict[str, Any], lines: list[str]) -> RenderableType:
    rows = [
        [name, f"{item['steps_per_s']:,.0f}", f"{item['best_steps_per_s']:,.0f}", f"{ratio:.2f}" if ratio else ""]
        for name, item, ratio in [
            ("paramserver", results["ours"], 0.0),
            *((name, baseline, results["ratios"][name]) for name, baseline in results["baselines"].items()),
        ]
    ]
    title = (
        f"xor, {options.workers} workers, {options.mode}, {options.optimizer}, batches of {options.batch_size}; "
        f"{options.runs} runs of {options.steps} steps"
    )
    return page(title, number_table(["worker-steps/s", "median", "best", "ours / this"], rows, bold=[0]), notes=lines)
