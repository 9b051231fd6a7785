"""The commands of the project as their command lines know them: for the reference, and to check what pages tell."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from paramserver.common.config.cli import single_app

# A program that is one command with the configuration's flags: its module, and its function there.
CONFIGURED = {
    "ps-server": ("paramserver.ps.main", "serve"),
    "ps-worker": ("paramserver.worker.main", "work"),
    "ps-launch": ("paramserver.launch.main", "launch"),
    "ps-serve": ("paramserver.serve.main", "serve"),
}
# The module of each other one, which has an `app`.
OTHERS = {
    "ps-launch doctor": "paramserver.drills.doctor.main",
    "ps-launch check": "paramserver.drills.check_main",
    "ps-launch chaos": "paramserver.drills.chaos.main",
    "ps-sim": "paramserver.simulate.main",
    "ps-runs": "paramserver.catalog.main",
    "ps-certs": "paramserver.launch.certs.main",
    "ps-bench": "paramserver.benchmarks.main",
}


def command(program: str, arguments: Sequence[str] = ()) -> Any:
    """The (click) command of a program; of a configured one with the flags that modes in `arguments` bring."""
    if program in OTHERS:
        return typer.main.get_command(importlib.import_module(OTHERS[program]).app)
    module, name = CONFIGURED[program]
    home = importlib.import_module(module)
    return typer.main.get_command(single_app(program, getattr(home, name), list(arguments)))


def described() -> Iterator[tuple[str, Any]]:
    """Every command by its whole name, subcommands after their group."""
    for program in (*CONFIGURED, *OTHERS):
        found = command(program)
        if not getattr(found, "commands", None):
            yield program, found
            continue
        for name, one in found.commands.items():
            yield f"{program} {name}", one
