"""Runs the parts of one serving process: source, follower, engine, stages and HTTP server."""

from __future__ import annotations

import gc
import os
import secrets
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common.config.cli import after_torch, before_torch
from ..common.config.conditions import every
from ..common.config.schema import Config
from ..common.errors import UsageError
from ..common.reporting.log import get_logger, setup_logging

if TYPE_CHECKING:
    from torch import nn

    from ..worker.conversation.messages import StatusReply
    from .source import LiveRun, Source
    from .task import TaskSpec


class Served(NamedTuple):
    """A task, the source of its weights, and how another process loads the task (None: it cannot)."""

    name: str
    task: Any
    source: Source
    spec: TaskSpec | None = None


def run(config: Config, load: Callable[[], Served]) -> None:
    """Serve until an error ends a part of it, or forever. `load` may wait for a server."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UsageError("ps-serve needs starlette and uvicorn", fix="pip install 'paramserver[serve]'") from None
    before_torch()
    gc.disable()
    import torch

    from ..web.http import HttpServer
    from .app import Service, rules
    from .source import Follower

    after_torch()
    settings = config.serve
    torch.set_num_threads(settings.threads)
    http = HttpServer(settings.listen, config, rules(settings), name="ps-serve", flag="--listen")
    stopped, failures = threading.Event(), list[Exception]()

    def failed(error: Exception) -> None:
        failures.append(error)
        stopped.set()

    with ExitStack() as running:
        served = load()
        running.callback(served.source.close)
        served.source.averaged_buffers = getattr(served.task, "averaged_buffers", ())
        engine, stages = _engine(config, served, failed)
        follower = Follower(engine, served.source, every(settings.every), failed)
        http.start(Service(served.name, engine, follower).app())
        running.callback(http.close)
        for part in (engine, stages, follower):
            if part is not None:
                part.start()
                running.callback(part.close)
        get_logger().info("serve", url=http.url("/"), task=served.name, swap=settings.swap, slots=settings.slots)
        if sys.stderr.isatty():
            print(f"open {http.url_with_token('/')}", file=sys.stderr)
        stopped.wait()
    if failures:
        raise failures[0]


def _engine(config: Config, served: Served, failed: Callable[[Exception], None]) -> tuple[Any, Any]:
    """Return the engine, and the stages of its model, if there are several."""
    from ..common.user_code import user_code
    from .engine import Engine
    from .models import language_model

    settings, task = config.serve, served.task
    if settings.group == 1:
        models = _Models(task)
        return Engine(task, models, language_model(task, models[0]), settings), None
    if served.spec is None:
        message = f"serve.group is {settings.group}, and other processes cannot load the model of a script"
        raise UsageError(message, fix="put it into a task: ps-serve --task FILE.py:NAME --group G")
    from .stages import Spec, Stages

    spec = Spec(
        served.spec, settings.group, config.worker.cut, settings.slots, settings.threads, settings.stage_silence_s
    )  # fmt: skip
    with user_code():
        stages = Stages(task, spec, failed)
    return Engine(task, stages.models, stages.kind, settings, stages), stages


class _Models(dict[int, Any]):
    """The model of each slot, made when it is first used: a file needs one, and a run three."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def __missing__(self, slot: int) -> nn.Module:
        from ..common.user_code import user_code

        with user_code():
            self[slot] = found = self._task.model()
        return found


def wait_for_run(config: Config) -> tuple[LiveRun, StatusReply]:
    """Return the run at worker.server and where it stands, once its server replies."""
    from ..worker.conversation.exchange import Reader
    from .source import LiveRun

    reader = Reader(config, secrets.token_hex(8))
    source, is_waiting = LiveRun(reader), False
    while (standing := source.look()) is None:
        if not is_waiting:
            get_logger().info("waiting_for_server", address=config.worker.server)
            is_waiting = True
        reader.check_connection()
    return source, standing


def serve_model(
    model: Callable[[], nn.Module], weights: str | None = None, *, listen: str | None = None, **members: Any
) -> None:
    """Serve a model from a script, as `ps-serve` does. Blocks until it is interrupted.

    `model` returns a new model. `weights` is a file (.safetensors), or the address of a run's server, HOST:PORT; none:
    PS_SERVER. `members` are those of a task (docs/serving.md): encode and decode, context, cache_shape, end, chat; or
    predict. Environment variables PS_SECTION__KEY can set every setting. Raises ParamServerError.
    """
    import structlog

    from ..common.config.sources import load_config
    from .source import WeightsFile

    file = weights if weights is not None and weights.endswith(".safetensors") else None
    flags = {"worker.server": weights if file is None else None, "serve.listen": listen}
    resolved = load_config(None, flags, [], os.environ)
    if not structlog.is_configured():
        setup_logging(resolved.config.log, "script")
    if file is None and not resolved.was_set("worker.server"):
        raise UsageError("no weights to serve", fix="give HOST:PORT or FILE.safetensors to serve_model(), or PS_SERVER")
    task = type("ScriptTask", (), {"model": staticmethod(model)})()
    vars(task).update(members)

    def load() -> Served:
        source = wait_for_run(resolved.config)[0] if file is None else WeightsFile(Path(file), Path(file).stem)
        return Served("model", task, source)

    run(resolved.config, load)
