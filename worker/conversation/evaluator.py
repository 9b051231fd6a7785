"""A process that evaluates and does not train, as it talks to the server: heartbeats with metrics, weights of a
version."""

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
from ...common.reporting.log import get_logger
from ...common.tensors.sharding import divide
from ..session import Retry
from ..tensors.parts import part_of
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors
from ..transports.limit import Limit
from .client import Client, Lost, wait_for_server
from .messages import Settings, evaluator_heartbeat, read_settings
from .security import worker_credentials

log = get_logger()

_HEARTBEAT_S = 0.25
_HEARD_S = 10.0  # within which the server is to take a failure


class Evaluator:
    """Joined to nothing: workers of the run need not evaluate while its heartbeats come. Raises UnreachableError."""

    def __init__(self, config: Config) -> None:
        if config.worker.server == "none":
            what = "--evaluate (worker.evaluate) without a server: there is no run to evaluate"
            raise UsageError(what, fix="--server HOST:PORT")
        self._credentials = worker_credentials(config)
        self._limit = Limit(config.worker.max_mbit)
        self._client = Client(config.worker.server, self._credentials, self._limit)
        self._clients = {"": self._client}  # of the shards, by address
        self._run = ""
        self._retry = Retry(config.worker.server, config.worker.give_up_s)
        self._process = secrets.token_hex(8)
        self._said: queue.SimpleQueue[tuple[dict[str, Any], threading.Event]] = queue.SimpleQueue()
        self._unheard: deque[threading.Event] = deque()  # of heartbeats without a heartbeat_reply
        self._was_there = False
        self.is_over = False
        self.settings: Settings = self.look()[0]
        threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True).start()

    def look(self) -> tuple[Settings, int, int]:
        """Settings of the run, training steps of its slowest worker, version. A server that was there and is gone has
        ended."""
        while True:
            try:
                status = self._client.status()
            except Lost as lost:
                if self._was_there and (self.is_over or self._retry.num_failures > 4):
                    self.is_over = True
                    return self.settings, 0, 0
                wait_for_server(self._retry, lost)
                continue
            self._retry.reached()
            self._was_there, self._run = True, status.run
            return read_settings(status.settings), status.step, status.version

    def pull(self, model: ModelTensors) -> int | None:
        """The weights of the newest version are in the model; which that is. None: they cannot be had now. UsageError
        where the run has another model."""
        version: int | None = None
        try:
            addresses = self._client.shard_addresses(self._run) or [""]
            for share, address in zip(divide(model.layout, len(addresses)), addresses, strict=True):
                part = part_of(model, share)
                transfer = make_transfer(part)
                client, num_bytes = self._of_shard(address), part.layout.total_bytes
                version, layout = client.pull_to_evaluate(version, num_bytes, transfer.write)
                if differences := layout.differences(part.layout):
                    what = f"the run's weights are of another model than the evaluator's: {differences[0]}"
                    raise UsageError(what, fix="give it the workers' script, or --task and task.args")
                transfer.finish_write(num_bytes)
        except Lost:
            return None
        return version

    def _of_shard(self, address: str) -> Client:
        """The coordinator's own address is empty."""
        if address not in self._clients:
            self._clients[address] = Client(address, self._credentials, self._limit)
        return self._clients[address]

    def tell(self, version: int, step: int, **said: Any) -> None:
        """Metrics of a version, or its failure, which has been heard when this returns."""
        is_heard = threading.Event()
        self._said.put(({"version": version, "step": step, **said}, is_heard))
        if said.get("failure"):
            is_heard.wait(_HEARD_S)

    def _heartbeat(self) -> None:
        while not self.is_over:
            self._unheard = deque()
            try:
                for is_over in self._client.heartbeat(self._heartbeats(self._unheard)):
                    self.is_over |= is_over
                    self._unheard.popleft().set()
            except Lost:
                time.sleep(_HEARTBEAT_S)

    def _heartbeats(self, unheard: deque[threading.Event]) -> Iterator[bytes]:
        metrics, is_heard = None, threading.Event()
        while not self.is_over:
            unheard.append(is_heard)
            yield evaluator_heartbeat(self._process, metrics)
            try:
                metrics, is_heard = self._said.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                metrics, is_heard = None, threading.Event()

    def close(self) -> None:
        self.is_over = True
        for client in self._clients.values():
            client.close()
