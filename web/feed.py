"""Sends one run to viewers: first the complete view, then ticks, each encoded once for all viewers.

The feed does not wait for a slow viewer: it sends the complete view again. It runs in the dashboard's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import NamedTuple

from ..common.reporting.summary import About, Tick, View

_AGAIN_S = 1.0
_KEPT = 4  # ticks, for viewers that are slightly late

Control = Callable[
    [dict[str, object]], Awaitable[str]
]  # applies a control of the run; returns its result or raises ValueError


class Message(NamedTuple):
    """One message. `kind`: whole, tick, or over, which is the last; `data`: JSON."""

    kind: str
    number: int
    data: str


class Feed:
    """The messages of one run."""

    def __init__(self, view: View, control: Control | None = None, is_over: bool = False) -> None:
        self.view, self.control, self.is_over = view, control, is_over
        self._number = 0
        self._ticks: deque[Message] = deque(maxlen=_KEPT)
        self._whole: Message | None = None
        self._changed = asyncio.Event()
        self._num_viewers = 0

    def push(self, tick: Tick) -> None:
        self.view.add(tick)
        self._number += 1
        self.is_over = tick.is_over
        if self._num_viewers:  # later viewers begin with the complete view
            self._ticks.append(Message("tick", self._number, tick.model_dump_json()))
        self._wake()

    def retell(self, about: About) -> None:
        """Send the complete view to every viewer again, because the run's settings have changed."""
        self.view.about = about
        self._number += 1
        self._ticks.clear()
        self._wake()

    def end(self) -> None:
        """End the feed."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def whole(self) -> Message:
        if self._whole is None or self._whole.number != self._number:
            self._whole = Message("whole", self._number, self.view.model_dump_json())
        return self._whole

    async def messages(self, again: Callable[[], Feed | None] | None = None) -> AsyncIterator[Message]:
        """Yields the messages for one viewer, at its pace, until the run is over. `again` rereads it each second."""
        if again is not None:
            feed = self
            for number in count(1):
                yield feed.whole()._replace(number=number)
                if feed.is_over:
                    yield Message("over", number, "{}")
                    return
                await asyncio.sleep(_AGAIN_S)
                feed = again() or feed
        seen = -1
        self._num_viewers += 1
        try:
            while not (self.is_over and seen == self._number):
                late = [tick for tick in self._ticks if tick.number > seen]
                if seen < self._number and (seen < 0 or not late or late[0].number > seen + 1):
                    late = [self.whole()]
                for message in late:
                    seen = message.number
                    yield message
                if seen == self._number and not self.is_over:
                    await self._changed.wait()
            yield Message("over", self._number, "{}")
        finally:
            self._num_viewers -= 1
