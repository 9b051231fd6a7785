"""Proof that two processes know the same secret, before either tells the other anything else.

    client                                        server
    HELLO: kind, rank, name, nonce           ->
                                             <-   nonce, HMAC(secret, "server" + HELLO + nonce)
    HMAC(secret, "client" + HELLO + nonce)   ->

The secret itself is never sent. What follows on the connection is plain TCP, as Gloo's own traffic is.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from .cut import Address

NONCE_BYTES = PROOF_BYTES = 32
_MAGIC = b"psr1"
_HELLO = struct.Struct("!4sBH32s32s")
_PAUSE_S = 0.02  # between two attempts to connect
_ATTEMPT_S = 5.0  # for one attempt


class Kind(IntEnum):
    """What the client wants to use the connection for."""

    STORE = 0  # requests to the store
    PEER = 1  # the server's process keeps the connection


class Refused(OSError):
    """The other side is not one of this run's processes."""


class Hello(NamedTuple):
    kind: Kind
    rank: int
    name: bytes  # digest of the generation's name


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def connect(
    find: Callable[[], tuple[Address, bytes]], kind: Kind, rank: int, name: str, timeout_s: float
) -> socket.socket:
    """Returns a blocking connection to a server that knows the secret, and has seen that this process does.

    `find` returns the server's address and the secret; it is asked before each attempt. Raises OSError when no attempt
    succeeds within `timeout_s`."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            address, secret = find()
            return _connected(address, secret, Hello(kind, rank, digest(name)), max(0.01, until - time.monotonic()))
        except OSError:
            if time.monotonic() + _PAUSE_S >= until:
                raise
        time.sleep(_PAUSE_S)


def _connected(address: Address, secret: bytes, said: Hello, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(address, min(_ATTEMPT_S, timeout_s))
    try:
        connection.settimeout(timeout_s)  # the server may hear of this generation later than this process
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _HELLO.pack(_MAGIC, said.kind, said.rank, said.name, secrets.token_bytes(NONCE_BYTES))
        connection.sendall(hello)
        reply = read(connection, NONCE_BYTES + PROOF_BYTES)
        nonce, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"server", hello, nonce)):
            raise Refused("the process there does not know the secret of this generation")
        connection.sendall(_proof(secret, b"client", hello, nonce))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def read(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes. OSError."""
    found = bytearray()
    while len(found) < num_bytes:
        piece = connection.recv(num_bytes - len(found))
        if not piece:
            raise ConnectionError("the connection was closed")
        found += piece
    return bytes(found)


class Greeting:
    """The server's side, on an event loop. `connection` does not block."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._hello = b""

    async def hello(self) -> Hello:
        """Read the client's first message. OSError."""
        self._hello = await read_async(self._connection, _HELLO.size)
        magic, kind, rank, name, _ = _HELLO.unpack(self._hello)
        if magic != _MAGIC or kind not in list(Kind):
            raise Refused("no client of ours")
        return Hello(Kind(kind), rank, name)

    async def prove(self, secret: bytes) -> None:
        """Show that this process knows the secret, and see that the client does. Refused."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, nonce + _proof(secret, b"server", self._hello, nonce))
        proof = await read_async(self._connection, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"client", self._hello, nonce)):
            raise Refused("the client does not know the secret")


async def read_async(connection: socket.socket, num_bytes: int) -> bytes:
    """As `read`, for a connection that does not block."""
    loop, found = asyncio.get_running_loop(), bytearray()
    while len(found) < num_bytes:
        piece = await loop.sock_recv(connection, num_bytes - len(found))
        if not piece:
            raise ConnectionError("the connection was closed")
        found += piece
    return bytes(found)


def _proof(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + hello + nonce, "sha256")
