"""A relay's connection to the server above: the relay is one of its workers."""

from __future__ import annotations

import math
import socket
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..common.config.schema import Config
from ..common.reporting.log import get_logger
from ..common.reporting.regions import region_run
from ..common.tensors.layout import Kind, Layout
from ..common.tensors.optimizers import OptimizerSpec
from ..common.wire.records import Contribution, Outcome
from ..worker.conversation.channel import worker_credentials
from ..worker.conversation.exchange import Exchange
from ..worker.conversation.messages import Final, Outgoing
from ..worker.conversation.threads import Helper
from ..worker.strategies.choice import make_server_strategy
from ..worker.tensors.transfer import ModelTensors
from ..worker.training.readings import Readings

log = get_logger()

OVER = "the run above was over"
_NOT_COUNTED = {
    Outcome.DROPPED: "the contribution came after the end of its round",
    Outcome.REJECTED: "the run above rejected the contribution (store.on_nonfinite, store.max_norm)",
}


class RegionContribution(NamedTuple):
    """A contribution of the region. `payload`, uint8 [exchange_bytes], is a mean gradient, or the region's weights."""

    payload: torch.Tensor | None  # None: no gradient
    record: Contribution
    state: bytes  # of the region's run at this version
    without: frozenset[str] = frozenset()  # parameters without a gradient


class RegionTensors(ModelTensors):
    """Tensors of this layout without an nn.Module. `payload`, uint8 [total_bytes], is their memory."""

    def __init__(self, layout: Layout, payload: torch.Tensor) -> None:
        self.layout, self.payload = layout, payload
        self.tensors = [view.data for _, view in layout.views(payload)]
        of_name = {entry.spec.name: tensor for entry, tensor in zip(layout.entries, self.tensors, strict=True)}
        self.names = {id(of_name[spec.name]): spec.name for spec in layout.specs}
        self._homes = [({"": tensor}, "") for tensor in self.tensors]
        self.places = [tensor.data_ptr() for tensor in self.tensors]

    def set_gradients(self, payload: torch.Tensor | None, without: Collection[str]) -> None:
        """Use `payload`, uint8 [exchange_bytes], as gradients of the parameters, and as values of the buffers."""
        for entry, tensor in zip(self.layout.entries, self.tensors, strict=True):
            if entry.spec.kind is Kind.PARAMETER:
                tensor.grad = None if payload is None or entry.spec.name in without else entry.view(payload)
            elif entry.spec.kind is Kind.BUFFER and payload is not None:
                tensor.copy_(entry.view(payload))


def merge(layout: Layout, now: torch.Tensor, before: torch.Tensor, new: torch.Tensor) -> None:
    """Merge `new` into a region's weights `now`, in place. All weights are uint8 [total_bytes].

    `before`: the region's weights when they were contributed; the steps since then are kept. Buffers that are not
    averaged do not change.
    """
    for flat in (*layout.runs_of(Kind.PARAMETER), *layout.runs_of(Kind.BUFFER)):
        if flat.kind is Kind.PARAMETER or (flat.is_float and flat.is_averaged):
            flat.view(now).sub_(flat.view(before)).add_(flat.view(new))


def log_not_counted(samples: int, steps: int, meaning: str, is_sent_again: bool = False) -> None:
    """Log work of the region that the run above has not counted."""
    log.warning("region_not_counted", samples=samples, steps=steps, meaning=meaning, is_sent_again=is_sent_again)


class Link:
    """The exchange with the server above. Its thread runs one job after another.

    `model`, with the weights of the run above, and `optimizer` exist after `start`.
    """

    model: RegionTensors
    optimizer: OptimizerSpec

    def __init__(self, config: Config) -> None:
        """Join the run above. Raises UnreachableError, AuthError or the server's refusal."""
        upstream = config.upstream
        assert upstream.server is not None
        self.address = upstream.server
        changes = upstream.model_dump(include={"server", "rank", "codec", "reply_codec"})
        worker = config.worker.model_copy(update={**changes, "device": "cpu"})
        identity = {"cert": upstream.cert, "key": upstream.key} if upstream.cert is not None else {}
        security = config.security.model_copy(update=identity)
        credentials = worker_credentials(config.model_copy(update={"worker": worker, "security": security}))
        self._sent_first_for = -1  # `num_starts` when FirstInfo was sent
        name, num_workers = upstream.region or socket.gethostname(), config.run.workers or 1
        self.joins_as: dict[str, Any] = {"region": name, "num_workers": num_workers}
        self._exchange = Exchange(worker, upstream.rank, None, credentials, self.joins_as)
        self.settings, self.progress = self._exchange.settings, self._exchange.progress
        self.strategy = make_server_strategy(self._exchange, waits=True)  # the region itself trains on meanwhile
        self.readings = Readings()  # of the region; the server above shows them
        self._exchange.heartbeat.measure = self.readings.taken
        self.thread = Helper("upstream")
        self.has_model = False

    @property
    def run_name(self) -> str:
        """The name of the region's run, the same in each relay process of this rank."""
        assert self.progress.rank is not None
        return region_run(self.progress.run, self.progress.rank)

    @property
    def incarnation(self) -> int:
        """A server incarnation that no earlier server of the region had. The next number is for a restored run."""
        return 2 * self.progress.incarnation

    @property
    def state(self) -> bytes | None:
        """The state of the region's run that came with the newest START reply; None: the run is new."""
        begun = self.strategy.begun()
        return begun.payload if begun is not None else None

    # ---- on the thread ----------------------------------------------------------------------

    def start(self, layout: Layout, optimizer: OptimizerSpec, weights: torch.Tensor) -> None:
        """Offer the model. On return `model` has the weights of the run above. Later requests wait without a limit."""
        self.model, self.optimizer, self.has_model = RegionTensors(layout, weights.clone()), optimizer, True
        self.strategy.start(self.model, optimizer)
        self._exchange.retry.give_up_s = math.inf  # only now: a new relay must not wait for a run above that is over

    def send(self, contribution: RegionContribution) -> Outcome:
        """Contribute. On return `model` has new weights. After START the region must begin again from them.

        If weights come too late for their round, this method adds the region's steps to the newer weights, and sends
        these.
        """
        while True:
            before = self.model.payload.clone() if self.settings.kind.worker_steps else None
            if self.settings.kind.holds_gradients:
                self.model.set_gradients(contribution.payload, contribution.without)
            elif contribution.payload is not None:
                exchanged = slice(self.model.layout.exchange_bytes)
                self.model.payload[exchanged].copy_(contribution.payload[exchanged])
            record, counts = contribution.record, contribution.record.counts
            if self._sent_first_for == self.progress.num_starts:  # it is of a new process
                record = replace(record, first=None)
            self._sent_first_for = self.progress.num_starts
            self.joins_as["num_workers"] = counts.num_workers
            self.strategy.contribute(Outgoing(record, contribution.state))
            outcome, work = self.progress.outcome, (counts.num_samples, counts.num_steps)
            if outcome not in _NOT_COUNTED:
                return outcome
            meaning = _NOT_COUNTED[outcome]
            if before is None or contribution.payload is None or outcome is Outcome.REJECTED:
                log_not_counted(*work, meaning)
                return outcome
            is_over = self.progress.is_done
            log_not_counted(*work, OVER if is_over else meaning, is_sent_again=not is_over)
            if is_over:
                return outcome
            moved = contribution.payload.clone()
            # The steps of a dropped delta are in the codec's residual, so the next delta must not have them again.
            since = contribution.payload if self.settings.kind.holds_differences else before
            merge(self.model.layout, moved, since, self.model.payload)
            contribution = contribution._replace(payload=moved)

    def finish(self, stays: bool) -> Final | None:
        """Wait for the end of the run above. `stays`: some worker of the region may be asked for metrics."""
        self._exchange.stays = stays
        return self.strategy.finish()

    # ---- from any thread ----------------------------------------------------------------------

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of an evaluation, after `step` steps of the region. They travel with the next message."""
        result = {"version": self.progress.version, "step": step, "metrics": metrics}
        self.thread.submit(lambda: self._exchange.measured.append(result))

    def close(self) -> None:
        """End the connections. A pending job ends with an error."""
        self.strategy.drop()
        self.thread.stop()
        self.thread.dismiss()
