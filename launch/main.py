"""The command line of ps-launch. `run.py` has its work, and is imported once the command line is parsed."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from itertools import pairwise
from typing import Annotated

import typer

from ..common import synonyms
from ..common.config import quiet  # noqa: F401  (before all that takes time to load)
from ..common.config.cli import Flags, PrintConfigOption, SetOption, report, run_app, run_command, show_config
from ..common.config.option import LAUNCHER
from ..common.errors import UsageError

_ESTIMATE = "Take a few steps of each mode, then show what the whole run would take and cost."
_COMMANDS = {
    "check": "..drills.check_main",
    "chaos": "..drills.chaos.main",
    "doctor": "..drills.doctor.main",
}  # each with an app and the name of its PROGRAM
_NOTHING = "your script: ps-launch -n 2 train.py; or a file of settings: ps-launch configs/digits.yaml; or --help"


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
      ps-launch -n 4 train.py --epochs 3               your own script, 4 times, with its arguments
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

    if config is not None and not os.path.isfile(config):
        before = next((flag for flag, word in pairwise(sys.argv) if word == config), "")
        if fix := synonyms.of_word(LAUNCHER, config, before):  # it has a meaning elsewhere
            raise UsageError(f"{config} is no file and no command", fix=fix)
    if estimate:
        return run.estimate(config, flags, sets or [], tuple(script_args or ()))
    modes, resolved = run.resolve(config, flags, sets or [])
    if print_config:
        show_config(resolved)
        return 0
    plans, site = run.make_plans(
        resolved, Request(modes=modes, config_path=config, script_args=tuple(script_args or ()))
    )
    if dry_run:
        run.show(plans, site)
        return 0
    return run.run(plans, site)


def main() -> None:
    """Entry point of `ps-launch`. Without a command such as `check`, all arguments describe a run."""
    if len(sys.argv) > 1 and sys.argv[1] in _COMMANDS:
        command = importlib.import_module(_COMMANDS[sys.argv.pop(1)], __package__)
        run_app(command.app, command.PROGRAM)
    try:
        if not sys.argv[1:]:
            raise UsageError("no script and no file is given", fix=_NOTHING)
        near = difflib.get_close_matches(sys.argv[1], _COMMANDS, n=1, cutoff=0.7)
        if near and not os.path.exists(sys.argv[1]):
            raise UsageError(f"{sys.argv[1]} is no file and no command", fix=f"did you mean 'ps-launch {near[0]}'?")
        sys.argv[1:] = with_port(fold_script_arguments(sys.argv[1:]))
    except UsageError as error:
        sys.exit(report(LAUNCHER, error))
    run_command(LAUNCHER, launch)


def fold_script_arguments(arguments: list[str]) -> list[str]:
    """Returns `F.py A B`, and `--script F.py -- A B`, as `--script F.py --script-arg=A --script-arg=B`.

    The script is the first word that ends in .py and is not the value of a flag. All words after it are its own, as
    torchrun has it. Raises UsageError for two scripts.
    """
    at = _script_at(arguments)
    if at is not None:
        if any(word == "--script" or word.startswith("--script=") for word in arguments[:at]):
            raise UsageError(f"--script and {arguments[at]} are two scripts", fix="leave --script out")
        rest = arguments[at + 1 :]
        rest = rest[1:] if rest[:1] == ["--"] else rest
        arguments = [*arguments[:at], "--script", arguments[at], "--", *rest]
    if "--" not in arguments:
        return arguments
    cut = arguments.index("--")
    return arguments[:cut] + [f"--script-arg={argument}" for argument in arguments[cut + 1 :]]


def _script_at(arguments: list[str]) -> int | None:
    from ..common.config.flags import flag_name, flags_of
    from ..common.config.plain import types_in

    if not any(word.endswith(".py") for word in arguments):
        return None
    valued = {"--set"}
    for key, (info, flag) in flags_of(LAUNCHER).items():
        if bool not in types_in(info.annotation):
            valued |= {flag_name(key, info), f"-{flag.short}"}
    for at, (before, word) in enumerate(pairwise(["", *arguments])):
        if word == "--":
            return None
        if word.endswith(".py") and not word.startswith("-") and before not in valued:
            return at
    return None


def with_port(arguments: list[str]) -> list[str]:
    """Returns `--serve` without a port as `--serve=0`, because Typer's options have a value always or never."""
    return [
        "--serve=0" if word == "--serve" and not after.isdigit() else word for word, after in pairwise([*arguments, ""])
    ]
