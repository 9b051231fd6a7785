"""The connections of processes that read a run and do not train: they request its state and fetch weights.

An evaluator also sends heartbeats with metrics.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.tensors.sharding import divide
from ..session import Retry
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors, part_of
from ..transports.limit import Limit
from .channel import Channel, Lost, wait_for_server
from .messages import Settings, evaluator_heartbeat, read_settings
from .rpc_client import RpcClient
from .security import worker_credentials

_CONNECT_S = 1.0
_HEARTBEAT_S = 0.25
_REPLY_S = 10.0  # time in which the server accepts a failure


class Standing(NamedTuple):
    """The state of a run. `step`: training steps of its slowest worker."""

    run: str
    incarnation: int  # of the server
    step: int
    version: int
    settings: Settings


class Reader:
    """Reads the run of `worker.server`.

    `name` names this process; the server retains a version for it. An evaluator has an empty name.
    """

    def __init__(self, config: Config, name: str = "") -> None:
        self.address = config.worker.server
        self._name = name
        self._credentials, self._limit = worker_credentials(config), Limit(config.worker.max_mbit)
        self._channels: dict[str, Channel] = {}  # of the shards, by address
        self.client = self._client_of("", self.address)
        self._run = ""

    def _client_of(self, name: str, address: str) -> RpcClient:
        """Returns a client of this shard. The coordinator's name is empty."""
        if name not in self._channels:
            self._channels[name] = Channel(address, self._credentials, self._limit)
        return RpcClient(self._channels[name])

    def standing(self) -> Standing:
        """Request the run's state from the server. Raises Lost, or the error with which the server refuses."""
        try:
            status = self.client.status()
        except Lost:
            self._channels[""].turn()
            raise
        self._run = status.run
        return Standing(status.run, status.incarnation, status.step, status.version, read_settings(status.settings))

    def check_connection(self) -> None:
        """Wait for the server. Raises AuthError for wrong TLS settings, UnreachableError for another service."""
        with suppress(Lost):
            self._channels[""].connect(_CONNECT_S)

    def pull(self, model: ModelTensors) -> int | None:
        """Write the newest weights into the model.

        Returns their version, or None if the server is unreachable or has none. Raises UsageError for another model.
        """
        version: int | None = None
        try:
            addresses = self.client.shard_addresses(self._run) or [""]
            for share, address in zip(divide(model.layout, len(addresses)), addresses, strict=True):
                part = part_of(model, share)
                transfer, num_bytes = make_transfer(part), part.layout.total_bytes
                client = self._client_of(address, address)
                version, layout = client.pull_version(version, num_bytes, transfer.write, self._name)
                if differences := layout.differences(part.layout):
                    message = f"the run trains a different model than this process has: {differences[0]}"
                    raise UsageError(message, fix="give it the workers' script, or --task and task.args")
                transfer.finish_write(num_bytes)
        except Lost:
            return None
        return version

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


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
