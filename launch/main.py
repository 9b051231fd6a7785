"""The command line of ps-launch. `run.py` has its work, and is imported once the command line is parsed."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from ..common.config import quiet  # noqa: F401  (before all that takes time to load)
from ..common.config.cli import Flags, PrintConfigOption, SetOption, run_app, run_command, show_config
from ..common.config.option import LAUNCHER

_ESTIMATE = "Take a few steps of each mode, then show what the whole run would take and cost."
_COMMANDS = {
    "check": "..drills.check_main",
    "chaos": "..drills.chaos.main",
    "doctor": "..drills.doctor.main",
}  # each with an app and the name of its PROGRAM


def launch(
    flags: Flags,
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.", show_default=False)
    ] = None,
    sets: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the commands of all processes, then stop.", rich_help_panel="Other")
    ] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help=_ESTIMATE, rich_help_panel="Other")] = False,
    print_config: PrintConfigOption = False,
    script_args: Annotated[list[str] | None, typer.Option("--script-arg", hidden=True)] = None,
) -> int:
    """Start a server and N workers, watch them, and end them together.

    Examples

      ps-launch configs/digits.yaml                    run what the file describes
      ps-launch configs/digits.yaml -n 4 --mode sync   flags win over the file
      ps-launch configs/digits.yaml --mode single,sync,async,ssp,localsgd
                                                       one after another, compared
      ps-launch -n 4 --script train.py -- --epochs 3   your own script, 4 times
      ps-launch configs/digits.yaml --checkpoint-dir D once more: continues from the newest snapshot
      ps-launch configs/digits.yaml --hosts hosts.yaml on the machines of that file
      ps-launch configs/gpt.yaml --serve               reply to requests with its weights
      ps-launch configs/digits.yaml --dry-run          only show the commands
      ps-launch doctor configs/digits.yaml             measure machines and links

    Output of the processes goes to standard error, results to standard output.
    Ctrl-C lets the processes end in good order, a second one kills them.
    A worker that crashes or is killed is started again, and so is a server that
    keeps snapshots (--checkpoint-dir). The exit code is that of the process whose
    failure ended the job; 17 when it had been started again too often, 130 after
    Ctrl-C, 143 after SIGTERM.
    """
    from . import run
    from .plan.runs import Request

    if estimate:
        from .estimate import estimate as show_estimate

        return show_estimate(config, flags, sets or [], tuple(script_args or ()))
    modes, resolved = run.resolve(config, flags, sets or [])
    if print_config:
        show_config(resolved)
        return 0
    plans, site = run.plan(resolved, Request(modes=modes, config_path=config, script_args=tuple(script_args or ())))
    if dry_run:
        run.show(plans, site)
        return 0
    return run.run(plans, site)


def main() -> None:
    """Entry point of `ps-launch`. Without a command such as `check`, all arguments describe a run."""
    if len(sys.argv) > 1 and sys.argv[1] in _COMMANDS:
        command = importlib.import_module(_COMMANDS[sys.argv.pop(1)], __package__)
        run_app(command.app, command.PROGRAM)
    sys.argv[1:] = with_port(fold_script_arguments(sys.argv[1:]))
    run_command(LAUNCHER, launch)


def fold_script_arguments(arguments: list[str]) -> list[str]:
    """Returns `--script F -- A B` as `--script F --script-arg=A --script-arg=B`.

    Otherwise the first word after -- would be parsed as CONFIG when that is left out.
    """
    if "--" not in arguments:
        return arguments
    cut = arguments.index("--")
    return arguments[:cut] + [f"--script-arg={argument}" for argument in arguments[cut + 1 :]]


def with_port(arguments: list[str]) -> list[str]:
    """Returns `--serve` without a port as `--serve=0`, because Typer's options have a value always or never."""
    following = [*arguments[1:], ""]
    return [
        "--serve=0" if word == "--serve" and not after.isdigit() else word
        for word, after in zip(arguments, following, strict=True)
    ]
