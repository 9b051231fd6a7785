"""The rendezvous store: keys and values by which peers find each other. Only members who know the secret may use it.

torch's own TCPStore listens on every address, and everybody can list, read and write its keys. This store listens on
one address. It serves a client only after both sides have proved that they know the generation's secret. The client
sees only the keys of that generation. Each connection has its own thread, so a silent client delays nobody. The server
closes a connection without a proof after `_HANDSHAKE_S`.

    client                                        server
    HELLO: kind, rank, name, nonce           ->
                                             <-   nonce, HMAC(secret, "server" + HELLO + nonce)
    HMAC(secret, "client" + HELLO + nonce)   ->

The secret itself is never sent. After the handshake the connection is plain TCP, like Gloo's own traffic.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar

import torch.distributed as dist

from ....common.wire.json_text import read_json

# ---- ending a group's connections ----------------------------------------------------------------
# Ends the connections of a Gloo group while its members wait in a collective.
#
# A Gloo collective ends only when a connection of its group ends. After `abort()` it still waits for a member that
# hangs, up to its timeout. Gloo does not expose its connections. But each member's device listens on a new port of
# its own, and every connection of the group uses one of these ports.


Made = TypeVar("Made")
Address = tuple[str, int]

_one_at_a_time = threading.Lock()
_ATTEMPTS = 100
_OPEN = "/dev/fd"  # the open files of this process, on Linux and macOS


def listening(make: Callable[[], Made]) -> tuple[Made, int]:
    """Call `make`, which opens one listening socket. Returns the result and the port; 0: the port is unknown.

    If another thread opened a socket meanwhile, `make` is called again.
    """
    with _one_at_a_time:
        for _ in range(_ATTEMPTS):
            before = set(_listeners())
            made = make()
            found = {number: port for number, port in _listeners().items() if number not in before}
            if len(found) <= 1:
                break
    return made, next(iter(found.values())) if len(found) == 1 else 0


def cut(ends: set[Address]) -> None:
    """End all connections of this process that have one of these addresses at either end."""
    for item in _sockets():
        with item, suppress(OSError):  # a listening socket has no peer
            if ends & {_plain(item.getsockname()), _plain(item.getpeername())}:
                item.shutdown(socket.SHUT_RDWR)


def _plain(address: Any) -> Address:
    host, port, *_ = address
    return host.removeprefix("::ffff:"), port


def _listeners() -> dict[int, int]:
    """The port of each listening socket of this process, by the socket's inode."""
    found: dict[int, int] = {}
    for item in _sockets():
        with item, suppress(OSError):
            if item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(item.fileno()).st_ino] = item.getsockname()[1]
    return found


def _sockets() -> Iterator[socket.socket]:
    """Copies of this process's internet sockets. Closing a copy leaves the original open."""
    with suppress(OSError):
        for number in map(int, os.listdir(_OPEN)):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue  # `socket` would raise and leave the copy open
                item = socket.socket(fileno=os.dup(number))
                if item.family in (socket.AF_INET, socket.AF_INET6):
                    yield item
                else:
                    item.close()


# ---- store ---------------------------------------------------------------------------------------

Find = Callable[[], tuple[Address, bytes]]  # returns a server's address, and the secret of the generation

NONCE_BYTES = PROOF_BYTES = 32
_MAGIC = b"psr1"
_HELLO = struct.Struct("!4sBH32s32s")
_RETRY_S = 0.02  # between two attempts to connect
_ATTEMPT_S = 5.0  # for one attempt
_HANDSHAKE_S = 15.0  # time for the handshake; the server may learn of a generation later than its members
_MAX_UNPROVEN = 256  # connections; the oldest is closed when there are more
_MAX_GENERATIONS = 4  # the newest generations are retained
_MAX_MESSAGE = 8 << 20
_LENGTH = struct.Struct("!I")
_LATE_S = 5.0  # extra time for a reply, beyond the request's own timeout
_PAUSE_S = 0.1  # after a failed accept, for lack of descriptors


class Kind(IntEnum):
    """The purpose of a connection."""

    STORE = 0  # requests to the store
    PEER = 1  # the server's process keeps the connection


class Refused(OSError):
    """The other side is not a process of this run."""


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def connect(find: Find, kind: Kind, rank: int, name: str, timeout_s: float) -> socket.socket:
    """Return a blocking connection to a server, after both sides have proved that they know the secret.

    `find` returns the server's address and the secret. It is called before each attempt. Raises OSError if no attempt
    succeeds within `timeout_s`: Refused if one was refused, because the last one had less time.
    """
    until = time.monotonic() + timeout_s
    refused: Refused | None = None
    while True:
        try:
            address, secret = find()
            return _connected(address, secret, kind, rank, digest(name), max(0.01, until - time.monotonic()))
        except OSError as error:
            refused = error if isinstance(error, Refused) else refused
            if time.monotonic() + _RETRY_S >= until:
                raise refused or error from None
        time.sleep(_RETRY_S)


def _connected(address: Address, secret: bytes, kind: Kind, rank: int, name: bytes, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(address, min(_ATTEMPT_S, timeout_s))
    try:
        connection.settimeout(timeout_s)  # the server may learn of this generation later than this process
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _HELLO.pack(_MAGIC, kind, rank, name, secrets.token_bytes(NONCE_BYTES))
        connection.sendall(hello)
        nonce, proof = read(connection, NONCE_BYTES), read(connection, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"server", hello, nonce)):
            raise Refused("the process there does not know the secret of this generation")
        connection.sendall(_proof(secret, b"client", hello, nonce))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def read(connection: socket.socket, num_bytes: int) -> bytes:
    """Read exactly `num_bytes` from a connection. Raises OSError."""
    found = bytearray()
    while len(found) < num_bytes:
        piece = connection.recv(num_bytes - len(found))
        if not piece:
            raise ConnectionError("the connection was closed")
        found += piece
    return bytes(found)


def _proof(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + hello + nonce, "sha256")


class _Keys:
    """The keys of one generation. `changed` guards them.

    They are no store of torch: a daemon thread that waits inside of torch aborts the process at the interpreter's end.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._values: dict[str, str] = {}
        self._changed = changed

    def reply(self, op: str, keys: list[str], value: str, timeout_s: float) -> Any:
        """Return the result of one request. Raises ValueError for an unknown operation."""
        with self._changed:
            match op:
                case "set":
                    return self._set(keys[0], value)
                case "add":
                    return int(self._set(keys[0], str(int(self._values.get(keys[0], "0")) + int(value))))
                case "check":
                    return self._values.keys() >= set(keys)
                case "wait":
                    has_all = self._changed.wait_for(lambda: self._values.keys() >= set(keys), timeout_s)
                    return self._values[keys[0]] if has_all else None
                case "delete":
                    return self._values.pop(keys[0], None) is not None
                case "count":
                    return len(self._values)
        raise ValueError(op)

    def _set(self, key: str, value: str) -> str:
        self._values[key] = value
        self._changed.notify_all()
        return value


class StoreServer:
    """A store server on `host`, until `close`."""

    def __init__(self, host: str) -> None:
        """Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_UNPROVEN)
        self.address: Address = (host, self._listener.getsockname()[1])
        self.peers: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()  # rank, connection
        self._generations: dict[bytes, tuple[bytes, _Keys]] = {}  # secret and keys, by digest of the name
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, bool] = {}  # oldest first; True: its proof was checked
        self._is_closed = False
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def admit(self, name: str, secret: bytes) -> None:
        """Let members of this generation connect that know this secret."""
        with self._changed:
            self._generations.setdefault(digest(name), (secret, _Keys(self._changed)))
            while len(self._generations) > _MAX_GENERATIONS:
                del self._generations[next(iter(self._generations))]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in [self._listener, *self._connections]:
                _shut_down(connection)

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    time.sleep(0 if self._is_closed else _PAUSE_S)
                    continue
                with self._changed:
                    self._connections[connection] = False
                    unproven = [other for other, is_proven in self._connections.items() if not is_proven]
                    if len(unproven) > _MAX_UNPROVEN:
                        del self._connections[unproven[0]]
                        _shut_down(unproven[0])
                threading.Thread(target=self._serve, args=(connection,), name="rendezvous", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # A client may be gone, silent, or use another protocol.
        with contextlib.suppress(OSError, ValueError, OverflowError):
            kind, rank, kept = self._greet(connection)
            if kind == Kind.PEER:
                self.peers.put((rank, connection))
                connection = socket.socket()  # closed below in its place
            else:
                while True:
                    (num_bytes,) = _LENGTH.unpack(read(connection, _LENGTH.size))
                    if num_bytes > _MAX_MESSAGE:
                        break
                    connection.sendall(_framed(kept.reply(*_request(read(connection, num_bytes)))))
        with self._changed:
            self._connections.pop(connection, None)
        connection.close()

    def _greet(self, connection: socket.socket) -> tuple[Kind, int, _Keys]:
        """Prove to the client that the server knows the secret, and check its proof. Raises OSError.

        Returns the purpose of the connection, the client's rank, and its generation's keys.
        """
        # per read: a slow client is closed when there are too many unproven connections
        connection.settimeout(_HANDSHAKE_S)
        hello = read(connection, _HELLO.size)
        magic, kind, rank, name, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or kind not in list(Kind):
            raise Refused("the client does not speak this protocol")
        with self._changed:
            self._changed.wait_for(lambda: name in self._generations or self._is_closed, _HANDSHAKE_S)
            if name not in self._generations:
                raise TimeoutError
            secret, kept = self._generations[name]
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce + _proof(secret, b"server", hello, nonce))
        if not hmac.compare_digest(read(connection, PROOF_BYTES), _proof(secret, b"client", hello, nonce)):
            raise Refused("the client does not know the secret")
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            if kind == Kind.PEER:
                self._connections.pop(connection, None)
            else:
                self._connections[connection] = True
        return Kind(kind), rank, kept


def _shut_down(connection: socket.socket) -> None:
    """End every wait of a thread on this connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _request(raw: bytes) -> tuple[str, list[str], str, float]:
    """Parse a request: operation, keys, value, timeout in seconds. Raises ValueError."""
    match read_json(raw):
        case {"op": str(op), "keys": [*keys], "value": str(value), "timeout_s": float(timeout_s)} if (
            keys or op == "count"
        ):
            return op, [str(key) for key in keys], value, timeout_s
    raise ValueError("not a request of the store")


def _framed(value: Any) -> bytes:
    payload = json.dumps(value).encode()
    return _LENGTH.pack(len(payload)) + payload


_Base: Any = dist.Store if dist.is_available() else object  # `Rendezvous` reports a torch without distributed support


class Store(_Base):
    """A client of a StoreServer, for torch's process groups. Several threads may use it.

    A key that does not arrive in time raises dist.DistStoreError, and a lost server another RuntimeError. torch keeps
    no reference to this object, so the caller must keep one.
    """

    def __init__(self, find: Find, name: str, rank: int, timeout_s: float, prefix: str = "") -> None:
        """`find`, `name`: as in `connect`. `timeout_s`: for the connection, and for each key. `prefix`: of all keys.

        Raises OSError.
        """
        super().__init__()
        self._timeout_s, self._prefix, self._lock = timeout_s, prefix, threading.Lock()
        self._connection = connect(find, Kind.STORE, rank, name, timeout_s)

    def close(self) -> None:
        self._connection.close()

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self._request("set", [key], value=raw.decode("latin-1"))  # JSON has no bytes

    def get(self, key: str) -> bytes:
        return str(self._wait_for([key], self._timeout_s)).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", [key], value=str(amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(not keys or self._request("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if keys:
            self._wait_for(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> Any:
        """Wait for all keys. Returns the value of the first one."""
        found = self._request("wait", keys, timeout_s=timeout_s)
        if found is None:
            raise dist.DistStoreError(f"{', '.join(keys)} did not come in {timeout_s:g} s")
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", [key]))

    def num_keys(self) -> int:
        return int(self._request("count", []))

    def _request(self, op: str, keys: Sequence[str], *, timeout_s: float = 0.0, value: str = "") -> Any:
        keys = [self._prefix + key for key in keys]
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
