"""ps-server: the command, and the server's life from listening to the last summary."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import Annotated, Any

import typer

from ..common.config.cli import (
    ConfigOption,
    Drained,
    PrintConfigOption,
    SetOption,
    before_torch,
    make_app,
    resolve,
    run_app,
)
from ..common.config.schema import Config
from ..common.config.sources import Resolved
from ..common.reporting.log import get_logger, setup_logging

_HELP = """Hold the weights and the optimizer; let workers train.

[bold]Examples[/bold]

  ps-server --mode ssp                        then: ps-worker --rank 0, ps-worker --rank 1, ...
  ps-server --mode sync --workers 4 --steps 1000 --optimizer adamw --lr 1e-3
  ps-server --mode localsgd --local-steps 16 --save weights.safetensors
"""

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

app = make_app(_HELP)


@app.command()
def serve(
    config: ConfigOption = None,
    mode: Annotated[str | None, typer.Option(help="sync, async, ssp or localsgd", rich_help_panel="Run")] = None,
    staleness: Annotated[
        int | None, typer.Option(help="ssp: steps ahead of the slowest", rich_help_panel="Run")
    ] = None,
    local_steps: Annotated[int | None, typer.Option(help="localsgd: steps per round", rich_help_panel="Run")] = None,
    pipelined: Annotated[
        bool | None, typer.Option("--pipelined", help="workers compute during exchanges", rich_help_panel="Run")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="wait for this many", rich_help_panel="Run")] = None,
    steps: Annotated[int | None, typer.Option(help="training steps per worker", rich_help_panel="Run")] = None,
    batch_size: Annotated[int | None, typer.Option(help="samples per worker and step", rich_help_panel="Run")] = None,
    seed: Annotated[int | None, typer.Option(help="initial weights, data order", rich_help_panel="Run")] = None,
    task: Annotated[str | None, typer.Option(help="a built-in task for the workers", rich_help_panel="Run")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam, adamw, ...", rich_help_panel="Run")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate", rich_help_panel="Run")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="port 0: a free one")] = None,
    shard: Annotated[
        int | None, typer.Option(metavar="I", help="which shard this is; 0 coordinates", rich_help_panel="Shards")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(metavar="S", help="servers the model is divided among", rich_help_panel="Shards")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="where shard 0 listens", rich_help_panel="Shards")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="where workers reach this shard", rich_help_panel="Shards")
    ] = None,
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="answer Prometheus there")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="listen to other machines in the clear")] = None,
    save: Annotated[str | None, typer.Option(help="final weights, .safetensors")] = None,
    summary: Annotated[str | None, typer.Option(help="results as JSON")] = None,
    history: Annotated[str | None, typer.Option(help="what was applied when, JSON lines")] = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="keep snapshots here, and go on from them", rich_help_panel="Safety"),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="STEPS", help="training steps between two snapshots", rich_help_panel="Safety")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="latest|never|PATH", help="where to go on from", rich_help_panel="Safety")
    ] = None,
    ca: Annotated[str | None, typer.Option(help="trusted certificates, PEM", rich_help_panel="Safety")] = None,
    cert: Annotated[str | None, typer.Option(help="the server's certificate, PEM", rich_help_panel="Safety")] = None,
    key: Annotated[str | None, typer.Option(help="its key, PEM", rich_help_panel="Safety")] = None,
    token_file: Annotated[
        str | None, typer.Option(help="the token workers must have; or PS_TOKEN", rich_help_panel="Safety")
    ] = None,
    sets: SetOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Hold the weights and the optimizer; let workers train."""
    flags: dict[str, Any] = {
        "run.mode": mode, "policy.staleness": staleness, "policy.local_steps": local_steps,
        "policy.pipelined": pipelined or None, "run.workers": workers, "run.steps": steps,
        "run.batch_size": batch_size, "run.seed": seed, "task.name": task, "optimizer.name": optimizer,
        "optimizer.lr": lr, "server.listen": listen, "server.insecure": insecure or None, "server.shard": shard,
        "server.metrics": metrics,
        "server.shards": shards, "server.coordinator": coordinator, "server.advertise": advertise, "output.save": save,
        "output.summary": summary, "output.history": history, "checkpoint.dir": checkpoint_dir,
        "checkpoint.every_steps": checkpoint_every, "checkpoint.resume": resume, "security.ca": ca,
        "security.cert": cert, "security.key": key, "security.token_file": token_file,
    }  # fmt: skip
    resolved = resolve(config, flags, sets, print_config)
    setup_logging(resolved.config.log, "ps-server")
    asyncio.run(_serve(resolved))


def _allow_connections() -> None:
    """As many as the system lets this process have: with 1,024, as is common, 1,500 silent ones kept workers out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _keep_memory() -> None:
    """Freed memory stays with the process, in one heap, and large frames are not mapped anew each time.

    glibc's defaults give every freed reply back to the kernel: 4,000 to 14,000 page faults an exchange of
    100 MB, 10 to 20 ms. Threads take the GIL from one that frames a reply after 0.5 ms instead of 5.
    """
    sys.setswitchinterval(0.0005)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_ARENA_MAX, 1)


async def _serve(resolved: Resolved) -> None:
    # torch and gRPC take a second to load: only once the configuration has been found good.
    before_torch()
    _keep_memory()
    _allow_connections()
    from ..common.tensors.optimizers import without_compiler
    from .server import Server, check_before_start
    from .shards.server import ShardServer

    config: Config = resolved.config
    without_compiler()
    check_before_start(config)
    server: Server | ShardServer = Server(config) if config.server.shard == 0 else ShardServer(config)
    loop = asyncio.get_running_loop()
    stops: list[int] = []

    def stop(number: int) -> None:
        stops.append(number)
        if len(stops) > 1:
            os._exit(128 + number)  # the second signal means now
        server.stop_requested.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await server.start()
    await server.serve()
    while server.goes_back and not stops:
        # Where it listened: workers and shards look for it there.
        listening = config.server.model_copy(update={"listen": server.address})
        config = config.model_copy(update={"server": listening})
        server = server.after(config)
        await server.start()
        await server.serve()
    if stops:
        get_logger().info("stopped", signal=signal.Signals(stops[0]).name)
        raise KeyboardInterrupt if stops[0] == signal.SIGINT else Drained


def main() -> None:
    """Entry point of `ps-server`."""
    run_app(app, "ps-server")


if __name__ == "__main__":
    main()
