"""ps-server: the command, and the server's life from listening to the last summary."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import shlex
import signal
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from ..common.config import quiet  # noqa: F401  (before the slow imports)

# isort: split
from ..common.config import cli
from ..common.config.option import SERVER
from ..common.config.preflight import check_optimizer, check_resume
from ..common.config.schema import Config
from ..common.config.sources import Resolved
from ..common.errors import UsageError
from ..common.reporting.log import get_logger, setup_logging
from ..common.security import check_exposure, read_token

if TYPE_CHECKING:
    from .server import Server
    from .shards.server import ShardServer

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def serve(
    flags: cli.Flags,
    config: cli.ConfigOption = None,
    sets: cli.SetOption = None,
    print_config: cli.PrintConfigOption = False,
) -> None:
    """Serve the weights and the optimizer of a training run to its workers.

    Examples

      ps-server --mode ssp                        then: ps-worker --rank 0, ps-worker --rank 1, ...
      ps-server --mode sync --workers 4 --steps 1000 --optimizer adamw --lr 1e-3
      ps-server --mode localsgd --local-steps 16 --save weights.safetensors
    """
    resolved = cli.resolve(config, flags, sets, print_config)
    resolved.check_options([resolved.config.run.mode])
    check_before_loading(resolved.config)
    setup_logging(resolved.config.log, SERVER)
    for key in resolved.unread([resolved.config.run.mode]):
        message = f"mode {resolved.config.run.mode} has no such option, so it has no effect"
        # No warning for files, since one file may serve several modes, as in configs/.
        say = get_logger().debug if ":" in resolved.origins[key] else get_logger().warning
        say("unread_option", key=key, source=resolved.origins[key], meaning=message)
    asyncio.run(_serve(resolved))


def check_before_loading(config: Config) -> None:
    """Raise errors that would otherwise end the server once torch is loaded, or only after training."""
    from ..common.reporting.output import check_writable

    check_optimizer(config.optimizer.name)
    check_resume(config.checkpoint)
    best = config.output.best if config.run.eval_every is not None else None
    for path in (config.output.save, config.output.summary, config.output.curve, best):
        if path is not None:
            check_writable(path)
    has_token, otherwise = read_token(config.security) is not None, "on one machine listen on 127.0.0.1"
    check_exposure("the server", config.server.listen, config, has_token=has_token, otherwise=otherwise)
    if config.run.epochs is not None and config.run.workers is None:
        problem = f"run.epochs is {config.run.epochs}: the length of an epoch depends on the number of workers"
        raise UsageError(problem, fix="add --workers N, or give the length with --steps")


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Silence gRPC's reports of calls that end together with the server, which are not errors."""
    if not issubclass(kind, asyncio.CancelledError):
        sys.__excepthook__(kind, error, trace)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    if not issubclass(unraisable.exc_type, asyncio.CancelledError):
        sys.__unraisablehook__(unraisable)


def _keep_memory() -> None:
    """Keep freed memory in the process, and switch threads more often.

    glibc's defaults return every freed reply to the kernel, which costs an exchange of 100 MB 4,000 to 14,000 page
    faults, 10 to 20 ms. Other threads wait 0.5 ms instead of 5 for the GIL of a thread that frames a reply.
    """
    sys.setswitchinterval(0.0005)
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_ARENA_MAX, 1)


class _Signals:
    """Stops the server on SIGINT and SIGTERM, even while it loads. The second signal ends the process at once.

    So does the first while a relay joins the run above (`is_joining`), which may take long.

    asyncio's own handlers would interrupt unfinished work, so the event loop handles the signals.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_joining = False
        self.server: Server | ShardServer | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)

    def _hear(self, number: int) -> None:
        self.received.append(number)
        if len(self.received) > 1 or self.is_joining:
            os._exit(128 + number)
        if self.server is not None:
            self.server.stop_requested.set()

    def end(self) -> None:
        """Stop interrupting the loop, which is about to be closed."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


async def _serve(resolved: Resolved) -> None:
    # torch and gRPC take a second to load, so the configuration is checked first.
    signals = _Signals()
    sys.excepthook, sys.unraisablehook = _uncaught, _unraisable
    cli.before_torch()
    gc.disable()
    _keep_memory()
    # Raise the limit of open files to the system's maximum. With the usual limit of 1,024, 1,500 silent connections
    # prevented workers from connecting.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    from ..common.tensors.optimizers import without_compiler
    from .server import check_before_start
    from .snapshots.available import locked_dir
    from .snapshots.files import sole_server

    cli.after_torch()
    without_compiler()
    check_before_start(resolved.config)
    try:
        with sole_server(locked_dir(resolved.config)):
            await _serve_alone(resolved.config, signals)
    finally:
        signals.end()


async def _serve_alone(config: Config, signals: _Signals) -> None:
    """Serve until the run is over or a signal ends it. A new server replaces one that goes back to a snapshot."""
    from .server import Server
    from .shards.server import ShardServer

    server: Server | ShardServer
    if config.upstream.server is not None:
        from ..relay.server import relay_server

        signals.is_joining = True
        server = await relay_server(config)
        signals.is_joining = False
    else:
        server = Server(config) if config.server.shard == 0 else ShardServer(config)
    signals.server = server
    await server.start()
    await server.serve()
    while server.goes_back and not signals.received:
        # Keep the addresses, because workers, shards and browsers connect to them again.
        dashboard = (isinstance(server, Server) and server.engine.dashboard) or config.server.web
        listening = config.server.model_copy(update={"listen": server.address, "web": dashboard})
        config = config.model_copy(update={"server": listening})
        signals.server = server = server.after(config)
        await server.start()
        await server.serve()
    if signals.received:
        how = {"signal": signal.Signals(signals.received[0]).name}
        if config.checkpoint.dir is not None and config.log.format != "json":
            how |= {"snapshots": config.checkpoint.dir, "to_go_on": shlex.join((SERVER, *sys.argv[1:]))}
        get_logger().info("stopped", **how)
        raise KeyboardInterrupt if signals.received[0] == signal.SIGINT else cli.Drained


def main() -> None:
    """Entry point of `ps-server`."""
    cli.run_command(SERVER, serve)


if __name__ == "__main__":
    main()
