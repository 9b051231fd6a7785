"""The rendezvous store: keys and values by which peers find each other, for those that know the generation's secret.

torch's own TCPStore listens on every address and lets everybody list, read and write its keys. This store listens on
one address. It talks to a client only after both have proved that they know the secret (`handshake.py`), and shows it
the keys of that generation alone. A silent connection delays nobody: all are served side by side, and a connection
without a proof is closed after `_HANDSHAKE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ....common.wire.json_text import read_json
from .cut import Address
from .handshake import Greeting, Hello, Kind, connect, digest, read, read_async

_HANDSHAKE_S = 15.0  # for a connection to prove itself; the server may hear of a generation later than its members
_MAX_UNPROVEN = 256  # connections; the oldest of more is closed
_MAX_GENERATIONS = 4  # that are kept, the newest
_MAX_MESSAGE = 8 << 20
_LENGTH = struct.Struct("!I")
_LATE_S = 5.0  # for a reply, beyond the time that the request may take
_PAUSE_S = 0.1  # where no connection can be taken, for lack of descriptors


class _Generation:
    """The keys of one generation. Used by the server's thread alone."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._values: dict[str, str] = {}
        self._changed = asyncio.Event()

    async def reply(self, op: str, keys: list[str], value: str, timeout_s: float) -> Any:
        """ValueError for a request that there is not."""
        match op:
            case "set":
                return self._set(keys[0], value)
            case "add":
                total = int(self._values.get(keys[0], "0")) + int(value)
                self._set(keys[0], str(total))
                return total
            case "check":
                return all(key in self._values for key in keys)
            case "wait":
                return await self._come(keys, timeout_s)
            case "get":
                await self._come(keys, timeout_s)
                return self._values.get(keys[0])
            case "delete":
                return self._values.pop(keys[0], None) is not None
            case "count":
                return len(self._values)
            case other:
                raise ValueError(other)

    def _set(self, key: str, value: str) -> bool:
        self._values[key] = value
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

    async def _come(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys are there within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(key in self._values for key in keys):
                    await self._changed.wait()
        return all(key in self._values for key in keys)


class StoreServer:
    """Listens on `host` until `close`, on a thread of its own."""

    def __init__(self, host: str) -> None:
        """OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_UNPROVEN)
        self._listener.setblocking(False)
        self.address: Address = (host, self._listener.getsockname()[1])
        self.peers: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()  # rank, connection
        self._generations: dict[bytes, _Generation] = {}
        self._unproven: dict[asyncio.Task[None], None] = {}  # oldest first
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._admitted = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def admit(self, name: str, secret: bytes) -> None:
        """Members of the generation of this name, who know this secret, may connect from now on."""
        self._tell(lambda: self._admit(digest(name), secret))

    def close(self) -> None:
        self._tell(lambda: self._main.cancel())
        self._thread.join(_LATE_S)

    def _tell(self, work: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(work)

    # ---- on the server's thread -----------------------------------------------------------------

    def _run(self) -> None:
        self._main = self._loop.create_task(self._accept())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        tasks = [*self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self, name: bytes, secret: bytes) -> None:
        if name not in self._generations:
            self._generations[name] = _Generation(secret)
        while len(self._generations) > _MAX_GENERATIONS:
            del self._generations[next(iter(self._generations))]
        admitted, self._admitted = self._admitted, asyncio.Event()
        admitted.set()

    async def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(self._listener)
                except OSError:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                connection.setblocking(False)
                task = self._loop.create_task(self._serve(connection))
                self._serving.add(task)
                self._unproven[task] = None
                task.add_done_callback(partial(self._done, connection))
                if len(self._unproven) > _MAX_UNPROVEN:
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    oldest.cancel()
                await asyncio.sleep(0)  # or a flood of connections keeps this thread from all that are there

    def _done(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()
        self._serving.discard(task)
        self._unproven.pop(task, None)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                said, generation = await self._greet(connection)
            task = asyncio.current_task()
            assert task is not None
            self._unproven.pop(task, None)
            if said.kind == Kind.PEER:
                kept = socket.socket(fileno=connection.detach())
                kept.setblocking(True)
                self.peers.put((said.rank, kept))
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                reply = await generation.reply(*_request(await _message(connection)))
                await self._loop.sock_sendall(connection, _framed(reply))
        except (OSError, TimeoutError, ValueError):  # gone, silent, or does not speak as we do
            return

    async def _greet(self, connection: socket.socket) -> tuple[Hello, _Generation]:
        greeting = Greeting(connection)
        said = await greeting.hello()
        while (generation := self._generations.get(said.name)) is None:
            await self._admitted.wait()
        await greeting.prove(generation.secret)
        return said, generation


async def _message(connection: socket.socket) -> bytes:
    """OSError, ValueError."""
    (num_bytes,) = _LENGTH.unpack(await read_async(connection, _LENGTH.size))
    if num_bytes > _MAX_MESSAGE:
        raise ValueError(num_bytes)
    return await read_async(connection, num_bytes)


def _request(raw: bytes) -> tuple[str, list[str], str, float]:
    """Operation, keys, value, seconds. ValueError."""
    match read_json(raw):
        case {"op": str(op), "keys": [*keys], "value": str(value), "timeout_s": float(timeout_s)} if (
            keys or op == "count"
        ):
            return op, [str(key) for key in keys], value, timeout_s
    raise ValueError("no request of ours")


def _framed(told: Any) -> bytes:
    payload = json.dumps(told).encode()
    return _LENGTH.pack(len(payload)) + payload


_Base: Any = dist.Store if dist.is_available() else object  # StoreServer's user says what is missing


class Store(_Base):
    """A client of a StoreServer, as torch's process groups take one. Several threads may use it.

    A key that does not come in time raises dist.DistStoreError, a lost server another RuntimeError. torch keeps no
    reference to this object: who gives it to torch does."""

    def __init__(self, find: Callable[[], tuple[Address, bytes]], name: str, rank: int, timeout_s: float) -> None:
        """`find`, `name`: as in `handshake.connect`. `timeout_s`: for the connection, and for a key. Raises OSError."""
        super().__init__()
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._connection = connect(find, Kind.STORE, rank, name, timeout_s)

    def close(self) -> None:
        self._connection.close()

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self._ask("set", [key], value=raw.decode("latin-1"))  # JSON has no bytes

    def get(self, key: str) -> bytes:
        found = self._ask("get", [key], timeout_s=self._timeout_s)
        if found is None:
            raise dist.DistStoreError(f"'{key}' did not come in {self._timeout_s:g} s")
        return str(found).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], value=str(amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(not keys or self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if keys and not self._ask("wait", list(keys), timeout_s=timeout_s):
            raise dist.DistStoreError(f"{', '.join(keys)} did not come in {timeout_s:g} s")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        return int(self._ask("count", []))

    def _ask(self, op: str, keys: Sequence[str], *, timeout_s: float = 0.0, value: str = "") -> Any:
        request = _framed({"op": op, "keys": keys, "timeout_s": float(timeout_s), "value": value})
        try:
            with self._lock:
                self._connection.settimeout(timeout_s + _LATE_S)
                self._connection.sendall(request)
                (num_bytes,) = _LENGTH.unpack(read(self._connection, _LENGTH.size))
                return read_json(read(self._connection, num_bytes))
        except OSError as error:
            self._connection.close()
            raise dist.DistNetworkError(f"the rendezvous store is gone: {error}") from None
