"""ps-launch check FILE...: were all contributions applied exactly once, and nothing durable lost?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.config.cli import make_app
from ..common.errors import UsageError

if TYPE_CHECKING:
    from .check import Verdict
    from .lineage import Tally

PROGRAM = "ps-launch check"
_MAX_SHOWN = 20

_HELP = """
Check what a run wrote to --history (output.history).

Examples

  ps-launch check history.jsonl              a server's history
  ps-launch check server.jsonl worker*.jsonl with the workers' own
  ps-launch check --mode my_mode.py:Mine h.jsonl of a run in a mode of your own: with its rules

Exit code 0 when every promise was kept, 1 when one was not: each is shown with its line.
"""

# Titles of the table's rows, by the field of the tally.
_TITLES = {
    "applied": "applied",
    "repeated": "repeated (replied, not applied)",
    "skipped": "skipped (counted, nothing folded)",
    "dropped": "dropped (came after their round)",
    "rejected": "rejected (not finite)",
    "refused": "refused",
    "restarts": "restarts of the server",
    "rolled_back": "rolled back by them",
    "lost": "of these not made again",
    "rejoins": "rejoins of workers",
    "durable": "durable (in the newest snapshot)",
}

app = make_app(_HELP)


@app.command(help=_HELP)
def check_files(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Histories, JSON lines.")],
    modes: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="FILE.py:NAME", help="A mode of your own, to check its rules; repeatable."),
    ] = None,
) -> int:
    verdict = check_paths(files, _modes_in_files(modes or []))
    show(verdict)
    return 0 if verdict.is_good else 1


def _modes_in_files(names: list[str]) -> list[str]:
    """The user's own modes, with the whole path; the installed ones are known anyway. Raises UsageError."""
    from ..common.registry import canonical_mode

    try:
        return [canonical_mode(name) for name in names]
    except UsageError as error:
        raise UsageError(f"flag --mode: {error.message}", fix=error.fix) from None


def check_paths(paths: list[str], modes: list[str]) -> Verdict:
    """Check the histories in these files, of runs in installed modes or `modes`, `FILE.py:NAME`. Raises UsageError
    for a file that cannot be read."""
    from .check import check

    with ExitStack() as stack:
        opened = {}
        for path in dict.fromkeys(paths):
            try:
                opened[path] = stack.enter_context(open(path, "rb"))
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}", fix="give files of --history") from None
        return check(opened, modes)


def show(verdict: Verdict) -> None:
    """The counts, then what is wrong."""
    from ..common.reporting.report import report_console

    report_console().print(tally_table(verdict.tally))
    for problem in verdict.problems[:_MAX_SHOWN]:
        print(problem)
    more = len(verdict.problems) - _MAX_SHOWN
    if more > 0:
        print(f"... and {more} more")
    for message in verdict.deleted:
        print(message)
    for mode in verdict.unchecked_modes:
        print(f"the rules of mode {mode} were not checked: it is not installed here, and --mode does not name it")
    if verdict.last_op != "end":
        print(
            f"the history is cut: its last line is '{verdict.last_op}', not the run's end; the server was killed or "
            "runs still, or the file was copied in part, and nothing later was checked"
        )
    print(f"{verdict.num_lines:,} lines: {describe(verdict)}")


def describe(verdict: Verdict) -> str:
    if verdict.is_good:
        lost = "but snapshots were deleted" if verdict.deleted else "nothing durable was lost"
        return f"every contribution was applied once, {lost}"
    count = len(verdict.problems)
    return f"{count} problem{'s' if count > 1 else ''}"


def tally_table(tally: Tally) -> object:
    """Counts that are not zero, and those that matter when they are."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    counts = asdict(tally)
    for name, title in _TITLES.items():
        if counts[name] or name in ("applied", "repeated", "restarts"):
            table.add_row(f"{counts[name]:,}", title)
    return table
