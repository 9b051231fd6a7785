"""The relay as one worker of the run above."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..common.config.schema import Config
from ..common.reporting.history import region_run
from ..common.reporting.log import get_logger
from ..common.tensors.layout import Kind, Layout
from ..common.tensors.optimizers import OptimizerSpec
from ..common.wire.records import Contribution, Counts, Outcome, Position, TrainingInfo
from ..worker.conversation.exchange import Exchange
from ..worker.conversation.messages import Final, Goodbye, Outgoing
from ..worker.conversation.security import worker_credentials
from ..worker.conversation.threads import Helper
from ..worker.strategies.base import Strategy
from ..worker.strategies.delayed_update import Overlapped
from ..worker.strategies.direct import Direct
from ..worker.tensors.local_steps import RULES
from ..worker.tensors.transfer import ModelTensors
from ..worker.training.readings import Readings

log = get_logger()

OVER = "the run above was over"
_NOT_COUNTED = {
    Outcome.DROPPED: "it came after the end of its round",
    Outcome.REJECTED: "the run above rejected it (store.on_nonfinite, store.max_norm)",
}


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


def merge(
    layout: Layout, now: torch.Tensor, before: torch.Tensor, new: torch.Tensor, rule: str = "shift", alpha: float = 0.0
) -> None:
    """Change weights of a region, uint8 [total_bytes], in place: `before` becomes `new`, and a rule of RULES keeps the
    steps since. Buffers that are not averaged stay the region's."""
    for flat in (*layout.runs_of(Kind.PARAMETER), *layout.runs_of(Kind.BUFFER)):
        if flat.kind is Kind.PARAMETER or (flat.is_float and flat.is_averaged):
            RULES[rule](flat.view(now), flat.view(before), flat.view(new), alpha)


def log_not_counted(samples: int, steps: int, meaning: str, is_sent_again: bool = False) -> None:
    """Log work of the region that the run above has not counted."""
    log.warning("region_not_counted", samples=samples, steps=steps, meaning=meaning, is_sent_again=is_sent_again)


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
        self.num_workers = config.run.workers or 1  # of the region, as the server above knows it
        region = upstream.region or socket.gethostname(), self.num_workers
        self._exchange = Exchange(worker, upstream.rank, None, credentials, region)
        self.settings, self.progress = self._exchange.settings, self._exchange.progress
        has_fragments = self.settings.fragments > 1
        self._strategy: Strategy = Overlapped(self._exchange) if has_fragments else Direct(self._exchange)
        self._strategy.settings = replace(self.settings, delayed_update=False)  # the region overlaps by itself
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
        """Offer the model. On return `model` has the weights of the run above, for which it then waits forever."""
        self.model, self.optimizer = RegionTensors(layout, weights.clone()), optimizer
        self._strategy.start(self.model, optimizer)
        self._exchange.wait_forever()  # not before: the run above may be over when a relay starts again

    def send(self, cut: Cut) -> Outcome:
        """Contribute. On return `model` has new weights. Returns START if they are those of a new START.

        Weights that came too late for their round are sent again: the steps are added to the newer weights."""
        assert self.model is not None
        while True:
            before = self.model.payload.clone() if self.settings.kind.worker_steps else None
            outcome = self._contribute(cut)
            if outcome not in _NOT_COUNTED:
                return outcome
            meaning = _NOT_COUNTED[outcome]
            if before is None or cut.payload is None or outcome is Outcome.REJECTED:
                log_not_counted(cut.num_samples, cut.num_steps, meaning)
                return outcome
            is_over = self.progress.is_done
            log_not_counted(cut.num_samples, cut.num_steps, OVER if is_over else meaning, is_sent_again=not is_over)
            if is_over:
                return outcome
            moved = cut.payload.clone()
            # The residual of the codec has the steps of a dropped delta, so that the next one is to add nothing.
            since = cut.payload if self.settings.kind.holds_differences else before
            merge(self.model.layout, moved, since, self.model.payload)
            cut = cut._replace(payload=moved)

    def _contribute(self, cut: Cut) -> Outcome:
        """Exchange one contribution."""
        assert self.model is not None
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
        self.num_workers = cut.num_workers
        self._strategy.contribute(Outgoing(contribution, cut.table))
        return self.progress.outcome

    def finish(self, can_evaluate: bool) -> Final | None:
        """Wait for the end of the run above. On return `model` has the final weights. None: it went back."""
        return self._strategy.finish(can_evaluate)

    def leave(self, metrics: dict[str, float]) -> None:
        """Leave after `finish`, with the metrics of the final evaluation."""
        self._strategy.leave(Goodbye(metrics), is_interrupted=False)

    # ---- from any thread ----------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Request the end of the run above, with the next message."""
        self._strategy.stop(reason)

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        """Send an evaluation after so many steps of the region, with the message after the one that is on its way."""
        version = self.progress.version

        def add() -> None:
            self._strategy.measured(version, metrics)
            self._exchange.measured[-1]["step"] = step

        self.submit(add)

    def close(self) -> None:
        """End the connections; a job that waits ends with an error."""
        self._strategy.drop()
        self._thread.stop()
        self._thread.dismiss()
