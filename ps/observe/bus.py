"""The bus: delivers the facts of a run (`ps/core/effects.py`) to every sink, in order.

A sink can neither raise into the run nor slow it. The bus switches off a sink that raises, with one warning in the log.
A sink that writes or sends has its own thread behind a bounded queue. When the queue is full, the bus drops and counts
facts, with one warning. To add a sink, write a file in this folder with a subclass of `Sink`, and a line in `sinks.py`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, ClassVar

from ...common.reporting.log import get_logger
from ..core.effects import Fact

if TYPE_CHECKING:
    from ..engine.engine import Engine

log = get_logger()

_CAPACITY = 20_000  # facts, of some hundred bytes
_BATCH = 1_000


class Sink:
    """An observer of a run. The bus calls `begin` first and `close` last, and all other methods from one thread."""

    name: ClassVar[str]
    does_io: ClassVar[bool] = False  # True: has a queue and a thread; False: `take` runs on the loop and must be fast
    kinds: ClassVar[tuple[type, ...] | None] = None  # types of facts that it gets; None: all
    close_s: ClassVar[float] = 5.0  # seconds for the remaining facts at the end; later facts are dropped
    capacity: ClassVar[int] = _CAPACITY  # most facts in its queue
    needs_all: ClassVar[bool] = False  # True: the first dropped fact switches the sink off

    def begin(self, engine: Engine) -> None:
        """Prepare, on the event loop, before the run begins. An exception ends the server's start."""
        self._engine, self._run, self._model = engine, engine.run, engine.model

    def take(self, at: float, fact: Fact) -> None:
        """Process a fact that happened at `at`, in monotonic seconds."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write the collected facts, because no more are waiting."""

    def close(self) -> None:
        """Finish, because no more facts follow."""


class Bus:
    """The bus of one server process. `publish` is for one thread, the event loop's."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._subscriptions = [_Subscription(sink) for sink in sinks]
        self._by_kind: dict[type, list[_Subscription]] = {}  # by type of fact, filled at its first fact
        self._early: list[tuple[float, Fact]] | None = []  # facts before `begin`; None afterwards

    def begin(self, engine: Engine) -> None:
        """Begin every sink, and give it the facts that were published before."""
        for subscription in self._subscriptions:
            subscription.sink.begin(engine)
        early, self._early = self._early or [], None
        for at, fact in early:
            self.publish(at, fact)

    def takes(self, kind: type[Fact]) -> bool:
        """Whether some sink gets facts of this type."""
        return any(item.sink.kinds is None or kind in item.sink.kinds for item in self._subscriptions)

    def publish(self, at: float, fact: Fact) -> None:
        """Deliver a fact to the sinks of its type."""
        kind = type(fact)
        takers = self._by_kind.get(kind)
        if takers is None:
            if self._early is not None:
                self._early.append((at, fact))
                return
            takers = [item for item in self._subscriptions if item.sink.kinds is None or kind in item.sink.kinds]
            self._by_kind[kind] = takers
        for subscription in takers:
            subscription.publish(at, fact)

    def close(self) -> None:
        """Let every sink process the remaining facts, and close it."""
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions, self._by_kind = [], {}


class _Subscription:
    """Isolates one sink, so that its errors and delays do not affect the run."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._is_open = True  # facts go to the sink
        self._has_raised = False
        self._num_dropped = 0  # facts that did not fit into the queue
        self._num_lost = 0  # facts that the sink did not process because it had raised
        self._queue: SimpleQueue[tuple[float, Fact] | None] = SimpleQueue()  # None marks the end
        self._thread: Thread | None = None
        if sink.does_io:
            run = contextvars.copy_context().run  # keeps the fields that the log adds to every event
            self._thread = Thread(target=run, args=(self._work,), name=f"sink {sink.name}", daemon=True)
            self._thread.start()

    def publish(self, at: float, fact: Fact) -> None:
        if self._thread is None:
            self._give([(at, fact)])
        elif self._is_open and self._queue.qsize() < self.sink.capacity:
            self._queue.put((at, fact))
        else:
            if self._is_open and not self._num_dropped:
                self._warn("sink_slow", meaning="facts arrive faster than the sink processes them: some are dropped")
            self._num_dropped += 1
            self._is_open = self._is_open and not self.sink.needs_all

    def close(self) -> None:
        if self._thread is None:
            self._end()
        else:
            self._queue.put(None)
            self._thread.join(self.sink.close_s)
            if self._thread.is_alive():
                self._num_dropped += self._queue.qsize()
        if num_dropped := self._num_dropped + self._num_lost:
            self._warn("sink_incomplete", dropped=num_dropped)

    def _work(self) -> None:
        """Run the sink's thread. It gets all waiting facts at once, as each wait costs the event loop a switch."""
        is_last = False
        while not is_last:
            batch = [self._queue.get()]
            with suppress(Empty):
                while batch[-1] is not None and len(batch) < _BATCH:
                    batch.append(self._queue.get_nowait())
            is_last = batch[-1] is None
            self._give([item for item in batch if item is not None])
        self._end()

    def _give(self, batch: list[tuple[float, Fact]]) -> None:
        if not self._has_raised:
            try:
                for at, fact in batch:
                    self.sink.take(at, fact)
                self.sink.flush()
                return
            except Exception as error:  # a bug of the sink, or a full disk: the run continues without the sink
                self._switch_off(error)
        self._num_lost += len(batch)

    def _end(self) -> None:
        try:
            self.sink.close()
        except Exception as error:
            if not self._has_raised:
                self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self._has_raised, self._is_open = True, False
        self._warn("sink_off", reason=f"{type(error).__name__}: {error}")

    def _warn(self, event: str, **fields: object) -> None:
        with suppress(OSError, ValueError):  # the log itself may be broken
            log.warning(event, sink=self.sink.name, **fields)
