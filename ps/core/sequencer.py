"""Who says that an event happens, and when. One process says it at once; several shards when it has come to all.

Used by whatever carries a run (`ps/engine/engine.py`): it offers events, and is called with those that happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .effects import Effect
from .events import Event, happening


class Sequencer(Protocol):
    """Between what comes to this process and what happens to the run."""

    def offer(self, event: Event) -> None:
        """Something has come to this process."""

    def withdrawn(self, rank: int, incarnation: int) -> None:
        """Nothing of this incarnation of a rank, or an older one, is waited for any more."""

    def applied(self, effects: list[Effect]) -> None:
        """The newest event has been applied, and led to these effects."""

    def missing(self, rank: int) -> str:
        """Which shards have not got what this worker is to give them, as a phrase; or empty."""


class Local:
    """The only process: what comes, happens."""

    def __init__(self, happens: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._happens = happens
        self._now = now

    def offer(self, event: Event) -> None:
        self._happens(happening(event, self._now()))

    def withdrawn(self, rank: int, incarnation: int) -> None:
        pass

    def applied(self, effects: list[Effect]) -> None:
        pass

    def missing(self, rank: int) -> str:
        return ""
