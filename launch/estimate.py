"""`ps-launch --estimate`: estimates the time and cost of a run from a few of its steps.

The steps are real, with the same processes on the same machines: one short run of each mode, which ends when its pace
is steady, or after 20 s. The time of a step counts from the moment at which all workers have taken their first. The
estimate of traffic leaves out bytes that travel once. Nothing of the short runs is saved.
"""

from __future__ import annotations

import signal
import sys
from itertools import pairwise
from typing import Any

from rich.table import Table

from ..common.config.cli import Flags
from ..common.config.option import LAUNCHER
from ..common.config.schema import Config
from ..common.config.sources import Resolved, of_mode
from ..common.errors import EXIT_INTERRUPTED, UsageError
from ..common.registry import mode_label
from ..common.reporting.report import duration, report_console, share, size
from ..common.reporting.status import Status
from ..common.reporting.summary import Summary, price
from . import run
from .plan.runs import Plan, Request
from .plan.settings import LEAVES, turned_off

_STEPS = 60  # or six rounds, where a contribution has several steps
_ROUNDS = 6
_TOLERANCE, _MAX_S = 0.05, 20.0
_COLUMNS = ("mode", "time per step", "whole run", "time spent waiting", "traffic", "cost", "cost of waiting")
_QUIET = (
    *LEAVES, "output.report", "output.traces", "run.eval_every", "run.stop_when", "run.patience", "launch.serve",
)  # fmt: skip


def estimate(config: str | None, flags: Flags, sets: list[str], script_args: tuple[str, ...]) -> int:
    """Print the estimate; returns the exit code. Raises UsageError for a run of unknown length."""
    modes, resolved = run.resolve(config, flags, sets)
    steps = resolved.config.run.task_steps
    if steps is None or resolved.config.launch.script is not None:
        raise UsageError("the number of steps of a script, or of a number of epochs, is unknown", fix="--steps N")
    plans, num_steps = [], {}
    for mode in modes:
        num_steps[mode] = min(max(_STEPS, _ROUNDS * _local_steps(resolved.config, mode)), steps)
        of_this, its_sets = of_mode(mode, flags, sets) if mode != run.SINGLE else (flags, sets)
        short = short_settings(resolved, mode, num_steps[mode])
        only, of_mode_alone = run.resolve(config, {**of_this, "run.mode": mode}, its_sets, short)
        (plan, *_), site = run.plan(of_mode_alone, Request(modes=only, config_path=config, script_args=script_args))
        plans.append(plan)
    ends = run.start(plans, site, lambda plan: Enough(2 * _local_steps(plan.config, plan.mode)))
    summaries = [
        (plan, end.summary, taken) for plan, end in zip(plans, ends, strict=False)
        if end.summary is not None and (taken := steps_taken(end.summary, num_steps[plan.mode]))
    ]  # fmt: skip
    if summaries:
        _show(summaries, steps, resolved.config.cost.currency)
    code = ends[-1].exit_code
    if code in (EXIT_INTERRUPTED, 128 + signal.SIGTERM):
        print(f"{LAUNCHER}: ended: {len(summaries)} of {len(modes)} modes were estimated", file=sys.stderr)
    return code


class Enough:
    """Decides when a short run may end: its pace is the same in three statuses in a row, or its time is over.

    It takes `least` steps in any case.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._progress: list[tuple[float, int]] = []

    def __call__(self, status: Status) -> bool:
        if status.step < self._least:
            return False
        self._progress.append((status.elapsed_s, status.step))
        paces = [
            (step - before) / (now - then)
            for (then, before), (now, step) in pairwise(self._progress[-4:])
            if now > then
        ]  # fmt: skip
        is_steady = len(paces) == 3 and max(paces) - min(paces) <= _TOLERANCE * sorted(paces)[1]
        return is_steady or status.elapsed_s >= _MAX_S


def short_settings(resolved: Resolved, mode: str, steps: int) -> dict[str, tuple[Any, str]]:
    """Returns the settings of a short run, which are stronger than all others, and their origin."""
    is_of_server = ("checkpoint.", "launch.", "server.") if mode == run.SINGLE else ()
    quiet = [key for key in _QUIET if resolved.was_set(key) and not key.startswith(is_of_server)]
    found = {**turned_off(resolved.config, quiet), "output.store": False, "run.steps": steps}
    return {key: (value, "flag --estimate") for key, value in found.items()}


def _local_steps(config: Config, mode: str) -> int:
    return getattr(config.policy.options(mode), "local_steps", 1) if mode != run.SINGLE else 1


def steps_taken(summary: Summary, wanted: int) -> int:
    """Returns the training steps that each worker has taken; `wanted` is the most."""
    workers = summary.workers
    return min(wanted, sum(worker.training_steps for worker in workers) // len(workers)) if workers else wanted


def _show(summaries: list[tuple[Plan, Summary, int]], steps: int, currency: str) -> None:
    console = report_console()
    table, whole_s = Table(*_COLUMNS, box=None, pad_edge=False), {}
    for plan, summary, taken in summaries:
        step_s = summary.step_s or summary.wall_s / taken
        whole_s[mode_label(plan.mode)] = step_s * steps
        num_bytes = summary.num_bytes if taken == steps else (summary.num_bytes - bytes_once(summary)) / taken * steps
        costs = ["-", "-"]
        if plan.rate is not None:
            cost = step_s * steps / 3600 * plan.rate
            costs = [f"{price(part * cost)} {currency}" for part in (1.0, summary.wait_share)]
        times = f"{1000 * step_s:,.1f} ms", duration(step_s * steps), share(summary.wait_share)
        table.add_row(mode_label(plan.mode), *times, size(int(num_bytes)), *costs)
    counts = ", ".join(f"{taken:,} ({mode_label(plan.mode)})" for plan, _, taken in summaries)
    console.print(f"{steps:,} steps of each worker, estimated from these: {counts}")
    console.print(table)
    if any(plan.rate is None for plan, _, _ in summaries):
        console.print("cost.per_hour says what an hour of a machine costs (--set cost.per_hour=0.40)", style="dim")
    console.print(sentence(whole_s, steps), highlight=False)


def sentence(whole_s: dict[str, float], steps: int) -> str:
    """Returns the conclusion. `whole_s`: seconds of the whole run, by mode."""
    (first, first_s), *others = sorted(whole_s.items(), key=lambda item: item[1])
    message = f"{steps:,} steps take about {duration(first_s)} in {first}, plus the time to start"
    slower = ", ".join(f"{mode} takes {seconds / first_s:.1f} times as long" for mode, seconds in others if first_s)
    return f"{message}; {slower}." if slower else f"{message}."


def bytes_once(summary: Summary) -> float:
    """Returns the bytes of the initial weights: up from one worker, and down to each."""
    workers = summary.workers
    sent = [worker.bytes_sent for worker in workers]
    if len(workers) > 1 and len({worker.contributions for worker in workers}) == 1 and max(sent) < 2 * min(sent):
        return float((len(workers) + 1) * (max(sent) - min(sent)))
    num_down = summary.version * len(workers) if len(workers) > 1 else summary.version
    return summary.num_bytes * (len(workers) + 1) / max(1, 2 * num_down + len(workers) + 1)
