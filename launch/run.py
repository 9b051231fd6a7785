"""What ps-launch does: from the settings to plans to running processes to tables of results."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.config.cli import Flags
from ..common.config.conditions import condition
from ..common.config.option import LAUNCHER
from ..common.config.schema import Config
from ..common.config.sources import LAUNCHER_ENV_NAMES, Resolved, load_config
from ..common.errors import OutputError, UsageError
from ..common.registry import (
    BACKENDS,
    MODES,
    canonical_mode,
    check_mode,
    mode_label,
)
from ..common.security import WEB_TOKEN_VARIABLE
from ..common.user_code import is_in_file
from ..common.wire.json_text import to_json
from .backends.base import Backend, Site
from .hosts.agent import num_cores
from .hosts.remote import check_exposure, check_remote, hosts_of, places_of
from .plan.runs import DEFAULT_NUM_WORKERS, Machine, Plan, Request, plan_runs
from .plan.settings import SINGLE

# What runs and reports is imported when the settings have been found good.
if TYPE_CHECKING:
    from ..common.reporting.status import Status
    from .job import Outcome

_EXIT_OUTPUT_LOST = 141  # 128 + SIGPIPE


def resolve(config_path: str | None, flags: Flags, sets: list[str]) -> tuple[tuple[str, ...], Resolved]:
    """The modes that are to run, and the settings. The launcher's own RANK and the like mean nothing here."""
    modes = _modes(flags["run.mode"])
    told = {
        **flags,
        "run.mode": next((name for name in modes if name != SINGLE), None),
        "run.other_modes": [name for name in modes if is_in_file(name) and len(modes) > 1] or None,
    }
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV_NAMES}
    defaults = {"run.workers": (DEFAULT_NUM_WORKERS, f"default of {LAUNCHER}")}
    resolved = load_config(config_path, told, sets, environ, defaults=defaults)
    return modes or (resolved.config.run.mode,), resolved


def _modes(text: str | None) -> tuple[str, ...]:
    """The modes of a comma list, by their own names; empty when the flag was not given."""
    if text is None:
        return ()
    modes: list[str] = []
    for word in text.split(","):
        try:
            modes.append(SINGLE if word.strip().lower() == SINGLE else canonical_mode(word))
        except UsageError as error:
            fix = error.fix if error.fix.startswith("did") else f"known: {', '.join([*MODES.names(), SINGLE])}"
            raise UsageError(f"flag --mode: {error.message}", fix=fix) from None
        if len({mode_label(mode) for mode in modes}) < len(modes):  # what each leaves is called by it
            raise UsageError(f"flag --mode: {mode_label(modes[-1])} is named twice", fix="each mode runs once")
    return tuple(modes)


def plan(resolved: Resolved, request: Request) -> tuple[list[Plan], Site]:
    """Plans whose files and backend exist. Raises UsageError, AuthError and OutputError before anything starts."""
    config = resolved.config
    backend = backend_of(config)
    if config.launch.hosts is not None and not backend.takes_hosts:
        raise UsageError(
            f"{resolved.origins['launch.backend']}: backend {config.launch.backend} takes no hosts, and "
            f"{resolved.origins['launch.hosts']} names some",
            fix="leave one of the two out; hosts mean --backend ssh",
        )
    if backend.takes_hosts and config.launch.hosts is None:
        origin = resolved.origins["launch.backend"]
        raise UsageError(f"{origin}: backend {config.launch.backend} needs hosts", fix="--hosts hosts.yaml")
    site = Site(config=config, hosts=hosts_of(config), folder=os.getcwd())
    check_remote(resolved, site.hosts, config.run.workers or 1)
    if config.launch.script is not None and not backend.spans_hosts and not os.path.isfile(config.launch.script):
        origin = resolved.origins["launch.script"]
        raise UsageError(f"{origin}: no file {config.launch.script}", fix="the path is relative to where you are")
    machine = Machine(
        python=sys.executable,
        num_cores=num_cores(),
        environ=os.environ,
        exists=(lambda path: True) if backend.spans_hosts else os.path.exists,  # looked for where it is to be
        spans_hosts=backend.spans_hosts,
        places=places_of(config, site.hosts, config.run.workers or 1, site.folder),
    )
    plans = plan_runs(resolved, request, machine)
    from ..common.reporting.output import check_writable

    for plan in plans:
        if plan.server is not None:
            check_mode(plan.mode, config)
        if backend.spans_hosts:
            check_exposure(plan)
        for path in (plan.save, plan.history):
            if path is not None and not backend.spans_hosts:
                check_writable(path)
    if config.output.summary is not None:
        check_writable(config.output.summary)
    return plans, site


def backend_of(config: Config) -> type[Backend]:
    """Where processes start."""
    by_hosts = "local" if config.launch.hosts is None else "ssh"
    found: type[Backend] = BACKENDS.load(config.launch.backend or by_hosts)
    return found


def show(plans: list[Plan], site: Site) -> None:
    """What would be started."""
    for plan in plans:
        print(f"# {plan.headline()}")
        for line in backend_of(site.config).dry_run(plan.processes("HOST:PORT"), site):
            print(line)


def start(
    plans: list[Plan], site: Site, is_enough: Callable[[Plan], Callable[[Status], bool]] | None = None
) -> list[Outcome]:
    """Run the plans one after another; `is_enough` of a run's status ends it, as if it were over. Raises
    ParamServerError before anything starts, where that can be seen."""
    from .hosts.here import check_here

    backend = backend_of(site.config)
    if not backend.spans_hosts:
        check_here(plans, site.config)
    from .job import run_all

    return asyncio.run(run_all(plans, backend, site, is_enough))


def run(plans: list[Plan], site: Site) -> int:
    """Run the plans, then show and write what came of them; the exit code."""
    from ..common.reporting.compared import prepare_report
    from .view.screen import discard_from_now_on

    if (report := site.config.output.report) is not None:
        prepare_report(report)
    if (
        site.config.launch.web or site.config.server.web is not None
    ):  # a server that is started again keeps it, and so does the page that is open
        os.environ.setdefault(WEB_TOKEN_VARIABLE, secrets.token_urlsafe(16))
    outcomes = start(plans, site)
    code = outcomes[-1].finish.exit_code
    try:
        _show_results(plans, outcomes)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_from_now_on(1)
        code = code or _EXIT_OUTPUT_LOST
    return code


def _show_results(plans: list[Plan], outcomes: list[Outcome]) -> None:
    """One run: its table. Several: the comparison, and one file for all summaries, {"runs": [...]}."""
    from ..common.reporting.compared import write_report
    from ..common.reporting.findings import findings
    from ..common.reporting.report import comparison_table, report_console, summary_table

    console, output = report_console(), plans[0].config.output
    report, target = output.report, condition(output.target) if output.target is not None else None
    ended = [(plan, outcome.summary) for plan, outcome in zip(plans, outcomes, strict=False) if outcome.summary]
    finished = [summary for _, summary in ended]
    if len(plans) > 1:
        if finished:
            console.print(comparison_table([(_name(plan), summary) for plan, summary in ended], target))
            for text in findings([(mode_label(summary.mode), summary) for summary in finished], target):
                console.print(text, style="dim", highlight=False)
        _write(plans[0].config.output.summary, {"runs": [summary.model_dump() for summary in finished]})
    elif finished:
        console.print(summary_table(finished[0]))
        _write(plans[0].summary, finished[0].model_dump())
    if report is not None and finished:  # after all that does not hang on its disk
        named = [(mode_label(summary.mode), summary) for summary in finished]
        differences = _differences([plan for plan, _ in ended])
        write_report(report, plans[0].work, named, differences=differences, target=target)
        console.print(f"the report is {report}/report.html", style="dim")


def _differences(plans: list[Plan]) -> dict[str, list[object]]:
    """Of runs that one command started, by key: of each what it trains with, `-` where its mode has no such option."""
    told = [_told(plan) for plan in plans]
    found = {key: [item.get(key, "-") for item in told] for key in dict.fromkeys(key for item in told for key in item)}
    return {key: values for key, values in found.items() if len(set(map(str, values))) > 1}


def _told(plan: Plan) -> dict[str, object]:
    """`single` takes the batches of all workers as one."""
    run, policy = plan.config.run, plan.config.policy
    is_alone = plan.mode == SINGLE
    batch = run.batch_size * (run.workers or 1) if is_alone else run.batch_size
    told: dict[str, object] = {"run.mode": plan.mode, "run.workers": plan.num_workers, "run.batch_size": batch}
    told |= {} if plan.seed is None else {"run.seed": plan.seed}
    options = {} if is_alone else policy.options(plan.mode).model_dump(mode="json", exclude_none=True)
    return told | {f"policy.{name}": value for name, value in options.items()}


def _name(plan: Plan) -> str:
    return mode_label(plan.mode) + (f", seed {plan.seed}" if plan.seed is not None else "")


def _write(path: str | None, summary: dict[str, Any]) -> None:
    """What the launcher itself writes. Raises OutputError."""
    if path is None:
        return
    from ..common.reporting.output import write_whole

    try:
        write_whole(Path(path), (to_json(summary, indent=2) + "\n").encode(), is_synced=False)
    except OSError as error:
        raise OutputError(f"--summary {path} cannot be written: {error.strerror}") from None
