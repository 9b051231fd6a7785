"""The work of ps-launch: from settings to plans, to running processes, to tables of results; and `--estimate`."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..common.config.cli import Flags, discard_from_now_on
from ..common.config.conditions import condition
from ..common.config.option import LAUNCHER
from ..common.config.schema import Config
from ..common.config.sources import LAUNCHER_ENV_NAMES, Resolved, load_config, of_mode
from ..common.errors import EXIT_INTERRUPTED, EXIT_OUTPUT_LOST, UsageError
from ..common.registry import BACKENDS, MODES, canonical_mode, mode_label
from ..common.reporting.report import duration, report_console, share, size
from ..common.reporting.summary import Status, Summary, price
from ..common.security import WEB_LOGS_VARIABLE, WEB_TOKEN_VARIABLE
from ..common.user_code import is_in_file
from ..common.wire.json_text import to_json
from .backends.base import Backend, Site
from .hosts.remote import check_plan_exposure, check_remote, hosts_of
from .plan.hosts import place_processes
from .plan.runs import DEFAULT_NUM_WORKERS, Machine, Plan, Request, plan_runs
from .plan.settings import LEAVES, SINGLE, turned_off

if TYPE_CHECKING:
    from .supervise.supervisor import Finish


def resolve(
    config_path: str | None, flags: Flags, sets: list[str], overrides: Mapping[str, tuple[Any, str]] | None = None
) -> tuple[tuple[str, ...], Resolved]:
    """Returns the modes to run, and the settings. The launcher ignores its own RANK and the like."""
    modes = _modes(flags["run.mode"])
    settings = {
        **flags,
        "run.mode": next((name for name in modes if name != SINGLE), None),
        "run.other_modes": [name for name in modes if is_in_file(name) and len(modes) > 1] or None,
    }
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV_NAMES}
    defaults = {"run.workers": (DEFAULT_NUM_WORKERS, f"default of {LAUNCHER}")}
    resolved = load_config(config_path, settings, sets, environ, defaults=defaults, overrides=overrides or {})
    return modes or (resolved.config.run.mode,), resolved


def _modes(text: str | None) -> tuple[str, ...]:
    """Returns the modes of a comma list by their full names, none where the flag was not given."""
    if text is None:
        return ()
    modes: list[str] = []
    for word in text.split(","):
        try:
            modes.append(SINGLE if word.strip().lower() == SINGLE else canonical_mode(word))
        except UsageError as error:
            fix = f"known: {', '.join([*MODES.names(), SINGLE])}" if error.fix.startswith("known:") else error.fix
            raise UsageError(f"flag --mode: {error.message}", fix=fix) from None
        if len({mode_label(mode) for mode in modes}) < len(modes):  # files of the runs are named after it
            raise UsageError(f"flag --mode: {mode_label(modes[-1])} is named twice", fix="each mode runs once")
    return tuple(modes)


def make_plans(resolved: Resolved, request: Request) -> tuple[list[Plan], Site]:
    """Returns plans whose files and backend exist. Raises UsageError, AuthError or OutputError."""
    config, launch, backend = resolved.config, resolved.config.launch, backend_of(resolved.config)
    num_workers = config.run.workers or 1
    site = Site(config=config, hosts=hosts_of(config), folder=os.getcwd())
    check_remote(resolved, backend, site.hosts, num_workers)
    places = place_processes(
        site.hosts, num_workers, config.server.shards, colocate=launch.colocate, folder=site.folder, group=launch.group
    )
    machine = Machine(
        python=sys.executable,
        environ=os.environ,
        exists=(lambda path: True) if backend.spans_hosts else os.path.exists,  # the hosts check their own files
        spans_hosts=backend.spans_hosts,
        places=places,
        hosts=site.hosts,
    )
    plans = plan_runs(resolved, request, machine)
    from ..common.reporting.output import check_writable

    for plan in plans if backend.spans_hosts else ():
        check_plan_exposure(plan)
    files = [path for plan in plans for path in (plan.save, plan.history) if not backend.spans_hosts]
    for path in [*files, config.output.summary]:
        if path is not None:
            check_writable(path)
    return plans, site


def backend_of(config: Config) -> type[Backend]:
    """Returns the configured backend; by default ssh where there are hosts, else local."""
    default = "local" if config.launch.hosts is None else "ssh"
    backend: type[Backend] = BACKENDS.load(config.launch.backend or default)
    return backend


def show(plans: list[Plan], site: Site) -> None:
    """Print the commands of the plans."""
    for plan in plans:
        print(f"# {plan.headline()}")
        for line in backend_of(site.config).dry_run(plan.processes("HOST:PORT"), site):
            print(line)


def start(
    plans: list[Plan], site: Site, is_enough: Callable[[Plan], Callable[[Status], bool]] | None = None
) -> list[Finish]:
    """Run the plans one after another; see `run_all`. Raises ParamServerError."""
    backend = backend_of(site.config)
    if not backend.spans_hosts:
        _check_here(plans, site.config)
    from .job import run_all

    return asyncio.run(run_all(plans, backend, site, is_enough))


def _check_here(plans: list[Plan], config: Config) -> None:
    """Raise ParamServerError where task or script, device, initial weights or addresses cannot be used here."""
    from ..common.config import preflight

    if config.launch.script is not None:
        preflight.check_script(config.launch.script)
    else:
        preflight.check_task(config.task.name, config.task.args)
        preflight.check_optimizer(config.optimizer.name)
        if config.task.init is not None:
            preflight.check_weights(config.task.init)
    preflight.check_device(config.worker.device)
    preflight.check_resume(config.checkpoint)
    listen = next((plan.listen for plan in plans if plan.server is not None), None)
    if listen is None:  # one worker alone
        return
    server, host = config.server, listen.rpartition(":")[0]
    key = "flag --port" if config.launch.port is not None else "server.listen"
    wanted = [(key, listen), ("server.web", server.web), ("server.metrics", server.metrics)]
    if server.direct and server.direct_port:
        wanted.append(("server.direct_port", f"{host}:{server.direct_port}"))
    wanted += [("launch.serve", address) for address in {plan.serves_at for plan in plans} if address]
    for key, address in wanted:
        if address is not None:
            preflight.check_listening(address, key)


def run(plans: list[Plan], site: Site) -> int:
    """Run the plans, show and write their results, and return the exit code."""
    if (report := site.config.output.report) is not None:
        from ..web.stored import prepare_report

        prepare_report(report)
    with tempfile.TemporaryDirectory(prefix="ps-logs-") as logs:
        os.environ.pop(WEB_LOGS_VARIABLE, None)
        config = site.config
        if config.launch.web or config.server.web is not None or config.launch.serve is not None:
            # a process that is started again keeps the token
            os.environ.setdefault(WEB_TOKEN_VARIABLE, secrets.token_urlsafe(16))
            os.environ[WEB_LOGS_VARIABLE] = logs
        ends = start(plans, site)
    code = ends[-1].exit_code
    try:
        _show_results(plans, ends)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_from_now_on(1)
        code = code or EXIT_OUTPUT_LOST
    return code


def _show_results(plans: list[Plan], ends: list[Finish]) -> None:
    """Print the table of one run, or the comparison of several, with one file for all summaries, {"runs": [...]}."""
    from ..common.reporting.comparison import findings
    from ..common.reporting.report import comparison_table, print_results, summary_table

    output = plans[0].config.output
    target = condition(output.target) if output.target is not None else None
    ended = [(plan, end.summary) for plan, end in zip(plans, ends, strict=False) if end.summary]
    named = [(mode_label(summary.mode), summary) for _, summary in ended]
    if len(plans) > 1:
        _write(output.summary, {"runs": [summary.model_dump() for _, summary in ended]})
    elif ended:
        _write(plans[0].summary, ended[0][1].model_dump())
    try:
        if output.report is not None and ended:  # files first: printing may lose its terminal
            from ..web.stored import write_report

            differences = differences_of([plan for plan, _ in ended])
            write_report(output.report, plans[0].work, named, differences=differences, target=target)
    finally:
        if len(plans) == 1 and ended:
            print_results(summary_table(ended[0][1]))
        elif ended:
            print_results(comparison_table([(_name(plan), summary) for plan, summary in ended], target))
            print_results(*findings(named, target), style="dim")
    if output.report is not None and ended:
        print_results(f"the report is {output.report}/report.html", style="dim")


def differences_of(plans: list[Plan]) -> dict[str, list[object]]:
    """Returns the settings in which runs of one command differ, by key; `-` where a mode has no such option."""
    settings: list[dict[str, object]] = []
    for plan in plans:
        run, is_alone = plan.config.run, plan.mode == SINGLE
        batch = run.batch_size * (run.workers or 1) if is_alone else run.batch_size  # `single`: the union batch
        seed = {} if plan.seed is None else {"run.seed": plan.seed}
        options = {} if is_alone else plan.config.policy.options(plan.mode).model_dump(mode="json", exclude_none=True)
        settings.append({
            "run.mode": plan.mode, "run.workers": plan.num_workers, "run.batch_size": batch, **seed,
            **{f"policy.{name}": value for name, value in options.items()},
        })  # fmt: skip
    keys = dict.fromkeys(key for item in settings for key in item)
    values = {key: [item.get(key, "-") for item in settings] for key in keys}
    return {key: found for key, found in values.items() if len(set(map(str, found))) > 1}


def _name(plan: Plan) -> str:
    return mode_label(plan.mode) + (f", seed {plan.seed}" if plan.seed is not None else "")


def _write(path: str | None, summary: dict[str, Any]) -> None:
    """Write a summary of the launcher. Raises OutputError."""
    if path is not None:
        from ..common.reporting.output import write_result

        write_result(path, (to_json(summary, indent=2) + "\n").encode())


# ---- estimate ------------------------------------------------------------------------------------
# `ps-launch --estimate`: estimates the time and cost of a run from a few of its steps.
#
# The steps are real, with the same processes on the same machines: one short run of each mode, which ends when its
# pace is steady, or after 20 s. The time of a step counts from the moment at which all workers have taken their
# first. The estimate of traffic leaves out bytes that travel once. Nothing of the short runs is saved.


_STEPS = 60  # or six rounds, where a contribution has several steps
_ROUNDS = 6
_TOLERANCE, _MAX_S = 0.05, 20.0
_COLUMNS = ("mode", "time per step", "whole run", "time spent waiting", "traffic", "cost", "cost of waiting")
_QUIET = (
    *LEAVES, "output.report", "output.traces", "run.eval_every", "run.stop_when", "run.patience", "launch.serve",
)  # fmt: skip


def estimate(config: str | None, flags: Flags, sets: list[str], script_args: tuple[str, ...]) -> int:
    """Print the estimate; returns the exit code. Raises UsageError for a run of unknown length."""
    modes, resolved = resolve(config, flags, sets)
    steps = resolved.config.run.task_steps
    if steps is None or resolved.config.launch.script is not None:
        raise UsageError("the number of steps of a script, or of a number of epochs, is unknown", fix="--steps N")
    plans, num_steps = [], {}
    for mode in modes:
        num_steps[mode] = min(max(_STEPS, _ROUNDS * _local_steps(resolved.config, mode)), steps)
        of_this, its_sets = of_mode(mode, flags, sets) if mode != SINGLE else (flags, sets)
        short = short_settings(resolved, mode, num_steps[mode])
        only, of_mode_alone = resolve(config, {**of_this, "run.mode": mode}, its_sets, short)
        (its_plan, *_), site = make_plans(
            of_mode_alone, Request(modes=only, config_path=config, script_args=script_args)
        )
        plans.append(its_plan)
    ends = start(plans, site, lambda plan: Enough(2 * _local_steps(plan.config, plan.mode)))
    summaries = [
        (plan, end.summary, taken) for plan, end in zip(plans, ends, strict=False)
        if end.summary is not None and (taken := steps_taken(end.summary, num_steps[plan.mode]))
    ]  # fmt: skip
    if summaries:
        _show_estimate(summaries, steps, resolved.config.cost.currency)
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
    is_of_server = ("checkpoint.", "launch.", "server.") if mode == SINGLE else ()
    quiet = [key for key in _QUIET if resolved.was_set(key) and not key.startswith(is_of_server)]
    found = {**turned_off(resolved.config, quiet), "output.store": False, "run.steps": steps}
    return {key: (value, "flag --estimate") for key, value in found.items()}


def _local_steps(config: Config, mode: str) -> int:
    return getattr(config.policy.options(mode), "local_steps", 1) if mode != SINGLE else 1


def steps_taken(summary: Summary, wanted: int) -> int:
    """Returns the training steps that each worker has taken; `wanted` is the most."""
    workers = summary.workers
    return min(wanted, sum(worker.training_steps for worker in workers) // len(workers)) if workers else wanted


def _show_estimate(summaries: list[tuple[Plan, Summary, int]], steps: int, currency: str) -> None:
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
