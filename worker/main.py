"""ps-worker: the command around the training loop."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

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
from ..common.config.flags import flag_name, flags_of
from ..common.config.launchers import engine_settings
from ..common.config.option import WORKER
from ..common.config.preflight import check_device, check_task, check_weights
from ..common.config.schema import Config
from ..common.config.sources import Resolved
from ..common.errors import UsageError
from ..common.reporting.log import get_logger, setup_logging
from .conversation import threads

if TYPE_CHECKING:
    import torch

    from .conversation.messages import Settings
    from .tasks.base import Task


def work(
    flags: Flags, config: ConfigOption = None, sets: SetOption = None, print_config: PrintConfigOption = False
) -> None:
    """Train a task on this machine, as one worker of a run.

    Examples

      ps-worker --rank 0                                    with ps-server on this machine
      ps-worker --rank 1 --server 10.0.0.1:50051
      ps-worker --rank 0 --task my_task.py:MyTask --device cuda:0
      ps-worker --server none --task digits                 alone, without a server

    Started by an engine, which sets the rank (docs/engines.md)

      torchrun --nproc-per-node 4 -m paramserver.worker            four workers
      torchrun --nproc-per-node 4 -m paramserver.worker --group    one worker of four processes
      srun -n 4 ps-worker
      mpirun -n 4 ps-worker
    """
    resolved = resolve(config, flags, sets, print_config, is_worker=True)
    alone = [flag_name(key, info) for key, (info, flag) in flags_of(WORKER).items() if flag.is_for_alone and flags[key]]
    if resolved.config.worker.evaluate:
        alone = [name for name in alone if name != "--eval-every"]
    if alone and resolved.config.worker.server != "none":
        message = f"{', '.join(alone)}: with a server, this is an option of ps-server"
        raise UsageError(message, fix=f"ps-server {alone[0]} ..., or train alone with --server none")
    # Before torch is loaded and the server is contacted.
    check_device(resolved.config.worker.device)
    task = resolved.config.task
    if resolved.was_set("task.name"):
        check_task(task.name, task.args if resolved.was_set("task.args") else {})
    if task.init is not None:
        check_weights(task.init)
    setup_logging(resolved.config.log, WORKER)
    _say_place(resolved)
    threads.install({signal.SIGTERM: Drained, signal.SIGINT: KeyboardInterrupt})
    _work(resolved)


def _say_place(resolved: Resolved) -> None:
    """Log which engine set the rank. In a job within a job this explains an unexpected rank."""
    engine = engine_settings(os.environ, resolved.config.worker.group)
    rank = engine.settings.get("worker.rank")
    if rank is None or resolved.origins.get("worker.rank") != f"environment {rank.name}":
        return
    worker = resolved.config.worker
    details: dict[str, Any] = {"server": worker.server, "engine": engine.engine}
    if engine.overruled:
        details["overruled"] = ", ".join(engine.overruled)
    if engine.restarts not in ("", "0"):
        details["restarts"] = engine.restarts
    say = get_logger().info if engine.overruled else get_logger().routine
    say("place", rank=worker.rank, workers=resolved.config.run.workers, **details)


def _work(resolved: Resolved) -> None:
    # Load torch and gRPC, which take seconds, only after the configuration was checked.
    before_torch()
    gc.disable()
    import torch

    from ..common.reporting.output import check_writable
    from ..common.tensors.optimizers import without_compiler
    from ..common.user_code import UserCodeError, format_user_traceback
    from .api import open_session
    from .conversation.evaluator import Evaluator
    from .trainer import choose_device, train
    from .training.alone import AloneSession
    from .training.tasks.evaluator import evaluate_for

    after_torch()
    config: Config = resolved.config
    without_compiler()
    device = choose_device(config.worker.device, config.worker.local_rank)
    if config.worker.threads is not None:
        torch.set_num_threads(config.worker.threads)
    for path in (config.output.save, config.output.summary, config.output.curve):
        if path is not None and config.worker.server == "none":
            check_writable(path)
    try:
        if config.worker.evaluate:
            evaluator = Evaluator(config)
            evaluate_for(evaluator, _load_task(resolved, evaluator.settings, device)[0], device, config.run.eval_every)
            return
        session = open_session(config, overlap=True)
        # with a JSON log, programs get these events from the server
        say = get_logger().info if config.log.format == "text" and not session.group_rank else None
        with session:
            task, name, args = _load_task(resolved, session.settings, device)
            session.work.set_task(config, name, args)
            batch_size = config.run.batch_size if resolved.was_set("run.batch_size") else session.settings.batch_size
            recorded = session.alone.recorded(session.metrics) if isinstance(session, AloneSession) else nullcontext()
            with recorded:
                train(session, task, batch_size, device, say, config.task.init, config.loader.options())
    except UserCodeError as error:
        sys.stderr.write(format_user_traceback(error))
        get_logger().routine("uncaught")
        raise SystemExit(1) from None


def _load_task(resolved: Resolved, settings: Settings, device: torch.device) -> tuple[Task, str, dict[str, Any]]:
    """Load the worker's own task if it has one, otherwise the built-in task that the server names.

    Returns the task, its name and its arguments.
    """
    from .training.tasks.loading import load_named_by_server, load_task

    task, seed = resolved.config.task, settings.seed
    if resolved.was_set("task.name"):
        return load_task(task.name, task.args, seed=seed, device=device), task.name, task.args
    if not settings.task:
        message = "the run's task is a file, and a worker never takes a file from a server"
        raise UsageError(message, fix="give --task FILE.py:NAME to this worker")
    given = settings.task_args or {}
    loaded = load_named_by_server(settings.task, given, task.args, seed=seed, device=device)
    return loaded, settings.task, given | task.args


def main() -> None:
    """Entry point of `ps-worker`."""
    run_command(WORKER, work)
