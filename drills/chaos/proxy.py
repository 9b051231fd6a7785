"""A controlled network for a job: an HTTP proxy that tunnels (CONNECT).

gRPC uses it when `grpc_proxy` is in the environment, so the processes and the launcher need no change. It injects
faults into the connections of a process (of a worker, or of a shard to the coordinator):

    block, unblock        no data passes, in one direction or both; new connections hang too
    reset                 both ends get a TCP reset
    cut                   reset after a number of bytes from the process
    delays                all data is delayed (slow); some data is delayed as after a lost packet (loss)
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ...common.config.addresses import split_address
from ...common.errors import UsageError
from ...launch.plan.hosts import Child

_PIECE_BYTES = 1 << 16
_HEAD_TIMEOUT_S = 10.0
_DELAY_S = 0.02
_STALL_SHARE = 0.05
_RETRANSMIT_S = 0.2  # minimum retransmission timeout of TCP (Linux)
UP, DOWN = "up", "down"  # from the process that has connected, to it


@dataclass(eq=False)
class _Link:
    """One tunnelled connection of `child` (None: unknown) to a `port`."""

    child: Child | None
    port: int = 0
    writers: dict[str, asyncio.StreamWriter] = field(default_factory=dict)  # by the direction they write in
    cut_after: int | None = None  # bytes still to pass up

    def reset(self) -> None:
        for writer in self.writers.values():
            connection = writer.get_extra_info("socket")
            with suppress(OSError):  # closed already
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Network:
    """The proxy. `child_of(port)` returns the process that has connected from a local port."""

    def __init__(self, child_of: Callable[[int], Child | None], seed: int) -> None:
        self.address = ""
        self.num_bytes = 0
        self.delays: Counter[str] = Counter()  # active faults that delay data: all (slow), or some (loss)
        self._child_of = child_of
        self._chance = random.Random(seed)
        self._links: dict[_Link, asyncio.Task[None]] = {}  # with the task that serves each
        self._blocked: Counter[tuple[Child | None, str]] = Counter()  # count by process (None: all) and direction
        self._changed = asyncio.Event()
        self._server: asyncio.Server

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        self._server.close()
        for link, task in self._links.items():
            task.cancel()
            link.reset()
        await asyncio.gather(*self._links.values(), return_exceptions=True)

    # ---- faults ------------------------------------------------------------------

    def block(self, child: Child | None, *directions: str) -> None:
        self._blocked.update((child, direction) for direction in directions)

    def unblock(self, child: Child | None, *directions: str) -> None:
        self._blocked.subtract((child, direction) for direction in directions)
        self._changed.set()
        self._changed = asyncio.Event()

    def reset(self, child: Child | None, port: int | None = None) -> int:
        """Reset the connections of a process (None: all) to a port (None: all), and return their number."""
        links = [link for link in self._of(child) if port is None or link.port == port]
        for link in links:
            link.reset()
        return len(links)

    def cut(self, child: Child, num_bytes: int) -> None:
        for link in self._of(child):
            link.cut_after = num_bytes

    def _of(self, child: Child | None) -> list[_Link]:
        return [link for link in self._links if child is None or link.child == child]

    # ---- tunnels ---------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        link = _Link(self._child_of(writer.get_extra_info("peername")[1]), writers={DOWN: writer})
        self._links[link] = task
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_TIMEOUT_S)
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
            if method == "CONNECT":
                await self._tunnel(link, reader, target)
        except* (OSError, EOFError, ValueError, UsageError, TimeoutError, asyncio.LimitOverrunError):
            pass  # either end is closed, or does not speak HTTP
        finally:
            link.reset()
            del self._links[link]

    async def _tunnel(self, link: _Link, reader: asyncio.StreamReader, target: str) -> None:
        await self._pass(link, UP)
        await self._pass(link, DOWN)
        host, link.port = split_address(target)
        from_server, link.writers[UP] = await asyncio.open_connection(host, link.port)
        link.writers[DOWN].write(b"HTTP/1.1 200 OK\r\n\r\n")
        # A process that ends closes its direction; the bytes that it has sent still arrive.
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(self._pump(link, reader, UP))
            pumps.create_task(self._pump(link, from_server, DOWN))

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, direction: str) -> None:
        writer = link.writers[direction]
        while piece := await reader.read(_PIECE_BYTES):
            await self._pass(link, direction)
            if self.delays["slow"]:
                await asyncio.sleep(_DELAY_S * self.delays["slow"])
            if self.delays["loss"] and self._chance.random() < _STALL_SHARE * self.delays["loss"]:
                await asyncio.sleep(_RETRANSMIT_S)
            if direction == UP and link.cut_after is not None:
                if len(piece) >= link.cut_after:
                    writer.write(piece[: link.cut_after])
                    raise ConnectionResetError
                link.cut_after -= len(piece)
            self.num_bytes += len(piece)
            writer.write(piece)
            await writer.drain()
        await self._pass(link, direction)
        if writer.can_write_eof():
            writer.write_eof()

    async def _pass(self, link: _Link, direction: str) -> None:
        """Wait while the direction is blocked for this process."""
        while self._blocked[None, direction] > 0 or self._blocked[link.child, direction] > 0:
            await self._changed.wait()
