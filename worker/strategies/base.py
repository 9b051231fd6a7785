"""What every strategy has, and what it needs of the server's side (`Exchanger`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ...common.errors import UsageError
from ...common.tensors.layout import Kind
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import Position, Reply
from ..conversation.messages import Begun, Final, Goodbye, Outgoing, Settings
from ..session import Progress
from ..tensors.transfer import ModelTensors
from .early import ReadyGradients


class Exchanger(Protocol):
    """Implemented by `Exchange` (a worker of one process) and `GroupMember` (a process of a replica group)."""

    settings: Settings
    progress: Progress  # as the server knows it
    measured: list[dict[str, Any]]  # evaluations (Figures of the proto) that the server may not have received
    stop_reason: str  # why this worker asks for the end of the run; empty: it does not

    @property
    def begun(self) -> Begun | None:
        """Where this rank's last contribution that counts began, if the newest start named it."""

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        """Offer the model and receive the weights to start from."""

    def moved(self) -> None:
        """Look up the model's tensors again: they lie elsewhere in memory."""

    def contribute(self, outgoing: Outgoing) -> Reply:
        """Send the next contribution. Returns when the model has the weights of the reply."""

    def finish(self, can_evaluate: bool) -> Final | None:
        """Wait for the other workers and receive the final weights. None: the server went back, and steps remain."""

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state of the server's optimizer, by parameter and key. Raises UnreachableError."""

    def leave(self, goodbye: Goodbye) -> None:
        """Leave in good order."""

    def drop(self) -> None:
        """End the connections without a message, as a process that fails does."""


class Strategy:
    """Between a training loop and an exchanger, used by the training thread alone: what a training step does with its
    contribution."""

    takes_whole = True  # this process has the whole model,
    evaluates = True  # and takes part in evaluations
    # Samples of the batch that is being computed, where they are known.
    num_samples_now: Callable[[], int] = staticmethod(lambda: 0)
    may_skip = True  # a step may be left out (infinities in fp16) without asking other processes
    _model: ModelTensors

    def __init__(self, exchange: Exchanger) -> None:
        self._exchange = exchange
        self.settings = exchange.settings
        self.kind = exchange.settings.kind  # of contributions
        self.progress = exchange.progress  # where the training loop is in the run
        self._ready_gradients: ReadyGradients | None = None  # where some leave during backward
        self._undone: dict[int, torch.Tensor] = {}  # tensors as they were before a replay, by index
        self._at_start: tuple[int, dict[int, torch.Tensor]] = (0, {})  # the same, as they came with that start

    # ---- the model ----------------------------------------------------------------------------

    def divided(self, model: nn.Module) -> nn.Module:
        """A task's model as `worker.zero` divides it."""
        return model

    def wraps(self, model: nn.Module) -> None:
        """Check the script's model. Raises UsageError where its wrapper does not go with this strategy."""
        if (name := divided_tensor(model)) is not None:
            raise UsageError(
                f"'{name}' is divided among processes (fully_shard), and this worker is one process",
                fix="--group: the processes that share the model are one worker (torchrun --nproc-per-node G, or "
                "ps-launch --group G); or give session.optimizer() the bare model",
            )

    def tensors(
        self, model: nn.Module, stepped: Iterable[torch.Tensor], averaged_buffers: Collection[str]
    ) -> ModelTensors:
        """The tensors of the model that take part in the run; optimizers step those in `stepped`. `averaged_buffers`
        are running statistics beside those of known layers. Raises UsageError for a name that is no buffer."""
        return ModelTensors(model, stepped, averaged_buffers)

    def start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool = False) -> None:
        """Offer the model; it has the run's weights when this returns. `is_parted`: it has several optimizers, and a
        backward pass for one of them fills gradients of others too."""
        self._model = model
        self._start(model, optimizer, is_parted)

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        raise NotImplementedError

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """The worker's own optimizer and the function that steps it are there."""

    def begun(self) -> Begun | None:
        """How this process begins, as the newest start says."""
        return self._exchange.begun

    def optimizer_state(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        """The state of the server's optimizer for these parameters, by their index, in torch's form; empty before its
        first step. Raises UnreachableError."""
        found = self._exchange.pull_optimizer()
        names = [self._model.names[id(parameter)] for parameter in parameters]
        return {index: found[name] for index, name in enumerate(names) if name in found}

    def _find_model(self) -> None:
        """Find the model again where it was moved. Raises UsageError where it is another model."""
        if self._model.has_moved():
            self._exchange.moved()

    def _check_model(self) -> None:
        """Check that the model is still what the run knows. Raises UsageError."""
        self._find_model()

    # ---- replays ------------------------------------------------------------------------------

    def replay(self, position: Position) -> None:
        """Until `replayed`, computed gradients are not sent, and changes of the model are undone then."""
        (number, tensors), self._at_start = self._at_start, (0, {})
        self._undone = tensors if number == self.progress.num_starts else self._changing()
        if self._ready_gradients is not None:
            self._ready_gradients.is_paused = True
        self.progress.replay(position)

    def _changing(self) -> dict[int, torch.Tensor]:
        """Copies of the tensors that a loop changes, by index."""
        kinds = {Kind.BUFFER, Kind.PARAMETER} if self.kind.worker_steps else {Kind.BUFFER}
        entries = enumerate(self._model.layout.entries)
        changing = [index for index, entry in entries if entry.spec.kind in kinds]
        return {index: self._model.tensors[index].detach().clone() for index in changing}

    def replayed(self) -> int:
        """The contribution has been computed once more. Returns training steps that the run took without this rank."""
        self._check_model()
        for index, tensor in self._undone.items():
            self._model.tensors[index].data.copy_(tensor)  # as a reply does: a graph may hold them
        self._undone = {}
        if self._ready_gradients is not None:
            self._ready_gradients.is_paused = False
        return self.progress.replayed()

    # ---- steps --------------------------------------------------------------------------------

    def before_step(self, num_samples: int, loss: float, parameters: Sequence[torch.Tensor]) -> None:
        """A step of so many samples, with this mean loss, is about to be taken along these parameters' gradients."""

    def agreed(self, is_due: bool) -> bool:
        """Whether an evaluation is due, in which all processes of this worker take part."""
        return is_due

    def contribute(self, outgoing: Outgoing, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """The steps of a contribution are taken. Returns when the loop may go on, with weights to go on from. Where
        several optimizers step, `parameters` are those of the one that does. Raises UsageError when the loop has
        replaced the model or its weights; a model that was moved is found again.
        """
        self._check_model()
        if parameters is not None:
            self._model.step_only(parameters)
        num_starts = self.progress.num_starts
        self._contribute(outgoing)
        if self.progress.num_starts != num_starts:  # the loop's rest of an epoch comes before the replay
            self._at_start = self.progress.num_starts, self._changing()
        self._note_weights()

    def _contribute(self, outgoing: Outgoing) -> None:
        raise NotImplementedError

    def _note_weights(self) -> None:
        """The model holds weights that came."""

    def went_on(self) -> None:
        """A training step is taken that no contribution follows yet."""

    # ---- evaluations, and the end -------------------------------------------------------------

    def finish(self, can_evaluate: bool) -> Final | None:
        """Wait for the others; the model has the run's final weights when this returns. None: the server has
        gone back to a snapshot, and there are steps to take again."""
        self._find_model()
        final = self._finish(can_evaluate)
        self.progress.is_done |= final is not None  # also when there were steps left to take
        self._note_weights()
        return final

    def _finish(self, can_evaluate: bool) -> Final | None:
        return self._exchange.finish(can_evaluate)

    def stop(self, reason: str) -> None:
        """Ask for the end of the run for all, with the next message to the server."""
        self._exchange.stop_reason = reason

    def settle(self) -> int:
        """Show the server's weights in the model until `measured`; returns their version."""
        return self.progress.version

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        """Send the result of an evaluation with the next message to the server."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        result = {"version": version, "step": self.progress.position, "metrics": finite}
        self._exchange.measured.append({**result, "failure": failure, "exit_code": exit_code})

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        """Leave in good order; interrupted, without waiting for a pending reply."""
        self._exchange.leave(goodbye)

    def drop(self) -> None:
        """End the connections without a message, as a process that fails does."""
        self._exchange.drop()


def divided_tensor(model: nn.Module) -> str | None:
    """The name of a parameter that is divided among processes (DTensor), if there is one."""
    names = (name for name, item in model.named_parameters() if type(item).__name__ == "DTensor")
    return next(names, None)


def check_takes_dense(optimizer: torch.optim.Optimizer, who: str, fix: str) -> None:
    """Raises UsageError for an optimizer that steps along sparse gradients only. A mean is dense: it does not say which
    rows had a gradient, and SparseAdam changes the moments of those alone."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            f"SparseAdam steps along sparse gradients only, and {who} average gradients as dense tensors",
            fix=f"take torch.optim.Adam; {fix}; or --mode sync and session.rows, a table on the server (sparse_adam)",
        )
