"""Where the run stands, on standard error: the event `status` for programs, the launcher's live view first; a line
for people."""

from __future__ import annotations

import sys

from ...common.reporting.log import get_logger
from ...common.reporting.report import status_line
from ..core.effects import Fact, StatusTaken
from .bus import Sink

log = get_logger()


class StatusSink(Sink):
    name = "status"
    does_io = True
    kinds = (StatusTaken,)

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json

    def take(self, at: float, fact: Fact) -> None:
        if not isinstance(fact, StatusTaken):
            return
        if self._is_json:
            log.info("status", **fact.status.fields())
        elif fact.status.workers or fact.status.waiting:
            print(status_line(fact.status), file=sys.stderr)
