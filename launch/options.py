"""What the command line of ps-launch has beside the flags of the configuration, and its help text."""

from __future__ import annotations

from typing import Annotated

import typer

HELP = """\b
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

ConfigArgument = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.", show_default=False)
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be started, then stop.", rich_help_panel="Other")
]
ScriptArgOption = Annotated[list[str] | None, typer.Option("--script-arg", hidden=True)]


def fold_script_arguments(arguments: list[str]) -> list[str]:
    """`--script F -- A B` as `--script F --script-arg=A --script-arg=B`.

    Otherwise the first word after -- would be taken for the CONFIG when that is left out.
    """
    if "--" not in arguments:
        return arguments
    cut = arguments.index("--")
    return arguments[:cut] + [f"--script-arg={argument}" for argument in arguments[cut + 1 :]]
