"""Measures the rate of one TCP stream between two processes, on which predictions are based."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..output.report import median
from .team import Team, team
from .turns import Measured, timed

_PIECE_BYTES = 1 << 20
_NUM_PIECES = 200
_RUNS = 5


def stream_bytes_per_s() -> float:
    """Median of a few runs of 200 MiB over loopback, written and read in pieces of 1 MiB."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        with team(1, sender_life, listener.getsockname()[1]) as sender:
            connection, _ = listener.accept()
            with connection:
                return median([_receive(connection, sender) for _ in range(_RUNS)])


def _receive(connection: socket.socket, sender: Team) -> float:
    left, piece = _PIECE_BYTES * _NUM_PIECES, bytearray(_PIECE_BYTES)
    sender.start(1)
    began = 0.0
    while left:
        left -= connection.recv_into(piece, min(left, _PIECE_BYTES))
        began = began or time.perf_counter()  # the first piece may have to wait for its sender
    elapsed_s = time.perf_counter() - began
    sender.result()
    return _PIECE_BYTES * (_NUM_PIECES - 1) / elapsed_s


@contextmanager
def sender_life(_: int, port: int) -> Iterator[Measured]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        piece = bytes(_PIECE_BYTES)

        def send() -> None:
            for _ in range(_NUM_PIECES):
                connection.sendall(piece)

        yield timed("sent", send)
