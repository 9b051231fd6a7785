"""`ps-launch --estimate`: what a run would take and cost, from a few steps of it.

Steps are real ones, of the same processes on the same machines: one short run of each mode, which ends when its pace
is steady, or after 20 s. A step takes what the
slowest takes once all have taken their first; of the bytes those that travel once are left out. A run that is as short
itself is taken whole. Nothing of it is kept, and nothing is evaluated but the end.
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
from ..common.config.sources import of_mode
from ..common.errors import EXIT_INTERRUPTED, UsageError
from ..common.registry import mode_label
from ..common.reporting.report import duration, report_console, share, size
from ..common.reporting.status import Status
from ..common.reporting.summary import Summary, price
from . import run
from .backends.base import Site
from .plan.runs import Plan, Request

_STEPS = 60  # or six rounds, where a contribution has several
_ROUNDS = 6
_WITHIN, _MOST_S = 0.05, 20.0
_COLUMNS = ("mode", "time per step", "whole run", "time spent waiting", "traffic", "cost", "cost of waiting")


def estimated(config: str | None, flags: Flags, sets: list[str], script_args: tuple[str, ...]) -> int:
    """Print it; the exit code. UsageError for a run whose length is not known."""
    modes, wanted = run.resolve(config, flags, sets)
    steps = wanted.config.run.task_steps
    if steps is None or wanted.config.launch.script is not None:
        raise UsageError("a script, or a number of epochs, does not say how many steps it has", fix="--steps N")
    quiet: dict[str, Any] = {
        **flags, "output.save": None, "output.curve": None, "output.summary": None, "output.history": None,
        "output.report": None, "checkpoint.dir": None, "run.eval_every": None, "output.store": False,
    }  # fmt: skip
    plans, few = [], {}
    for mode in modes:
        few[mode] = min(max(_STEPS, _ROUNDS * _local_steps(wanted.config, mode)), steps)
        its, its_sets = of_mode(mode, quiet, sets) if mode != run.SINGLE else (quiet, sets)
        plan, site = _planned({**its, "run.mode": mode, "run.steps": few[mode]}, config, its_sets, script_args)
        plans.append(plan)
    outcomes = run.start(plans, site, lambda plan: Enough(2 * _local_steps(plan.config, plan.mode)))
    code = outcomes[-1].finish.exit_code
    taken = [(plan, outcome.summary) for plan, outcome in zip(plans, outcomes, strict=False)
             if outcome.summary is not None and _taken(outcome.summary, few[plan.mode])]  # fmt: skip
    if taken:
        _show(taken, few, steps, wanted.config.cost.currency)
    if code in (EXIT_INTERRUPTED, 128 + signal.SIGTERM):
        print(f"{LAUNCHER}: ended: {len(taken)} of {len(modes)} modes were estimated", file=sys.stderr)
    return code


class Enough:
    """Whether a short run has shown what a step takes: its pace is the same in three statuses in a row, or its time is
    over; after `least` steps at any rate."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._at: list[tuple[float, int]] = []

    def __call__(self, status: Status) -> bool:
        if status.step < self._least:
            return False
        self._at.append((status.elapsed_s, status.step))
        paces = [
            (step - before) / (now - then) for (then, before), (now, step) in pairwise(self._at[-4:]) if now > then
        ]
        agree = len(paces) == 3 and max(paces) - min(paces) <= _WITHIN * sorted(paces)[1]
        return agree or status.elapsed_s >= _MOST_S


def _local_steps(config: Config, mode: str) -> int:
    return getattr(config.policy.options(mode), "local_steps", 1) if mode != run.SINGLE else 1


def _taken(summary: Summary, few: int) -> int:
    """Training steps of each worker; `few` were wanted."""
    if not summary.workers:
        return few
    return min(few, sum(worker.training_steps for worker in summary.workers) // len(summary.workers))


def _planned(
    flags: dict[str, Any], config: str | None, sets: list[str], script_args: tuple[str, ...]
) -> tuple[Plan, Site]:
    """The short run of one mode."""
    modes, resolved = run.resolve(config, flags, sets)
    plans, site = run.plan(resolved, Request(modes=modes, config_path=config, script_args=script_args))
    return plans[0], site


def _show(taken: list[tuple[Plan, Summary]], few: dict[str, int], steps: int, currency: str) -> None:
    console = report_console()
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for plan, summary in taken:
        table.add_row(mode_label(plan.mode), *_cells(summary, plan.rate, currency, few[plan.mode], steps))
    by = ", ".join(f"{_taken(item, few[plan.mode]):,} ({mode_label(plan.mode)})" for plan, item in taken)
    console.print(f"{steps:,} steps of each worker, by those that were taken just now: {by}")
    console.print(table)
    if any(plan.rate is None for plan, _ in taken):
        console.print("cost.per_hour says what an hour of a machine costs (--set cost.per_hour=0.40)", style="dim")
    whole_s = {mode_label(plan.mode): _step_s(item, _taken(item, few[plan.mode])) * steps for plan, item in taken}
    console.print(_sentence(whole_s, steps), highlight=False)


def _sentence(whole_s: dict[str, float], steps: int) -> str:
    """What follows, for people. `whole_s`: seconds of the whole run, by mode."""
    (first, first_s), *others = sorted(whole_s.items(), key=lambda value: value[1])
    message = f"{steps:,} steps take about {duration(first_s)} in {first}, plus the time to start"
    if not others or not first_s:
        return f"{message}."
    slower = ", ".join(f"{mode} takes {seconds / first_s:.1f} times as long" for mode, seconds in others)
    return f"{message}; {slower}."


def _step_s(summary: Summary, few: int) -> float:
    return summary.step_s or summary.wall_s / few


def _cells(summary: Summary, rate: float | None, currency: str, few: int, steps: int) -> list[str]:
    """What the short run comes to over all steps. `rate`: what an hour costs."""
    few = _taken(summary, few)
    step_s = _step_s(summary, few)
    num_bytes = summary.num_bytes if few == steps else (summary.num_bytes - _once(summary)) / few * steps
    all_s = step_s * steps
    costs = [all_s / 3600 * rate * part for part in (1.0, summary.wait_share)] if rate is not None else []
    told = [f"{price(cost)} {currency}" for cost in costs] or ["-", "-"]
    return [f"{1000 * step_s:,.1f} ms", duration(all_s), share(summary.wait_share), size(int(num_bytes)), *told]


def _once(summary: Summary) -> float:
    """Bytes that do not come with steps: the initial weights go up from one worker and down to each."""
    workers = summary.workers
    sent = [worker.bytes_sent for worker in workers]
    if len(workers) > 1 and len({worker.contributions for worker in workers}) == 1 and max(sent) < 2 * min(sent):
        return float((len(workers) + 1) * (max(sent) - min(sent)))
    num_down = summary.version * len(workers) if len(workers) > 1 else summary.version
    return summary.num_bytes * (len(workers) + 1) / max(1, 2 * num_down + len(workers) + 1)
