"""List, show and compare the runs of a run store.

Examples

  ps-runs list                                the newest first
  ps-runs list mode=ssp 'lr<0.1' baseline     those that fit: words, settings, metrics
  ps-runs show last                           one run, by `last`, name, id or start of its id
  ps-runs tag last baseline                   give a run a name
  ps-runs compare baseline digits-sync-12 last  side by side, with the settings that differ
  ps-runs compare baseline last --report out  also writes out/report.html and out/report.md
  ps-runs plot last --metric accuracy         plot in the terminal, or to --out FILE.svg or .png
  ps-runs export last --out last.csv          the series of a run
  ps-runs ui                                  the dashboard with all runs, also runs in progress

Servers record their runs in output.track_dir (runs/paramserver.db); --no-store switches it off.
"""

# Commands import their code when they run, so that --help answers at once.
from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..common.config.cli import make_app, run_app

app = make_app(__doc__)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name, id, or `last`.", show_default=False)]
RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or ids.", show_default=False)]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="New name; '' removes the name.")]
FileArgument = Annotated[Path | None, typer.Argument(metavar="FILE", help="Run store.", show_default=False)]
TermsArgument = Annotated[list[str] | None, typer.Argument(
    metavar="FILTER...", help="Words, mode=ssp, 'lr<0.1'.", show_default=False
)]  # fmt: skip
DbOption = Annotated[Path | None, typer.Option(
    "--db", metavar="FILE", help="Run store; default: paramserver.db in runs/, or in PS_OUTPUT__TRACK_DIR."
)]  # fmt: skip
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a file instead of the terminal.")]
MostOption = Annotated[int | None, typer.Option("-n", "--most", min=1, help="Newest runs; 50, with --json all.")]
ReportOption = Annotated[str | None, typer.Option(metavar="DIR", help="Write report.html and report.md there.")]
TargetOption = Annotated[str | None, typer.Option(
    metavar="METRIC>=X|<=X", help="Goal, e.g. 'accuracy >= 0.95', with its time in each run."
)]  # fmt: skip
MetricOption = Annotated[str, typer.Option(help="loss (of training), samples_per_s, or an evaluation's metric.")]
OverOption = Annotated[str, typer.Option(metavar="X", help="step, time, samples or bytes.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Also delete a run in progress.")]
ListenOption = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address; port 0: any free port.")]


def _file(path: Path | None) -> Path:
    from ..common.runstore.schema import FILE

    return path or Path(os.environ.get("PS_OUTPUT__TRACK_DIR") or "runs") / FILE


@app.command("list")
def list_(
    terms: TermsArgument = None, db: DbOption = None, most: MostOption = None, as_json: JsonOption = False
) -> None:
    """List all runs, the newest first, or those that fit a filter: words, and names of settings and metrics."""
    from . import showing

    showing.list_runs(_file(db), terms or [], most, as_json=as_json)


@app.command("show")
def show(run: RunArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Show one run: its results, settings, machine and events."""
    from . import showing

    showing.show_run(_file(db), run, as_json=as_json)


@app.command("compare")
def compare(
    runs: RunsArgument, db: DbOption = None, report: ReportOption = None, target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show runs side by side, with the settings that differ."""
    from . import showing

    showing.compare(_file(db), runs, report, target, as_json=as_json)


@app.command("plot")
def plot(
    run: RunArgument, metric: MetricOption = "loss", over: OverOption = "step", out: OutOption = None,
    db: DbOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Plot one metric of a run, in the terminal or as FILE.svg or FILE.png."""
    from . import showing

    showing.plot(_file(db), run, (metric, over), out, as_json=as_json)


@app.command("export")
def export(run: RunArgument, out: OutOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Export a run's series as CSV, or all its data with --json or FILE.json."""
    from . import showing

    showing.export(_file(db), run, out, as_json=as_json)


@app.command("tag")
def tag(run: RunArgument, name: NameArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Give a run a name."""
    from . import showing

    showing.tag(_file(db), run, name, as_json=as_json)


@app.command("delete")
def delete(runs: RunsArgument, db: DbOption = None, force: ForceOption = False, as_json: JsonOption = False) -> None:
    """Delete runs from the run store. Their weights, snapshots and other files stay."""
    from . import showing

    showing.delete(_file(db), runs, force=force, as_json=as_json)


@app.command("ui")
def ui(file: FileArgument = None, listen: ListenOption = "127.0.0.1:0") -> None:
    """Serve the dashboard with all runs until it is interrupted."""
    from ..common.errors import UsageError

    try:
        from ..web.app import serve_dashboard
    except ModuleNotFoundError as error:
        message = f"the dashboard needs the package {error.name}, which is not installed"
        raise UsageError(message, fix="pip install 'paramserver[web]'") from None
    serve_dashboard(_file(file), listen)


def main() -> None:
    """Entry point of `ps-runs`."""
    run_app(app, "ps-runs")
