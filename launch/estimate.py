"""`ps-launch --estimate`: what a run would take and cost, from a few steps of it.

Steps are real ones, of the same processes on the same machines, twice: so many, and three times as many. A step takes
what the slowest takes once all have taken their first; bytes are the difference, which is without what travels once.
Nothing of it is kept, and nothing is evaluated.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ..common.config.cli import Flags
from ..common.config.sources import of_mode
from ..common.errors import UsageError
from ..common.reporting.report import duration, report_console, share, size
from ..common.reporting.summary import Summary, price
from . import run
from .plan.runs import Plan, Request

_STEPS = 20  # or two rounds, where a contribution has several
_MORE = 3  # times as many, the second time


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
    table = Table("mode", "a step", "all steps", "waiting", "traffic", "cost", "for waiting", box=None, pad_edge=False)
    rates: list[float | None] = []
    for mode in modes:
        local_steps = getattr(wanted.config.policy.options(mode), "local_steps", 1) if mode != run.SINGLE else 1
        few = min(max(_STEPS, 2 * local_steps), max(1, steps // _MORE))
        its, its_sets = of_mode(mode, quiet, sets) if mode != run.SINGLE else (quiet, sets)
        found = [
            _ran({**its, "run.mode": mode, "run.steps": number}, config, its_sets, script_args)
            for number in (few, few * _MORE)
        ]
        if len(ran := [summary for _, _, summary in found if summary is not None]) < len(found):
            return found[-1][0] or 1
        rates.append(found[-1][1])
        table.add_row(mode, *_cells((rates[-1], wanted.config.cost.currency), ran[0], ran[1], few, steps))
    console = report_console()
    console.print(f"{steps:,} steps of each worker, by {few} and {few * _MORE} that were taken just now")
    console.print(table)
    if None in rates:
        console.print("cost.per_hour says what an hour of a machine costs (--set cost.per_hour=0.40)", style="dim")
    return 0


def _ran(
    flags: dict[str, Any], config: str | None, sets: list[str], script_args: tuple[str, ...]
) -> tuple[int, float | None, Summary | None]:
    """The exit code, what an hour costs, and what it came to."""
    modes, resolved = run.resolve(config, flags, sets)
    plans, site = run.plan(resolved, Request(modes=modes, config_path=config, script_args=script_args))
    plan: Plan = plans[0]
    (outcome,) = run.start([plan], site)
    return outcome.finish.exit_code, plan.rate, outcome.summary


def _cells(price_of: tuple[float | None, str], short: Summary, long: Summary, few: int, steps: int) -> list[str]:
    """What the two come to over all steps. `price_of` an hour: how much, in what."""
    step_s = long.step_s or long.wall_s / (few * _MORE)
    num_bytes = (long.num_bytes - short.num_bytes) / (few * (_MORE - 1)) * steps
    all_s, (rate, currency) = step_s * steps, price_of
    costs = [all_s / 3600 * rate * part for part in (1.0, long.wait_share)] if rate is not None else []
    told = [f"{price(cost)} {currency}" for cost in costs] or ["-", "-"]
    return [f"{1000 * step_s:,.1f} ms", duration(all_s), share(long.wait_share), size(int(num_bytes)), *told]
