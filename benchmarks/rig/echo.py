"""A bare ping-pong to compare with a small exchange: a grpc.aio echo server, a synchronous stream.

The server is a process of its own; the client is made as the worker's is (worker/conversation/stream_client.py), so
what lies between the two metrics is ours.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio

from ...common.errors import ParamServerError

_METHOD = ("paramserver.Echo", "Stream")
_START_S = 60.0


class EchoStream:
    """An open stream to the echo server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call: Any = channel.stream_stream(f"/{'/'.join(_METHOD)}")(iter(self._outgoing.get, None))

    def ping(self, payload: bytes) -> bytes:
        """Send, and wait for the echo."""
        self._outgoing.put(payload)
        reply: bytes = next(self._call)
        return reply

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()


@contextmanager
def echo_stream() -> Iterator[EchoStream]:
    """A stream to an echo server that lives as long as the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise ParamServerError(f"the echo server did not start within {_START_S:g} s")
        with grpc.insecure_channel(f"127.0.0.1:{ours.recv()}") as channel:
            stream = EchoStream(channel)
            try:
                yield stream
            finally:
                stream.close()
    finally:
        ours.close()  # which the server takes as its end
        process.join(_START_S)
        if process.is_alive():
            process.kill()


def _serve(parent: Connection) -> None:
    asyncio.run(_serve_until_closed(parent))


async def _serve_until_closed(parent: Connection) -> None:
    async def echo(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    service, method = _METHOD
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    parent.send(port)
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(parent.fileno(), closed.set)
    await closed.wait()
    await server.stop(None)
