"""A worker's signs of life, on a connection of its own, from a thread of its own.

The connection has no keepalive: when the server stands still or the network does, it stays open, and the
server hears of this worker again as soon as it can. Only the end of the process closes it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Protocol

# Beats in one lease: two may be lost.
_BEATS = 4
_TRY_AGAIN_S = 0.2


class BeatCall(Protocol):
    """Opens the Heartbeat call: beats go in, something comes out for each; raises OSError when it breaks off."""

    def __call__(self, beats: Iterator[bytes]) -> Iterator[Any]: ...


class Heartbeat:
    """Beats until `stop`. `call` opens the stream (`worker/conversation/client.py`)."""

    def __init__(self, call: BeatCall) -> None:
        self._call = call
        self._beat: bytes = b""
        self._interval_s = 1.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, beat: bytes, lease_s: float) -> None:
        """Send `beat` from now on, several times in every lease."""
        self._beat, self._interval_s = beat, lease_s / _BEATS
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for _ in self._call(self._beats()):
                    pass
            except OSError:
                pass  # the server is gone or not there yet
            self._stop.wait(_TRY_AGAIN_S)

    def _beats(self) -> Iterator[bytes]:
        yield self._beat
        while not self._stop.wait(self._interval_s):
            yield self._beat
