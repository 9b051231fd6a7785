"""The relay as one worker of the run above."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from ..common.config.schema import Config
from ..common.reporting.history import region_run
from ..common.reporting.log import get_logger
from ..common.tensors.layout import Kind, Layout
from ..common.tensors.optimizers import OptimizerSpec
from ..common.wire.records import Contribution, Counts, Position, TrainingInfo
from ..worker.conversation.exchange import Exchange
from ..worker.conversation.messages import Final, Goodbye, Outgoing
from ..worker.conversation.security import worker_credentials
from ..worker.conversation.threads import Helper
from ..worker.strategies.direct import Direct
from ..worker.tensors.transfer import ModelTensors
from ..worker.training.readings import Readings

log = get_logger()

_NOT_COUNTED = "the run above dropped or rejected this contribution: the work of these steps is lost"


class Cut(NamedTuple):
    """What the region contributes. `payload`, uint8 [exchange_bytes], is a mean gradient, or the region's weights."""

    payload: torch.Tensor | None  # None: no gradient
    table: bytes  # state of the region's run at this version
    step: int  # training steps before
    num_samples: int
    num_workers: int
    num_steps: int
    training: TrainingInfo = TrainingInfo()
    without: frozenset[str] = frozenset()  # parameters without a gradient


class RegionTensors(ModelTensors):
    """A model of this layout without a module. `payload` is its memory, uint8 [total_bytes]."""

    def __init__(self, layout: Layout, payload: torch.Tensor) -> None:
        self.layout, self.payload = layout, payload
        self.tensors = [view.data for _, view in layout.views(payload)]
        self.names = {id(tensor): spec.name for spec, tensor in zip(layout.specs, self._in_order(), strict=True)}
        self._homes = [({"": tensor}, "") for tensor in self.tensors]
        self.places = [tensor.data_ptr() for tensor in self.tensors]

    def _in_order(self) -> list[torch.Tensor]:
        """The tensors in the order of the layout's specs."""
        of_name = {entry.spec.name: tensor for entry, tensor in zip(self.layout.entries, self.tensors, strict=True)}
        return [of_name[spec.name] for spec in self.layout.specs]

    def load(self, payload: torch.Tensor) -> None:
        """Copy exchanged tensors from `payload`, uint8 [exchange_bytes] or longer."""
        self.payload[: self.layout.exchange_bytes].copy_(payload[: self.layout.exchange_bytes])

    def set_gradients(self, payload: torch.Tensor | None, without: Collection[str]) -> None:
        """Use `payload` as gradients of the parameters, and as values of the buffers."""
        views = [view.data for _, view in self.layout.views(payload)] if payload is not None else []
        for index, (entry, tensor) in enumerate(zip(self.layout.entries, self.tensors, strict=True)):
            if entry.spec.kind is Kind.PARAMETER:
                is_left_out = payload is None or entry.spec.name in without
                tensor.grad = None if is_left_out else views[index]
            elif entry.spec.kind is Kind.BUFFER and payload is not None:
                tensor.copy_(views[index])


class Link:
    """The exchange with the server above. Jobs run one after another on a thread."""

    def __init__(self, config: Config) -> None:
        """Join the run above. Raises UnreachableError, AuthError or the server's refusal."""
        upstream = config.upstream
        assert upstream.server is not None
        self.address = upstream.server
        changes: dict[str, Any] = {
            "server": upstream.server, "rank": upstream.rank, "codec": upstream.codec,
            "reply_codec": upstream.reply_codec, "device": "cpu",
        }  # fmt: skip
        worker = config.worker.model_copy(update=changes)
        of_worker: dict[str, Any] = {"worker": worker}
        if upstream.cert is not None:
            names = {"cert": upstream.cert, "key": upstream.key}
            of_worker["security"] = config.security.model_copy(update=names)
        credentials = worker_credentials(config.model_copy(update=of_worker))
        region = upstream.region or socket.gethostname(), config.run.workers or 1
        self._exchange = Exchange(worker, upstream.rank, None, credentials, region)
        self._exchange.wait_forever()
        self.settings, self.progress = self._exchange.settings, self._exchange.progress
        self._strategy = Direct(self._exchange)
        self.readings = Readings()  # of the region, which the server above shows beside this rank
        self._exchange.measures(self.readings.taken)
        self._thread = Helper("upstream")
        self.model: RegionTensors | None = None
        self.optimizer: OptimizerSpec | None = None

    @property
    def run_name(self) -> str:
        """The name of the region's run. A new relay process of this rank uses the same."""
        assert self.progress.rank is not None
        return region_run(self.progress.run, self.progress.rank)

    @property
    def incarnation(self) -> int:
        """A server incarnation that no earlier server of the region had. One more is free for a restored run."""
        return 2 * self.progress.incarnation

    @property
    def table(self) -> bytes | None:
        """State of the region's run that belongs to the weights of the newest START; None: the run is new."""
        begun = self._strategy.begun()
        return begun.payload if begun is not None else None

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(job)

    # ---- on the thread ----------------------------------------------------------------------

    def start(self, layout: Layout, optimizer: OptimizerSpec, weights: torch.Tensor) -> None:
        """Offer the model. On return `model` has the weights of the run above."""
        self.model, self.optimizer = RegionTensors(layout, weights.clone()), optimizer
        self._strategy.start(self.model, optimizer)

    def send(self, cut: Cut) -> bool:
        """Contribute. On return `model` has new weights. False: they are those of a new START."""
        assert self.model is not None
        num_starts, num_counted = self.progress.num_starts, self.progress.num_counted
        if self.settings.kind.holds_gradients:
            self.model.set_gradients(cut.payload, cut.without)
        elif cut.payload is not None:
            self.model.load(cut.payload)
        is_usual = cut.num_steps == self.progress.local_steps
        contribution = Contribution(
            kind=self.settings.kind,
            counts=Counts(cut.num_samples, None if is_usual else cut.num_steps, num_workers=cut.num_workers),
            training=cut.training,
            position=Position(cut.step, cut.num_steps),
        )
        self._strategy.contribute(Outgoing(contribution, cut.table))
        is_same = self.progress.num_starts == num_starts
        if is_same and self.progress.num_counted == num_counted:
            log.warning("region_not_counted", samples=cut.num_samples, steps=cut.num_steps, meaning=_NOT_COUNTED)
        return is_same

    def finish(self, can_evaluate: bool) -> Final | None:
        """Wait for the end of the run above. On return `model` has the final weights. None: it went back."""
        return self._strategy.finish(can_evaluate)

    def leave(self, metrics: dict[str, float], is_finished: bool) -> None:
        self._strategy.leave(Goodbye(metrics, finished=is_finished), is_interrupted=not is_finished)

    # ---- from any thread ----------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Request the end of the run above, with the next message."""
        self._strategy.stop(reason)

    def measured(self, metrics: dict[str, float]) -> None:
        """Send an evaluation with the next message."""
        self._strategy.measured(self.progress.version, metrics)

    def close(self) -> None:
        """End the connections; a job that waits ends with an error."""
        self._strategy.drop()
        self._thread.stop()
        self._thread.dismiss()
