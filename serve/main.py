"""ps-serve: the command that serves the weights of a run."""

from __future__ import annotations

import gc
import secrets
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.config import quiet  # noqa: F401  (before all that takes time to load)
from ..common.config.cli import (
    ConfigOption,
    Drained,
    Flags,
    PrintConfigOption,
    SetOption,
    after_torch,
    before_torch,
    resolve,
    run_command,
)
from ..common.config.conditions import every
from ..common.config.option import SERVE
from ..common.config.preflight.code import check_task
from ..common.config.sources import Resolved
from ..common.errors import CheckpointError, UsageError, raise_first
from ..common.reporting.log import get_logger, setup_logging

if TYPE_CHECKING:
    from ..common.runstore.reading import RunStore, StoredRun
    from .source import Source
    from .task import TaskSpec


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
        (file and not resolved.was_set("task.name"), f"{file} does not name its task", "add --task NAME"),
    )
    if resolved.was_set("task.name"):
        check_task(resolved.config.task.name, resolved.config.task.args)
    setup_logging(resolved.config.log, SERVE)
    signal.signal(signal.SIGTERM, _drain)
    _serve(resolved, run, file)


def _drain(*_: Any) -> None:
    raise Drained


def _serve(resolved: Resolved, run: str | None, file: Path | None) -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UsageError("ps-serve needs starlette and uvicorn", fix="pip install 'paramserver[serve]'") from None
    before_torch()
    gc.disable()
    import torch

    from ..common.user_code import UserCodeError, format_user_traceback, user_code
    from ..web.http import HttpServer
    from .app import RULES, Service, make_app
    from .engine import Engine, Options
    from .models import language_model
    from .slots import NUM_SLOTS
    from .source import Follower

    after_torch()
    config, log = resolved.config, get_logger()
    torch.set_num_threads(config.serve.threads)
    http = HttpServer(config.serve.listen, config, RULES, name="ps-serve", flag="--listen")
    stopped, failures = threading.Event(), list[Exception]()

    def failed(error: Exception) -> None:
        failures.append(error)
        stopped.set()

    try:
        with ExitStack() as running:
            name, spec, source = _source(resolved, run, file)
            running.callback(source.close)
            task = spec.load()
            source.averaged_buffers = getattr(task, "averaged_buffers", ())
            options = Options(config.serve.slots, config.serve.queue, config.serve.swap, config.serve.drain_s)
            if config.serve.group > 1:
                from .stages import Spec, Stages

                cut, threads = config.worker.cut, config.serve.threads
                with user_code():
                    stages = Stages(task, Spec(spec, config.serve.group, cut, options.slots, threads), failed)
                engine = Engine(task, stages.models, stages.kind, options, stages)
            else:
                with user_code():
                    models = [task.model() for _ in range(NUM_SLOTS)]
                engine = Engine(task, models, language_model(task, models[0]), options)
            follower = Follower(engine, source, every(config.serve.every), failed)
            http.start(make_app(Service(name, engine, follower, source, config.serve.max_tokens)))
            running.callback(http.close)
            engine.start()
            running.callback(engine.close)
            if config.serve.group > 1:
                stages.start()
                running.callback(stages.close)
            follower.start()
            running.callback(follower.close)
            log.info("serve", url=http.url("/"), task=name, swap=config.serve.swap, slots=config.serve.slots)
            if sys.stderr.isatty():
                print(f"open {http.url_with_token('/')}", file=sys.stderr)
            stopped.wait()
    except UserCodeError as error:
        sys.stderr.write(format_user_traceback(error))
        raise SystemExit(1) from None
    if failures:
        raise failures[0]


def _source(resolved: Resolved, run: str | None, file: Path | None) -> tuple[str, TaskSpec, Source]:
    """Return the name of the task, how to load it, and the source of its weights."""
    from ..worker.conversation.reader import Reader
    from .source import LiveRun, WeightsFile

    if file is not None:
        name = resolved.config.task.name
        return name, _task(resolved, name, {}), WeightsFile(file, file.stem)
    if run is not None:
        return _recorded(resolved, run)
    reader = Reader(resolved.config, secrets.token_hex(8))
    source, log, is_waiting = LiveRun(reader), get_logger(), False
    while (standing := source.look()) is None:
        if not is_waiting:
            log.info("waiting_for_server", address=resolved.config.worker.server)
            is_waiting = True
        reader.check_connection()
    settings = standing.settings
    name = settings.task or resolved.config.task.name
    return name, _task(resolved, settings.task, settings.task_args or {}), source


def _recorded(resolved: Resolved, wanted: str) -> tuple[str, TaskSpec, Source]:
    from ..common.runstore.reading import RunStore
    from ..common.runstore.schema import FILE
    from .source import WeightsFile

    with RunStore(Path(resolved.config.output.track_dir) / FILE) as store:
        found = store.find(wanted)
        settings = store.config(found).get("task", {})
        path, version = _newest(store, found)
    name = settings.get("name", "")
    return name, _task(resolved, name, settings.get("args") or {}), WeightsFile(path, found.label, version)


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


def _task(resolved: Resolved, name: str, args: dict[str, Any]) -> TaskSpec:
    """Return the task that the command line names, or else the built-in task that the run names."""
    from .task import TaskSpec

    task = resolved.config.task
    if resolved.was_set("task.name"):
        return TaskSpec(task.name, task.args)
    if not name:
        raise UsageError(
            "the run's task is a file, and a file is never taken from a run", fix="add --task FILE.py:NAME"
        )
    return TaskSpec(name, task.args, args)


def main() -> None:
    """Entry point of `ps-serve`."""
    run_command(SERVE, serve)
