"""The server's shards as a worker sees them. Each request goes to all shards, about their parts of the model.

The first shard is the coordinator, which knows the worker. A server of one process is a set of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...common.config.schema import WorkerConfig
from ...common.errors import UnreachableError, bad_request, shown
from ...common.reporting.log import get_logger
from ...common.security import Credentials
from ...common.tensors.optimizers import OptimizerSpec
from ...common.tensors.sharding import divide
from ...common.wire.records import ResidualInfo
from ..session import Progress, Retry
from ..tensors.transfer import ModelTensors
from ..transports.encoding import Encoding
from ..transports.limit import Limit
from .channel import Channel, Lost
from .messages import Settings
from .shard import Shard
from .threads import END_S, Helper, wait_for

log = get_logger()

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

_MAX_KEYS, _MORE_BYTES = 8, 1 << 20  # limits of an optimizer's state: multiples of the parameters, and bytes for names


class ShardSet:
    """The shards; `all` has one per server process."""

    settings: Settings  # of the run
    optimizer: OptimizerSpec

    def __init__(self, config: WorkerConfig, credentials: Credentials, progress: Progress, retry: Retry) -> None:
        """Each message of a shard resets `retry`."""
        self._config, self._credentials, self._progress, self._retry = config, credentials, progress, retry
        self._limit = Limit(config.max_mbit)
        self.first = self._make(0, config.server)
        self.all = [self.first]
        self._addresses: list[str] = []
        self._helpers: list[Helper] = []  # threads for the shards after the first
        self._model: ModelTensors | None = None
        self.peers_encoding: Encoding | None = None  # of gradients between peers
        self._num_lost, self._norm_lost = 0, 0.0  # lost residuals, and the sum of their norms

    def _make(self, number: int, address: str) -> Shard:
        channel = Channel(address, self._credentials, self._limit)
        return Shard(number, channel, self._config, self._progress, self._retry)

    @property
    def transport(self) -> str:
        """Names of the transports in use, for people."""
        return ", ".join(dict.fromkeys(shard.transports.transport.name for shard in self.all))

    def connect(self, addresses: list[str]) -> None:
        """Use the shards at these addresses, which may have changed.

        The coordinator's own address is empty. The list is empty if the server is one process.
        """
        if addresses == self._addresses:
            return
        if self._model is not None:  # a START follows
            for shard in self.all:
                shard.up.encoding.start()
            self.count_lost()
        for old in self.all[1:]:
            old.stream.close()
        self._addresses = addresses
        self.all[1:] = [self._make(number, address) for number, address in enumerate(addresses) if number]
        if self._model is not None:
            self.divide(self._model, self.optimizer)

    def divide(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        """Give each shard its part of the model."""
        for shard, share in zip(self.all, divide(model.layout, len(self.all)), strict=True):
            shard.set_model(model, share, optimizer, self.settings)
        self._model, self.optimizer = model, optimizer  # a model that cannot be divided is none of the shards'

    def moved(self) -> None:
        """The model has moved in memory."""
        assert self._model is not None
        for shard in self.all:
            shard.moved(self._model)

    # ---- the same for each shard --------------------------------------------------------------

    def each(
        self, work: Callable[Concatenate[Shard, Arguments], Result], *given: Arguments.args, **named: Arguments.kwargs
    ) -> list[Result]:
        """Run `work` for all shards in parallel, with these arguments. Returns the results in order.

        If it fails for one shard, the streams of the others are closed, because they cannot complete. A refusal is
        raised rather than the losses that follow from it.
        """
        shards = self.all
        if len(shards) == 1:
            return [work(shards[0], *given, **named)]

        def guarded(shard: Shard) -> Result | Exception:
            try:
                return work(shard, *given, **named)
            except Exception as error:
                _hang_up(shards)
                return self.lost(shard, error) if isinstance(error, Lost) else error

        while len(self._helpers) < len(shards) - 1:
            self._helpers.append(Helper(f"shard {len(self._helpers) + 1}"))
        others = [
            helper.submit(partial(guarded, shard)) for helper, shard in zip(self._helpers, shards[1:], strict=False)
        ]
        try:
            first = guarded(shards[0])
            for future in others:
                wait_for(future)
        except BaseException:  # interrupted: the worker will say goodbye to the first shard
            _hang_up(shards[1:])
            wait(others, END_S)
            raise
        results = [first, *(future.result() for future in others)]
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise next((error for error in failures if not isinstance(error, Lost)), failures[0])
        return [result for result in results if not isinstance(result, Exception)]

    @staticmethod
    def lost(shard: Shard, lost: Lost) -> Lost:
        return Lost(f"shard {shard.number} at {shard.channel.address}: {lost}")

    # ---- residuals of the contributions: of each shard's part, or of the gradients between peers ---

    @property
    def _encodings(self) -> list[Encoding]:
        return [shard.up.encoding for shard in self.all] if self.peers_encoding is None else [self.peers_encoding]

    def residual(self) -> ResidualInfo:
        """The norm of all residuals, and the number and norms of lost ones."""
        norm = math.hypot(*(encoding.norm for encoding in self._encodings))
        return ResidualInfo(norm, self._num_lost, self._norm_lost)

    def count_lost(self) -> None:
        """Count residuals that were lost since the last call. Losses on several shards count once."""
        found = [lost for encoding in self._encodings if (lost := encoding.take_lost()) is not None]
        if found:
            norm, codec = math.hypot(*found), self._encodings[0].codec.name
            self._num_lost, self._norm_lost = self._num_lost + 1, self._norm_lost + norm
            log.info("residual_lost", rank=self._progress.rank, codec=codec, norm=f"{norm:.4g}", num=self._num_lost)

    # ---- gradients ahead of their contribution ------------------------------------------------

    def prepare(self, indices: list[int]) -> bool:
        """Start copying these gradients off their device. Returns False if they are on the host."""
        have_begun = [shard.up.prepare(here) for shard, here in self._lying_on(indices)]
        return any(have_begun)

    def depart(self, indices: list[int]) -> None:
        """Send the gradients of these tensors before their contribution."""
        for shard, here in self._lying_on(indices):
            shard.depart(here)

    def recall(self) -> None:
        """Discard the gradients that were sent early."""
        for shard in self.all:
            shard.up.recall()

    def _lying_on(self, indices: list[int]) -> list[tuple[Shard, list[int]]]:
        """Each shard that has parts of these tensors, with the parts' indices."""
        return [(shard, here) for shard in self.all if (here := shard.model.indices_of(indices))]

    # ---- calls beside the stream --------------------------------------------------------------

    def pull_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a table, [n, dim], for distinct and ascending ids. Raises Lost."""
        pending = [shard.pull_rows(table, ids) for shard in self.all]
        return torch.cat([rows() for rows in pending])

    def find_again(self, run: str) -> None:
        """Connect to shards that have moved, if the coordinator can be reached for their addresses."""
        if len(self.all) > 1:
            with suppress(Lost):
                for shard, address in zip(self.all, self.first.channel.shard_addresses(run), strict=False):
                    if shard.number and address != shard.channel.address:
                        shard.channel.move(address)

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """Fetch the state of the server's optimizer, by parameter and key (exp_avg, step). Raises UnreachableError."""
        found: dict[str, dict[str, list[torch.Tensor]]] = {}
        for shard in self.all:
            share = shard.share
            try:
                state = load(shard.channel.pull_optimizer(_MAX_KEYS * share.layout.parameter_bytes + _MORE_BYTES))
            except Lost as lost:
                message = f"the optimizer's state could not be fetched from {shard.channel.address}: {lost}"
                raise UnreachableError(message, fix="try again when the server is back") from None
            except SafetensorError as error:
                raise bad_request(f"the server sends an invalid optimizer state: {error}") from None
            names = {part.name: part.spec.name for part in share.parts}
            shapes = {spec.name: spec.shape for spec in share.layout.specs}
            for full, tensor in state.items():
                key, _, name = full.partition("/")
                if name not in names or (tensor.dim() and tuple(tensor.shape) != shapes[name]):
                    description = f"an optimizer's state '{shown(full)}' {list(tensor.shape)}"
                    raise bad_request(f"the server sends {description}, which this model does not have")
                found.setdefault(names[name], {}).setdefault(key, []).append(tensor)
        return {
            name: {key: torch.cat(parts) if parts[0].dim() else parts[0] for key, parts in state.items()}
            for name, state in found.items()
        }

    def close(self) -> None:
        for shard in self.all:
            shard.stream.close()
        for helper in self._helpers:
            helper.end()
        if self._model is not None:
            for shard in self.all:
                shard.transfer.leave_segment()


def _hang_up(shards: list[Shard]) -> None:
    for shard in shards:
        shard.stream.hang_up()
