"""Records the run in the run store (`common/runstore`), tick by tick, for `ps-runs` and the dashboard."""

from __future__ import annotations

import time

from ...common.config.schema import Config
from ...common.reporting.view import Event, Tick
from ...common.runstore.record import Record
from ..core.effects import Fact, RunStarted
from . import reports
from .bus import Sink
from .ticks import TickTaken


class RecordingSink(Sink):
    """Records the run once its first worker joins. A run without workers is not recorded."""

    name = "store"
    does_io = True
    kinds = (RunStarted, TickTaken)
    close_s = 10.0
    capacity = 1_000  # ticks of 64 workers

    def __init__(self, config: Config) -> None:
        self._config = config
        self._record: Record | None = None
        self._events: list[Event] = []  # events before the first worker
        self._last: Tick | None = None  # the last tick, once the run is over

    def take(self, at: float, fact: Fact) -> None:
        if isinstance(fact, RunStarted):
            self._started = fact
            return
        assert isinstance(fact, TickTaken)
        tick = fact.tick
        if self._record is None:
            self._events += tick.events
            if not tick.status.num_ranks:
                return
            started = self._started
            self._record = Record(self._config, run=started.run, mode=started.mode, at_version=started.version)
            tick = tick.model_copy(update={"events": self._events})
        self._record.ran = fact.ran
        whole = self._model.whole  # may be read on this thread, because it is set only once
        self._record.model = whole.fingerprint if whole is not None else ""
        if tick.is_over:
            self._last = tick
        else:
            self._record.add(tick)

    def flush(self) -> None:
        if self._record is not None:
            self._record.flush()

    def close(self) -> None:
        """Record the results. The event loop waits for this thread, so the run no longer changes."""
        if self._record is not None:
            last = self._last or Tick(at=time.time(), status=reports.status(self._engine))
            ended_by = reports.ended_by(self._engine)
            if not ended_by and not self._engine.finished.done():
                ended_by = "its server was told to stop"
            self._record.end(last, reports.summary(self._engine), ended_by)
