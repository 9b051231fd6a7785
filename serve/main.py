"""ps-serve: the command that serves the weights of a run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.config import quiet  # noqa: F401  (before all that takes time to load)
from ..common.config.cli import ConfigOption, Drained, Flags, PrintConfigOption, SetOption, resolve, run_command
from ..common.config.option import SERVE
from ..common.config.preflight import check_task
from ..common.config.sources import Resolved
from ..common.errors import CheckpointError, UsageError, raise_first
from ..common.reporting.log import setup_logging

if TYPE_CHECKING:
    from ..common.runstore.reading import RunStore, StoredRun
    from .process import Served
    from .source import Source


def serve(
    flags: Flags,
    config: ConfigOption = None,
    run: Annotated[str | None, typer.Option("--run", help="Serve a recorded run: name, id, or `last`.")] = None,
    sets: SetOption = None,
    print_config: PrintConfigOption = False,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE.safetensors", help="Weights to serve.", show_default=False)
    ] = None,
) -> None:
    """Serve the weights of a run: live, recorded, or from a file.

    Examples

      ps-serve --server 127.0.0.1:50051             a live run; newer versions are followed
      ps-serve --run last                           the newest snapshot of a recorded run
      ps-serve w.safetensors --task gpt             a file of weights

    Ask it

      curl -N http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "def ", "max_tokens": 64, "stream": true}'
    """
    resolved = resolve(config, flags, sets, print_config)
    is_live = resolved.was_set("worker.server")
    named = [name for name, is_given in (("--server", is_live), ("--run", run), ("FILE", file)) if is_given]
    raise_first(
        (len(named) > 1, f"{' and '.join(named)}: weights come from one place", "give one of them"),
        (not named, "no weights to serve", "give --server HOST:PORT, --run NAME or FILE.safetensors"),
        (file and not file.is_file(), f"{file}: cannot be read: there is no such file",
         "give a file that --save has written"),
        (file and not resolved.was_set("task.name"), f"{file} does not name its task", "add --task NAME"),
    )  # fmt: skip
    if resolved.was_set("task.name"):
        check_task(resolved.config.task.name, resolved.config.task.args)
    if run is not None:
        with _store(resolved) as store:
            store.find(run)  # its newest weights are those when it is served
    setup_logging(resolved.config.log, SERVE)
    signal.signal(signal.SIGTERM, _drain)
    from ..common.user_code import UserCodeError, format_user_traceback
    from .process import run as serve_until_it_ends

    try:
        serve_until_it_ends(resolved.config, lambda: _served(resolved, run, file))
    except UserCodeError as error:
        sys.stderr.write(format_user_traceback(error))
        raise SystemExit(1) from None


def _drain(*_: Any) -> None:
    raise Drained


def _served(resolved: Resolved, run: str | None, file: Path | None) -> Served:
    from .process import Served, wait_for_run
    from .source import WeightsFile
    from .task import TaskSpec, model_name

    source: Source
    task = resolved.config.task
    name, args = task.name, dict[str, Any]()
    if file is not None:
        source = WeightsFile(file, file.stem)
    elif run is not None:
        name, args, source = _recorded(resolved, run)
    else:
        from ..worker.conversation.messages import read_settings

        source, standing = wait_for_run(resolved.config)
        settings = read_settings(standing.settings)
        name, args = settings.task, settings.task_args or {}
    if resolved.was_set("task.name"):  # before the built-in task that the run names
        spec = TaskSpec(task.name, task.args)
    elif name:
        spec = TaskSpec(name, task.args, args)
    else:
        message = "the run's task is a file, and a file is never taken from a run"
        raise UsageError(message, fix="add --task FILE.py:NAME")
    return Served(model_name(name or spec.name), spec.load(), source, spec)


def _recorded(resolved: Resolved, wanted: str) -> tuple[str, dict[str, Any], Source]:
    """Return the task of a recorded run, its arguments, and its newest weights."""
    from .source import WeightsFile

    with _store(resolved) as store:
        found = store.find(wanted)
        settings = store.config(found).get("task", {})
        path, version = _newest(store, found)
    return settings.get("name", ""), settings.get("args") or {}, WeightsFile(path, found.label, version)


def _store(resolved: Resolved) -> RunStore:
    from ..common.runstore.reading import RunStore
    from ..common.runstore.schema import FILE

    return RunStore(Path(resolved.config.output.track_dir) / FILE)


def _newest(store: RunStore, run: StoredRun) -> tuple[Path, int]:
    """Return the file and version of a run's newest snapshot on this disk, or of its saved weights."""
    for snapshot in reversed(store.snapshots(run)):
        path = Path(snapshot.path)
        if path.parent.name.startswith("shard-"):
            fix = "serve its saved weights: ps-serve FILE.safetensors --task NAME"
            raise CheckpointError(f"the snapshots of run {run.label} are divided among shards", fix=fix)
        if (path / "weights.safetensors").exists():
            return path / "weights.safetensors", snapshot.version
    saved = store.config(run).get("output", {}).get("save")
    if saved and Path(saved).exists():
        return Path(saved), run.version or 0
    fix = "train with --checkpoint-dir DIR or --save FILE.safetensors; or serve a live run: --server HOST:PORT"
    raise CheckpointError(f"run {run.label} has no weights on this disk: no snapshot, and no saved file", fix=fix)


def main() -> None:
    """Entry point of `ps-serve`."""
    run_command(SERVE, serve)
