"""ps-launch check FILE...: checks that contributions were applied exactly once and nothing durable was lost."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.config.cli import make_app
from ..common.errors import UsageError

if TYPE_CHECKING:
    from .check import Verdict
    from .lineage import Tally

PROGRAM = "ps-launch check"
_MAX_SHOWN = 20

app = make_app()


@app.command()
def check_files(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Histories, JSON lines.")],
    modes: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="FILE.py:NAME", help="A mode of your own, to check its rules; repeatable."),
    ] = None,
) -> int:
    """Check the histories that a run wrote with --history (output.history).

    Examples

      ps-launch check history.jsonl              a server's history
      ps-launch check server.jsonl worker*.jsonl with those of its workers
      ps-launch check above.jsonl relay*.jsonl   with those of the relays of its regions
      ps-launch check --mode my_mode.py:Mine h.jsonl of a run in your own mode: with its rules

    The exit code is 0 if every guarantee was kept. Otherwise it is 1, and each problem is shown with its line.
    """
    from ..common.registry import canonical_mode

    try:
        own_modes = [canonical_mode(name) for name in modes or []]
    except UsageError as error:
        raise UsageError(f"flag --mode: {error.message}", fix=error.fix) from None
    verdict = check_paths(files, own_modes)
    show(verdict)
    return 0 if verdict.is_good else 1


def check_paths(paths: list[str], modes: list[str]) -> Verdict:
    """Check the histories in these files. `modes`: of the user, `FILE.py:NAME`. Raises UsageError."""
    from .check import check
    from .history_lines import MAX_LINE_BYTES

    with ExitStack() as stack:
        opened = {}
        for path in dict.fromkeys(paths):
            try:
                file = stack.enter_context(open(path, "rb"))
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}", fix="give files of --history") from None
            # A file without line ends is not read into memory as one line.
            opened[path] = iter(partial(file.readline, MAX_LINE_BYTES + 1), b"")
        return check(opened, modes)


def show(verdict: Verdict) -> None:
    """Print the counts, then the problems."""
    from ..common.reporting.report import report_console

    report_console().print(tally_table(verdict.tally))
    for comparison in verdict.comparisons:
        print(comparison)
    for problem in verdict.problems[:_MAX_SHOWN]:
        print(problem)
    if (more := len(verdict.problems) - _MAX_SHOWN) > 0:
        print(f"... and {more} more")
    for message in verdict.deleted:
        print(message)
    for mode in verdict.unchecked_modes:
        print(f"the rules of mode {mode} were not checked: it is not installed here, and --mode does not name it")
    if verdict.last_op != "end":
        print(
            f"the history is cut: its last line is '{verdict.last_op}', not the run's end; the server was killed or is "
            "still running, or the file is incomplete; nothing later was checked"
        )
    print(f"{verdict.num_lines:,} lines: {describe(verdict)}")


def describe(verdict: Verdict) -> str:
    """Returns the verdict as a phrase."""
    if not verdict.is_good:
        return f"{len(verdict.problems)} problem{'s' if len(verdict.problems) > 1 else ''}"
    lost = "but snapshots were deleted" if verdict.deleted else "nothing durable was lost"
    both = ", in the run above and in its regions" if verdict.comparisons else ""
    return f"every contribution was applied once{both}, {lost}"


def tally_table(tally: Tally) -> object:
    """Returns a table of the counts that are not zero, and of counts that matter even if they are zero."""
    from rich.table import Column, Table

    table = Table(Column(justify="right"), "", box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for item in fields(tally):
        count = getattr(tally, item.name)
        if count or item.name in ("applied", "repeated", "restarts"):
            table.add_row(f"{count:,}", item.metadata["title"])
    return table
