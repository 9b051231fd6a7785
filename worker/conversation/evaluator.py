"""The connection of an evaluator: heartbeats with metrics, and pulls of weights. An evaluator does not train."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from ..session import Retry
from .channel import Lost, wait_for_server
from .messages import Settings, evaluator_heartbeat
from .reader import Reader

_HEARTBEAT_S = 0.25
_REPLY_S = 10.0  # time in which the server accepts a failure

Result = tuple[dict[str, Any] | None, threading.Event]  # EvaluationMetrics fields; set when received


class Evaluator(Reader):
    """An evaluator's connection to its server. Raises UnreachableError.

    An evaluator is not a member of the run. While its heartbeats arrive, the workers need not evaluate.
    """

    def __init__(self, config: Config) -> None:
        worker = config.worker
        if worker.server == "none":
            message = "--evaluate (worker.evaluate) without a server: there is no run to evaluate"
            raise UsageError(message, fix="--server HOST:PORT")
        super().__init__(config)
        self._retry = Retry(worker.server, worker.give_up_s)
        self._process = secrets.token_hex(8)
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._was_there = False
        self.is_over = False
        self.settings: Settings = self.look()[0]
        threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True).start()

    def look(self) -> tuple[Settings, int, int]:
        """Return the run's settings, the training steps of its slowest worker, and the version.

        Sets `is_over` if the server was reached before and is gone.
        """
        while True:
            try:
                standing = self.standing()
            except Lost as lost:
                if self._was_there and (self.is_over or self._retry.num_failures > 4):
                    self.is_over = True
                    return self.settings, 0, 0
                wait_for_server(self._retry, lost)
                continue
            self._retry.reached()
            self._was_there = True
            return standing.settings, standing.step, standing.version

    def report(self, version: int, step: int, **result: Any) -> None:
        """Send the metrics of a version, or a failure. A failure has reached the server on return."""
        is_received = threading.Event()
        self._results.put(({"version": version, "step": step, **result}, is_received))
        if result.get("failure"):
            is_received.wait(_REPLY_S)

    def _heartbeat(self) -> None:
        while not self.is_over:
            pending: deque[threading.Event] = deque()  # of heartbeats without a reply
            try:
                for reply in self.client.heartbeat(self._heartbeats(pending)):
                    self.is_over |= reply.is_gone
                    pending.popleft().set()
            except Lost:
                time.sleep(_HEARTBEAT_S)

    def _heartbeats(self, pending: deque[threading.Event]) -> Iterator[bytes]:
        result: Result = None, threading.Event()
        while not self.is_over:
            metrics, is_received = result
            pending.append(is_received)
            yield evaluator_heartbeat(self._process, metrics)
            try:
                result = self._results.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                result = None, threading.Event()

    def close(self) -> None:
        self.is_over = True
        super().close()
