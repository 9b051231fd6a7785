"""ps-launch: from the command line to running processes to tables of results.

Imports beyond Typer are made where they are needed, after the command line is known.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.config.cli import Flags, PrintConfigOption, SetOption, run_command, show_config
from ..common.config.option import LAUNCHER
from ..common.errors import OutputError, UsageError

if TYPE_CHECKING:
    from ..common.config.sources import Resolved
    from ..common.reporting.summary import Summary
    from .backends.base import Site
    from .job import Outcome
    from .plan.runs import Machine, Plan, Request

_HELP = """\b
Start a server and N workers, watch them, and end them together.

[bold]Examples[/bold]

  ps-launch configs/digits.yaml                    what the file says
  ps-launch configs/digits.yaml -n 4 --mode sync   flags win over the file
  ps-launch configs/digits.yaml --mode single,sync,async,ssp,localsgd
                                                   one after another, compared
  ps-launch -n 4 --script train.py -- --epochs 3   your own script, 4 times
  ps-launch configs/digits.yaml --checkpoint-dir D once more: goes on where it was
  ps-launch configs/digits.yaml --hosts hosts.yaml on the machines of that file
  ps-launch configs/digits.yaml --dry-run          only show the commands

What processes say goes to standard error, results to standard output.
Ctrl-C lets the processes end in good order, a second one kills them.
A worker that crashes or is killed is started again, and so is a server that
keeps snapshots (--checkpoint-dir). The exit code is that of the process whose
failure ended the job; 17 when it had been started again too often, 130 after
Ctrl-C, 143 after SIGTERM.
"""

_ConfigArgument = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.", show_default=False)
]
_DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be started, then stop.", rich_help_panel="Other")
]
_ScriptArgOption = Annotated[list[str] | None, typer.Option("--script-arg", hidden=True)]

_COMMANDS = {"check": "..drills.check_main", "chaos": "..drills.chaos.main"}  # each with a main(arguments)
_EXIT_OUTPUT_LOST = 141  # 128 + SIGPIPE


def launch(
    flags: Flags,
    config: _ConfigArgument = None,
    sets: SetOption = None,
    dry_run: _DryRunOption = False,
    print_config: PrintConfigOption = False,
    script_args: _ScriptArgOption = None,
) -> int:
    """Start a server and N workers, watch them, and end them together."""
    from ..common.user_code import is_in_file
    from .plan.files import SINGLE
    from .plan.runs import Request

    modes = _modes(flags["run.mode"])
    run_mode = next((name for name in modes if name != SINGLE), None)
    others = [name for name in modes if is_in_file(name) and len(modes) > 1]
    flags = {**flags, "run.mode": run_mode, "run.other_modes": others or None}
    resolved = _resolve(config, flags, sets or [])
    request = Request(
        modes=modes or (resolved.config.run.mode,), config_path=config, script_args=tuple(script_args or ())
    )
    if print_config:
        show_config(resolved)
        return 0
    plans, site = _plans(resolved, request)
    if dry_run:
        _show_plans(plans, site)
        return 0
    return _run(plans, site)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in _COMMANDS:  # all else is a run: `ps-launch CONFIG` needs no word for it
        importlib.import_module(_COMMANDS[sys.argv[1]], __package__).main(sys.argv[2:])
    sys.argv[1:] = fold_script_arguments(sys.argv[1:])
    run_command(LAUNCHER, _HELP, launch)


def fold_script_arguments(arguments: list[str]) -> list[str]:
    """`--script F -- A B` as `--script F --script-arg=A --script-arg=B`.

    Otherwise the first word after -- would be taken for the CONFIG when that is left out.
    """
    if "--" not in arguments:
        return arguments
    cut = arguments.index("--")
    return arguments[:cut] + [f"--script-arg={argument}" for argument in arguments[cut + 1 :]]


def _modes(text: str | None) -> tuple[str, ...]:
    """The modes of a comma list, by their own names; empty when the flag was not given."""
    from ..common.registry import MODES, canonical_mode, mode_label
    from .plan.files import SINGLE

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


def _resolve(config_path: str | None, flags: Flags, sets: list[str]) -> Resolved:
    """The settings, with a number of workers. The launcher's own RANK and the like mean nothing here."""
    from ..common.config.sources import LAUNCHER_ENV_NAMES, load_config
    from .plan.runs import DEFAULT_NUM_WORKERS

    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV_NAMES}
    resolved = load_config(config_path, flags, sets, environ)
    defaults: dict[str, tuple[Any, str]] = {}
    if resolved.config.run.workers is None:  # checked together with what depends on it
        defaults["run.workers"] = (DEFAULT_NUM_WORKERS, f"default of {LAUNCHER}")
    if resolved.config.launch.hosts is not None and not resolved.was_set("launch.backend"):
        defaults["launch.backend"] = ("ssh", "launch.hosts")
    if defaults:
        given = {**flags, **{key: value for key, (value, _) in defaults.items()}}
        resolved = load_config(config_path, given, sets, environ)
        resolved.origins |= {key: origin for key, (_, origin) in defaults.items()}
    return resolved


def _plans(resolved: Resolved, request: Request) -> tuple[list[Plan], Site]:
    """Plans whose files and backend exist. Raises UsageError, AuthError and OutputError before anything starts."""
    from ..common.registry import BACKENDS, check_contributions, check_pipelined
    from ..common.reporting.output import check_writable
    from .backends.base import Site
    from .hosts.remote import check_exposure, check_remote, hosts_of
    from .plan.runs import plan_runs

    config = resolved.config
    backend = BACKENDS.load(config.launch.backend)
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
    plans = plan_runs(resolved, request, _machine(site, spans_hosts=backend.spans_hosts))
    for plan in plans:
        if plan.server is not None:
            if config.policy.pipelined:
                check_pipelined(plan.mode, config.policy.options(plan.mode))
            check_contributions(plan.mode, config.policy.aggregation, config.store.max_norm)
        if backend.spans_hosts:
            check_exposure(plan)
        for path in (plan.save, plan.history):
            if path is not None and not backend.spans_hosts:
                check_writable(path)
    if config.output.summary is not None:
        check_writable(config.output.summary)
    return plans, site


def _machine(site: Site, *, spans_hosts: bool) -> Machine:
    """What the plans need to know of this machine, and of the others."""
    from .hosts.remote import placement_of
    from .plan.runs import Machine

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        python=sys.executable,
        num_cores=num_cores,
        environ=os.environ,
        exists=(lambda path: True) if spans_hosts else os.path.exists,  # looked for where it is to be
        spans_hosts=spans_hosts,
        placement=placement_of(site.config, site.hosts, site.config.run.workers or 1, site.folder),
    )


def _show_plans(plans: list[Plan], site: Site) -> None:
    from ..common.registry import BACKENDS

    backend = BACKENDS.load(site.config.launch.backend)
    for plan in plans:
        print(f"# {plan.headline()}")
        for line in backend.dry_run(plan.processes("HOST:PORT"), site):
            print(line)


def _run(plans: list[Plan], site: Site) -> int:
    """Run the plans, then show and write what came of them."""
    import asyncio

    from ..common.registry import BACKENDS
    from .job import run_all
    from .view.screen import discard_from_now_on

    config = plans[0].config
    outcomes = asyncio.run(run_all(plans, BACKENDS.load(config.launch.backend), site))
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
    from ..common.registry import mode_label
    from ..common.reporting.report import comparison_table, report_console, summary_table

    console = report_console()
    finished: list[Summary] = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    if len(plans) > 1:
        if finished:
            console.print(comparison_table([(mode_label(summary.mode), summary) for summary in finished]))
        _write(plans[0].config.output.summary, {"runs": [summary.model_dump() for summary in finished]})
    elif finished:
        console.print(summary_table(finished[0]))
        _write(plans[0].summary, finished[0].model_dump())


def _write(path: str | None, summary: dict[str, Any]) -> None:
    """What the launcher itself writes. Raises OutputError."""
    import json

    if path is None:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"--summary {path} cannot be written: {error.strerror}") from None
