"""The connection of an evaluator: heartbeats with metrics, and pulls of weights. An evaluator does not train."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...common.config.schema import Config
from ...common.errors import UsageError
from ..session import Retry
from .channel import Lost, wait_for_server
from .messages import Settings, evaluator_heartbeat
from .reader import Reader

_HEARTBEAT_S = 0.25
_REPLY_S = 10.0  # time in which the server accepts a failure


class _Result(NamedTuple):
    """Fields of EvaluationMetrics. `is_received` is set once the server has replied to their heartbeat."""

    metrics: dict[str, Any]
    is_received: threading.Event


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
        # By number, until the server has them: a heartbeat may be lost with its connection.
        self._results: dict[int, _Result] = {}
        self._num_reported = 0
        self._reported = threading.Condition()
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
        found = _Result({"version": version, "step": step, **result}, threading.Event())
        with self._reported:
            self._results[self._num_reported] = found
            self._num_reported += 1
            self._reported.notify_all()
        if result.get("failure"):
            found.is_received.wait(_REPLY_S)

    def _heartbeat(self) -> None:
        while not self.is_over:
            sent: deque[int | None] = deque()  # numbers of the results in heartbeats without a reply
            try:
                for reply in self.client.heartbeat(self._heartbeats(sent)):
                    self.is_over |= reply.is_gone
                    if not sent:  # more replies than heartbeats: not a ps-server
                        break
                    if (number := sent.popleft()) is not None:
                        with self._reported:
                            self._results.pop(number).is_received.set()
            except Lost:
                time.sleep(_HEARTBEAT_S)

    def _heartbeats(self, sent: deque[int | None]) -> Iterator[bytes]:
        """Yield the heartbeats of one call. Results that an earlier call sent without a reply are sent again."""
        sent.append(None)  # the server takes results only after a first heartbeat
        yield evaluator_heartbeat(self._process, None)
        begin = 0  # results before it are in this call
        while not self.is_over:
            number, metrics = self._next_result(begin)
            begin = begin if number is None else number + 1
            sent.append(number)
            yield evaluator_heartbeat(self._process, metrics)

    def _next_result(self, begin: int) -> tuple[int | None, dict[str, Any] | None]:
        """Wait for a heartbeat's interval at most for a result from number `begin` on that the server lacks."""
        with self._reported:
            self._reported.wait_for(lambda: self._num_reported > begin, _HEARTBEAT_S)
            number = next((number for number in self._results if number >= begin), None)
            return number, None if number is None else self._results[number].metrics

    def close(self) -> None:
        self.is_over = True
        super().close()
