"""An evaluator's connection: it pulls versions of a run, and sends what it measured of them in its heartbeats."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from ..session import Retry
from .channel import Heartbeat, Lost, wait_for_server
from .exchange import Reader
from .messages import HeartbeatReply, HeartbeatRequest, Settings, read_settings

_HEARTBEAT_S = 0.25
_REPLY_S = 10.0  # time in which the server accepts a failure


class Evaluator(Reader):
    """An evaluator's connection to its server; `settings` are the run's. Raises UnreachableError.

    An evaluator is not a member of the run. While its heartbeats arrive, the workers need not evaluate.
    """

    settings: Settings

    def __init__(self, config: Config) -> None:
        worker = config.worker
        if worker.server == "none":
            message = "--evaluate (worker.evaluate) without a server: there is no run to evaluate"
            raise UsageError(message, fix="--server HOST:PORT")
        super().__init__(config)
        self._retry = Retry(worker.server, worker.give_up_s)
        self._process = secrets.token_hex(8)
        # Fields of Metrics by number, until the server has replied to their heartbeat, which may be lost with
        # its connection.
        self._results: dict[int, dict[str, Any]] = {}
        self._num_reported = 0
        self._reported = threading.Condition()
        self._was_there = False
        self.is_over = False
        self.look()
        self._heartbeat = Heartbeat(
            lambda: self._coordinator.address, self._credentials, self._heartbeats, self._replied
        )
        self._heartbeat.start()

    def look(self) -> tuple[int, int]:
        """Return the training steps of the run's slowest worker, and the version.

        Sets `is_over` if the server was reached before and is gone.
        """
        while True:
            try:
                standing = self.standing()
            except Lost as lost:
                if self._was_there and (self.is_over or self._retry.num_failures > 4):
                    self.is_over = True
                    return 0, 0
                wait_for_server(self._retry, lost)
                continue
            self._retry.reached()
            self._was_there, self.settings = True, read_settings(standing.settings)
            return standing.step, standing.version

    def report(self, version: int, step: int, **result: Any) -> None:
        """Send the metrics of a version, or a failure. A failure has reached the server on return."""
        with self._reported:
            number, self._num_reported = self._num_reported, self._num_reported + 1
            self._results[number] = {"version": version, "step": step, **result}
            self._reported.notify_all()
            if result.get("failure"):
                self._reported.wait_for(lambda: number not in self._results, _REPLY_S)

    def _replied(self, number: int | None, reply: HeartbeatReply) -> None:
        if reply.is_gone:
            self.is_over = True
            self._heartbeat.stop()
        if number is not None:
            with self._reported:
                del self._results[number]
                self._reported.notify_all()

    def _heartbeats(self) -> Iterator[tuple[int | None, bytes]]:
        """The heartbeats of one call, with the number of their result.

        Results that an earlier call sent without a reply are sent again.
        """
        found: tuple[int, dict[str, Any]] | None = None  # the first heartbeat comes at once: workers need not evaluate
        begin = 0  # results before it are in this call
        while not self.is_over:
            number, metrics = found or (None, None)
            yield number, HeartbeatRequest(process=self._process, metrics=metrics).SerializeToString()
            with self._reported:
                if self._num_reported <= begin:
                    self._reported.wait(_HEARTBEAT_S)
                found = next((item for item in self._results.items() if item[0] >= begin), None)
            begin = begin if found is None else found[0] + 1

    def close(self) -> None:
        self.is_over = True
        self._heartbeat.stop()
        super().close()
