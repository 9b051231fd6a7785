"""The connection of a process that only reads a run: it requests the run's state and fetches weights."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.tensors.sharding import divide
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors, part_of
from ..transports.limit import Limit
from .channel import Channel, Lost
from .messages import Settings, read_settings
from .rpc_client import RpcClient
from .security import worker_credentials

_CONNECT_S = 1.0


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
