"""What a training step does with its contribution: exchange it and wait, or wait for it one step later.

`make_strategy` chooses once, from the run's settings; the optimizer, the session and the trainer
know only the protocol.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec
from ..conversation.exchange import Exchange
from ..conversation.messages import Final
from ..session import Progress
from ..tensors.transfer import ModelTensors, Source
from .early import MIN_MODEL_BYTES, EarlySender


class Work(NamedTuple):
    """What is said about one contribution; seconds, and the mean training loss."""

    num_samples: int
    loss: float
    compute_s: float
    hyperparameters: list[Hyperparameters]


class Strategy(Protocol):
    """Between a training loop and an exchange. Used by the training thread alone."""

    progress: Progress  # where the training loop is in the run
    source: Source  # what contributions hold

    def start(self, optimizer: OptimizerSpec) -> None:
        """Offer the model; it has the run's weights when this returns."""

    def contribute(self, work: Work) -> None:
        """The steps of a contribution are taken. Returns when the loop may go on, with weights to go on from."""

    def finish(self, can_evaluate: bool) -> Final | None:
        """Wait for the others; the model has the run's final weights when this returns. None: the server has
        gone back to a snapshot, and there are steps to take again."""

    def leave(self, figures: dict[str, float], is_interrupted: bool) -> None:
        """Go in good order; interrupted, without waiting for an answer on its way."""

    def drop(self) -> None:
        """Go without a word, as a process that fails does."""


class Direct:
    """Every contribution is answered before the next step begins."""

    def __init__(self, exchange: Exchange, model: ModelTensors, may_send_early: bool) -> None:
        self._exchange = exchange
        self._may_send_early = may_send_early and model.layout.exchange_bytes >= MIN_MODEL_BYTES
        self._early: EarlySender | None = None
        self._model = model
        self.progress = exchange.progress
        self.source: Source = exchange.settings.source

    def start(self, optimizer: OptimizerSpec) -> None:
        self._exchange.start(self._model, optimizer)
        if self._may_send_early and self.source == "gradient" and self._exchange.codec_name == "raw":
            self._early = EarlySender(self._exchange, self._model)

    def contribute(self, work: Work) -> None:
        if self._early is not None:
            self._early.settle()
        self._exchange.contribute(self.source, *work)

    def finish(self, can_evaluate: bool) -> Final | None:
        return self._exchange.finish(can_evaluate)

    def leave(self, figures: dict[str, float], is_interrupted: bool) -> None:
        self._exchange.leave(figures)

    def drop(self) -> None:
        self._exchange.drop()


def make_strategy(exchange: Exchange, model: ModelTensors, may_send_early: bool) -> Strategy:
    """The one the run's settings ask for; `may_send_early`: gradients may leave during backward."""
    if exchange.settings.pipelined:
        from .pipelined import Pipelined

        return Pipelined(exchange, model)
    return Direct(exchange, model, may_send_early)
