"""The connections of processes that read a run and do not train: they request its state and fetch weights.

An evaluator also sends heartbeats with metrics.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ...common.config.schema import Config
from ...common.errors import UsageError, bad_request
from ...common.tensors.sharding import divide
from ...common.wire.protocol import layout_from_proto
from ..session import Retry
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors, part_of
from ..transports.limit import Limit
from .channel import Channel, Lost, Write, wait_for_server
from .heartbeat import Heartbeat
from .messages import HeartbeatReply, Settings, Snapshot, StatusReply, evaluator_heartbeat, read_settings
from .security import worker_credentials

_CONNECT_S = 1.0
_HEARTBEAT_S = 0.25
_REPLY_S = 10.0  # time in which the server accepts a failure


class Reader:
    """Reads the run of `worker.server`.

    `name` names this process; the server retains a version for it. An evaluator has an empty name.
    """

    def __init__(self, config: Config, name: str = "") -> None:
        self.address = config.worker.server
        self._name = name
        self._credentials, self._limit = worker_credentials(config), Limit(config.worker.max_mbit)
        self._coordinator = Channel(self.address, self._credentials, self._limit)
        self._channels = {"": self._coordinator}  # of the shards, by address; the coordinator's is empty
        self._run = ""

    def standing(self) -> StatusReply:
        """Request the run's state from the server. Raises Lost, or the error with which the server refuses."""
        try:
            status = self._coordinator.status()
        except Lost:
            self._coordinator.turn()
            raise
        self._run = status.run
        return status

    def check_connection(self) -> None:
        """Wait for the server. Raises AuthError for wrong TLS settings, UnreachableError for another service."""
        with suppress(Lost):
            self._coordinator.connect(_CONNECT_S)

    def pull(self, model: ModelTensors) -> int | None:
        """Write the newest weights into the model.

        Returns their version, or None if the server is unreachable or has none. Raises UsageError for another model.
        """
        try:
            addresses = self._coordinator.shard_addresses(self._run) or [""]
            for address in addresses:
                if address not in self._channels:
                    self._channels[address] = Channel(address, self._credentials, self._limit)
            return pull_newest([self._channels[address] for address in addresses], model, self._name)
        except Lost:
            return None

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def pull_newest(channels: Sequence[Channel], model: ModelTensors, reader: str = "") -> int:
    """Write the newest weights of these shards into the model, without a codec. Returns their version.

    Raises Lost, and UsageError for another model than the run's.
    """
    version: int | None = None
    for channel, share in zip(channels, divide(model.layout, len(channels)), strict=True):
        which = {"keep": not reader and version is None, "reader": reader, "version": version}
        version = pull_part(channel, part_of(model, share), **which)
    assert version is not None
    return version


def pull_part(channel: Channel, part: ModelTensors, **which: Any) -> int:
    """Write one shard's weights, which the fields of PullRequest name, into its part of a model.

    Returns their version.
    """
    transfer, num_bytes = make_transfer(part), part.layout.total_bytes

    def begin(announced: Snapshot) -> Write:
        # An average may be written into a model that takes no part in the run.
        found = part.layout if which.get("averaged") else layout_from_proto(announced.tensors)
        if differences := found.differences(part.layout):
            message = f"the run trains a different model than this process has: {differences[0]}"
            raise UsageError(message, fix="give it the workers' script, or --task and task.args")
        if announced.payload_bytes != num_bytes:
            raise bad_request(
                f"the server sends {announced.payload_bytes} bytes of weights, this model has {num_bytes}"
            )
        return transfer.write

    version = channel.pull(begin, **which).version
    transfer.finish_write(num_bytes)
    return version


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
        # Fields of EvaluationMetrics by number, until the server has replied to their heartbeat, which may be lost with
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
        yield None, evaluator_heartbeat(self._process, None)  # the server takes results only after a first heartbeat
        begin = 0  # results before it are in this call
        while not self.is_over:
            with self._reported:
                if self._num_reported <= begin:
                    self._reported.wait(_HEARTBEAT_S)
                number = next((number for number in self._results if number >= begin), None)
                metrics = None if number is None else self._results[number]
            begin = begin if number is None else number + 1
            yield number, evaluator_heartbeat(self._process, metrics)

    def close(self) -> None:
        self.is_over = True
        self._heartbeat.stop()
        super().close()
