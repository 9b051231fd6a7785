"""ps-runs: its command line. What the commands do is imported when one is given: --help answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..common.config.cli import make_app, run_app

PROGRAM = "ps-runs"
_EXIT_OUTPUT_LOST = 141  # 128 + SIGPIPE

_HELP = """Runs on record: what trained where, with which settings, and what came of it.

Examples

  ps-runs list                                the newest first
  ps-runs show last                           one run; also by name, id or the first of its id
  ps-runs tag last baseline                   call it something
  ps-runs compare baseline sync-3f02 last     side by side, and what differs in their settings
  ps-runs compare baseline last --report out  the same as out/report.html and out/report.md
  ps-runs plot last --figure accuracy         in the terminal; --out FILE.svg or .png
  ps-runs export last --out last.csv          its series
  ps-runs ui                                  all of them on a page, those that go on as well

Servers keep their runs in output.track_dir (runs/paramserver.db), --no-store keeps none.
"""

app = make_app(_HELP)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="name, id, or `last`", show_default=False)]
RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN...", help="names or ids", show_default=False)]
DbOption = Annotated[
    Path | None,
    typer.Option(
        "--db", metavar="FILE", help="the file of runs; none: paramserver.db in runs/, or PS_OUTPUT__TRACK_DIR"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="for programs")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="a file instead of the terminal")]
FigureOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="loss (of training), samples_per_s, or one of its evaluations: accuracy, ..."),
]
OverOption = Annotated[str, typer.Option(metavar="X", help="step, time, samples or bytes")]


def _file(given: Path | None) -> Path:
    from ..common.runstore.schema import FILE

    return given or Path(os.environ.get("PS_OUTPUT__TRACK_DIR") or "runs") / FILE


@app.command("list")
def list_(
    db: DbOption = None,
    most: Annotated[
        int | None, typer.Option("-n", "--most", min=1, help="only so many, the newest; none: 50, with --json all")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """All runs, the newest first."""
    from . import showing

    showing.list_runs(_file(db), most, as_json=as_json)


@app.command("show")
def show(run: RunArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """One run: its results, its settings, where it ran, what happened."""
    from . import showing

    showing.show_run(_file(db), run, as_json=as_json)


@app.command("compare")
def compare(
    runs: RunsArgument,
    db: DbOption = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="DIR", help="report.html and report.md there")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="FIGURE>=X|<=X", help="when each came to it, such as 'accuracy >= 0.95'")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Runs side by side, and what differs in their settings."""
    from . import comparing

    comparing.compare(_file(db), runs, report, target, as_json=as_json)


@app.command("plot")
def plot(
    run: RunArgument, figure: FigureOption = "loss", over: OverOption = "step", out: OutOption = None,
    db: DbOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """One figure of a run, in the terminal or as FILE.svg or FILE.png."""
    from . import plotting

    plotting.plot(_file(db), run, (figure, over), out, as_json=as_json)


@app.command("export")
def export(run: RunArgument, out: OutOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """A run's series as CSV, or with --json (or FILE.json) all that is on record of it."""
    from . import showing

    showing.export(_file(db), run, out, as_json=as_json)


@app.command("tag")
def tag(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="what to call it; '' takes its name away")],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a run a name."""
    from . import showing

    showing.tag(_file(db), run, name, as_json=as_json)


@app.command("delete")
def delete(
    runs: RunsArgument,
    db: DbOption = None,
    force: Annotated[bool, typer.Option("--force", help="also one that goes on; what it writes later is lost")] = False,
    as_json: JsonOption = False,
) -> None:
    """Forget runs, for good. Their weights, snapshots and other files stay where they are."""
    from . import showing

    showing.delete(_file(db), runs, force=force, as_json=as_json)


@app.command("ui")
def ui(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="the file of runs", show_default=False)] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="port 0 takes a free one")] = "127.0.0.1:0",
) -> None:
    """Serve the dashboard with all runs until it is interrupted."""
    from ..common.errors import UsageError

    try:
        from ..web.dashboard import serve_dashboard
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the page needs the package {error.name}, which is not installed", fix="pip install 'paramserver[web]'"
        ) from None
    serve_dashboard(_file(file), listen)


def main() -> None:
    """Entry point of `ps-runs`."""
    try:
        run_app(app, PROGRAM)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_EXIT_OUTPUT_LOST)


if __name__ == "__main__":
    main()
