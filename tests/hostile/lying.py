"""A server that is none of ours: it welcomes whoever joins, and says what a test tells it to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from paramserver.common.wire.checks import struct
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.tests.cluster import run_forked

Script = Callable[[Iterator[bytes]], Iterator[bytes]]


def settings(**fields: Any) -> pb.RunSettings:
    """Those of an ordinary run, and what a test says differently."""
    ordinary: dict[str, Any] = {
        "mode": "async", "contribution": pb.RunSettings.GRADIENT, "num_workers": 1, "steps": 1, "batch_size": 2,
        "pull_every": 1, "task": "linear", "task_args": struct({"num_features": 2, "num_samples": 8}),
        "optimizer": pb.Optimizer(name="sgd", groups=[pb.ParameterGroup(hyperparameters=struct({"lr": 0.1}))]),
    }  # fmt: skip
    return pb.RunSettings(**(ordinary | fields))


def welcome(**fields: Any) -> pb.Welcome:
    ordinary: dict[str, Any] = {
        "run": "a-run", "incarnation": 1, "server_incarnation": 1, "lease_s": 5.0, "settings": settings(),
    }  # fmt: skip
    return pb.Welcome(**(ordinary | fields))


def welcoming(message: pb.Welcome, *more: pb.ServerMessage) -> Script:
    """It welcomes with this, and when it has heard what the worker trains says the rest."""

    def script(incoming: Iterator[bytes]) -> Iterator[bytes]:
        next(incoming)
        yield pb.ServerMessage(welcome=message).SerializeToString()
        if next(incoming, None) is None:
            return
        yield from (server_message.SerializeToString() for server_message in more)
        for _ in incoming:  # until the worker goes
            pass

    return script


@contextmanager
def lying_server(script: Script, heartbeat_replies: int = 1) -> Iterator[str]:
    """Its address. It replies each heartbeat with so many heartbeat_replies."""
    heartbeat_reply = pb.HeartbeatReply(lease_s=5.0, server_incarnation=1).SerializeToString()
    handlers: dict[str, Any] = {
        "Exchange": grpc.stream_stream_rpc_method_handler(lambda incoming, _: script(incoming)),
        "Heartbeat": grpc.stream_stream_rpc_method_handler(
            lambda heartbeats, _: (heartbeat_reply for _ in heartbeats for _ in range(heartbeat_replies))
        ),
    }
    server = grpc.server(futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


def run_worker(
    address: str, *flags: str, folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A real ps-worker, until it ends."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PS_", "RANK", "WORLD"))}
    argv = ("-m", "paramserver.worker", "--rank", "0", "--server", address, *flags)
    return run_forked(folder, *argv, environ=inherited | {"OMP_NUM_THREADS": "1", **(env or {})})
