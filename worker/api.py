"""The API for a user's training script. The script changes in three lines.

    session = paramserver.connect("10.0.0.1:50051", rank=0)
    optimizer = session.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in session.shard(dataset, batch_size=32):
        ...; optimizer.zero_grad(); loss.backward(); optimizer.step()

Without a server address, here or in PS_SERVER, the same script trains alone.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import cast

import structlog

from ..common.config.schema import Config
from ..common.config.sources import load_config
from ..common.errors import ParamServerError, UsageError
from ..common.reporting.log import get_logger, setup_logging
from .ownership import ParentsSession, mark, parent_of
from .training.alone import AloneSession
from .training.ending import exit_at_once, watch_exit
from .training.session import Session
from .training.tasks.evaluator import EvaluatorSession

__all__ = ["Session", "connect", "open_session"]

# Settings, or beginnings of their names, with which a run with a server trains or writes otherwise.
_OF_SERVERS = (
    "checkpoint.", "limits.", "output.history", "output.save", "output.summary", "output.track", "policy.", "run.mode",
    "run.workers", "server.metrics", "server.web", "store.polyak", "upstream.", "worker.codec", "worker.reply_codec",
)  # fmt: skip
_REPLACED_HOOKS = ("sys", "torch.distributed.distributed_c10d")  # Python's own excepthook, and a process group's
_newest: dict[str, Session] = {}  # of this process, by server


def connect(address: str | None = None, rank: int | None = None) -> Session:
    """Join the run at `address` (or PS_SERVER) as `rank` (or PS_WORKER__RANK, or an engine's RANK).

    Without an address, train alone. Waits for the server up to worker.give_up_s, then raises UnreachableError.
    Environment variables PS_SECTION__KEY can set every setting.
    """
    if getattr(sys.excepthook, "__module__", "") in _REPLACED_HOOKS:
        sys.excepthook = _explain
        watch_exit()
    if not isinstance(address, str | None):
        message = f"connect() takes the address of a server, HOST:PORT, and a rank; got a {type(address).__name__}"
        raise UsageError(message, fix="session = paramserver.connect(), then session.optimizer(model, optimizer)")
    resolved = load_config(None, {"worker.server": address, "worker.rank": rank}, [], os.environ)
    if not structlog.is_configured():
        setup_logging(resolved.config.log, "script")
    worker = resolved.config.worker
    is_alone = not (resolved.was_set("worker.server") or worker.evaluate)
    unread = [key for key in resolved.origins if key.startswith(_OF_SERVERS)]
    if unread and (is_alone or worker.server == "none"):
        meaning = "this script trains alone, and only a run with a server reads these settings"
        get_logger().warning("unread_settings", keys=", ".join(unread), meaning=meaning, fix="ps-launch -n 1 train.py")
    if is_alone:
        return AloneSession(resolved.config)
    if not worker.evaluate:
        if (parent := parent_of(worker.rank, worker.server)) is not None:
            return cast("Session", ParentsSession(parent))
        if (earlier := _newest.get(worker.server)) is not None and earlier.is_open:
            message = "a second connect() to one server, while this process has an open session: a run trains one model"
            raise UsageError(message, fix="start a job for each model; if the run is to go on, session.close() first")
        mark(worker.rank, worker.server)
    if sys.excepthook is _explain:
        get_logger().routine("connecting")  # ps-launch: from here on an uncaught exception is reported as one
    session = open_session(resolved.config)
    if not worker.evaluate:
        _newest[worker.server] = session
    session.work.set_script(sys.argv)
    return session


def _explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report an uncaught ParamServerError as our programs do: a message with a fix, and the error's exit code."""
    if isinstance(error, KeyboardInterrupt):  # the traceback does not help, as it usually ends in a wait
        print("paramserver: interrupted", file=sys.stderr)
        return
    if not isinstance(error, ParamServerError):
        sys.__excepthook__(kind, error, traceback)
        if structlog.is_configured():
            get_logger().routine("uncaught")  # ps-launch: what follows is of exit handlers
        return
    exit_at_once(error)


def open_session(config: Config, overlap: bool = False) -> Session:
    """Open a session for a resolved configuration. With `worker.server: none` it trains alone.

    `overlap` is the default of worker.overlap. True is safe only for a loop that does not change gradients after
    backward.
    """
    if config.worker.server == "none" and config.worker.group:
        message = "worker.group without a server: each of its processes would train alone"
        raise UsageError(message, fix="--server HOST:PORT")
    if config.worker.evaluate and not config.worker.group:
        return EvaluatorSession(config)
    if config.worker.server == "none":
        return AloneSession(config)
    return Session(config, overlap)
