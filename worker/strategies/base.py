"""What a training step does with its contribution: the protocol that optimizer, session and trainer know."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec
from ..conversation.messages import Final
from ..session import Progress
from ..tensors.transfer import Source


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
