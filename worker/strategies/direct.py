"""What a training step does with its contribution: it is exchanged, and the reply waited for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn

from ...common.errors import UsageError
from ...common.tensors.layout import Kind
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import Base, Outcome, PayloadInfo, Position
from ..conversation.exchange import Exchange
from ..conversation.messages import Begun, Final, Goodbye, Outgoing
from ..tensors.anchor import Anchor
from ..tensors.fragments import Fragments
from ..tensors.transfer import ModelTensors
from ..tensors.watch import Watch
from .early import MIN_MODEL_BYTES, EarlySender, ReadyGradients


def of_fragment(outgoing: Outgoing, without: tuple[int, ...]) -> Outgoing:
    """A contribution of which the others stay at home, and go on from what this worker has."""
    return outgoing.changed(payload=PayloadInfo(without_gradient=without), base=Base(has_all=True))


class Direct:
    """Between a training loop and an exchange, used by the training thread alone. The reply to a contribution, with its
    weights, arrives before the next step begins. `may_send_early`: gradients may leave during backward."""

    takes_whole = True  # whether this process has the whole model,
    evaluates = True  # and takes part in evaluations
    # Samples of the batch that is being computed, where they are known.
    num_samples_now: Callable[[], int] = staticmethod(lambda: 0)
    may_skip = True  # whether a step may be left out (infinities in fp16) without asking others

    def __init__(self, exchange: Exchange, may_send_early: bool) -> None:
        self._exchange = exchange
        self.settings = exchange.settings
        self.kind = exchange.settings.kind  # of contributions
        self.progress = exchange.progress  # where the training loop is in the run
        self._may_send_early = may_send_early and self.kind.holds_gradients
        self._early: EarlySender | None = None
        self._ready_gradients: ReadyGradients | None = None  # where some leave during backward
        self._anchor: Anchor | None = None  # where differences are exchanged,
        self._fragments: Fragments | None = None  # of one fragment at a time
        self._undone: dict[int, torch.Tensor] = {}  # tensors as they were before a replay, by index
        self._given: tuple[int, dict[int, torch.Tensor]] = (0, {})  # the same, as they came with that START

    def divided(self, model: nn.Module) -> nn.Module:
        """What `worker.zero` makes of a task's model."""
        return model

    def wraps(self, model: nn.Module) -> None:
        """The model as the script has it. UsageError where what it is wrapped in does not go with this."""
        parts = (name for name, item in model.named_parameters() if type(item).__name__ == "DTensor")
        if (name := next(parts, None)) is not None:
            raise UsageError(
                f"'{name}' is divided among processes (fully_shard), and this worker is one process",
                fix="--group: the processes that share the model are one worker (torchrun --nproc-per-node G, or "
                "ps-launch --group G); or give session.optimizer() the bare model",
            )

    def tensors(
        self, model: nn.Module, stepped: Iterable[torch.Tensor], averaged_buffers: Collection[str]
    ) -> ModelTensors:
        """Of the model, those that take part in the run; `stepped` by the optimizers. `averaged_buffers`: running
        statistics beside those of known layers; UsageError for what is none of its buffers."""
        return ModelTensors.of(model, stepped, averaged_buffers)

    def agreed(self, is_due: bool) -> bool:
        """Whether an evaluation is due, which all processes of this worker take part in."""
        return is_due

    def start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool = False) -> None:
        """Offer the model; it has the run's weights when this returns. `is_parted`: it has several optimizers, and a
        backward pass for one of them fills gradients of others too."""
        self._may_send_early &= not is_parted
        self._model = model
        self._start(model, optimizer)
        self._watch = None if self.kind.worker_steps else Watch(model)  # where only the server changes weights
        if self.kind.holds_differences:
            self._watch_steps(model)

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self._exchange.start(model, optimizer)
        if self._may_send_early and model.layout.exchange_bytes >= MIN_MODEL_BYTES:
            self._early = EarlySender(self._exchange, model)
            self._ready_gradients = self._early.gradients

    def _watch_steps(self, model: ModelTensors) -> None:
        """From here on it is known how far local steps go."""
        self._anchor = Anchor(model)
        if (num := self.settings.fragments) > 1:
            self._anchor = self._fragments = Fragments(model, num)

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """The worker's own optimizer is here, and what steps it."""

    def begun(self) -> Begun | None:
        """How this process is to begin: said with the newest START."""
        return self._exchange.begun

    def optimizer_state(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        """What the server's optimizer remembers of these, by their index, as torch has it; nothing before its first
        step. UnreachableError."""
        found = self._exchange.pull_optimizer()
        names = [self._model.names[id(parameter)] for parameter in parameters]
        return {index: found[name] for index, name in enumerate(names) if name in found}

    def replay(self, position: Position) -> None:
        """Until `replayed`, what the loop computes is not sent, and what it does to the model undone then."""
        (number, given), self._given = self._given, (0, {})
        self._undone = given if number == self.progress.num_starts else self._changing()
        if self._ready_gradients is not None:
            self._ready_gradients.is_paused = True
        self.progress.replay(position)

    def _changing(self) -> dict[int, torch.Tensor]:
        """Copies of what a loop changes, by index."""
        kinds = {Kind.BUFFER, Kind.PARAMETER} if self.kind.worker_steps else {Kind.BUFFER}
        entries = enumerate(self._model.layout.entries)
        changing = [index for index, entry in entries if entry.spec.kind in kinds]
        return {index: self._model.tensors[index].detach().clone() for index in changing}

    def replayed(self) -> int:
        """The contribution has been computed once more. Returns training steps that the run took without this rank."""
        self._look()
        for index, tensor in self._undone.items():
            self._model.tensors[index].data.copy_(tensor)  # as a reply does: a graph may hold them
        self._undone = {}
        if self._ready_gradients is not None:
            self._ready_gradients.is_paused = False
        return self.progress.replayed()

    def before_step(self, num_samples: int, loss: float, parameters: Sequence[torch.Tensor]) -> None:
        """A step of so many samples, with this mean loss, is about to be taken along the gradients of these."""

    def contribute(self, outgoing: Outgoing, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """The steps of a contribution are taken. Returns when the loop may go on, with weights to go on from. Where
        several optimizers step, `parameters` are those of the one that does.

        UsageError when what is around the loop has made another model of it, or put other weights into it; one that
        was moved is found again.
        """
        self._look()
        if parameters is not None:
            self._model.step_only(parameters)
        num_starts = self.progress.num_starts
        self._contribute(self._described(outgoing))
        if self.progress.num_starts != num_starts:  # the loop's rest of a generation comes before the replay
            self._given = self.progress.num_starts, self._changing()
        self._note()

    def went_on(self) -> None:
        """A training step is taken that no contribution follows yet."""

    def _note(self) -> None:
        """The model holds weights that came."""
        if self._watch is not None:
            self._watch.note()
        if self._anchor is not None:
            self._anchor.note()

    def _look(self) -> None:
        """Whether the model is still what the run knows."""
        self._look_again()
        if self._watch is not None and (changed := self._watch.changed()):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise UsageError(
                f"weights ('{changed[0]}'{more}) were changed between two steps, not by this optimizer: in mode "
                f"{self.settings.mode} the server holds the weights, and the change would be lost",
                fix="load or initialise weights before session.optimizer(), which takes them into the run; what a loop "
                "changes for a while (to evaluate an average, say) it puts back before step()",
            )

    def _look_again(self) -> None:
        if self._model.has_moved():
            self._exchange.moved()

    def _contribute(self, outgoing: Outgoing) -> None:
        if self._anchor is not None:
            self._anchor.measure()
        if self._early is not None:
            self._early.settle()
        reply = self._exchange.contribute(outgoing)
        if self._fragments is not None:
            self._fragments.replied(reply.result.outcome not in (Outcome.START, Outcome.REJECTED))

    def _described(self, outgoing: Outgoing) -> Outgoing:
        """With what is to be seen on the model's own tensors."""
        if self._fragments is not None:
            return of_fragment(outgoing, self._fragments.choose(self._next_fragment()))
        if self.kind.worker_steps:
            return outgoing
        is_part = outgoing.contribution.counts.part > 0
        payload = PayloadInfo(without_gradient=self._model.without_gradient())
        return outgoing.changed(payload=payload, base=Base(has_all=is_part))

    def _next_fragment(self) -> int | None:
        """To be exchanged; None: all, for nobody comes back for what would be left."""
        progress, num = self.progress, self.settings.fragments
        taken, of = progress.training_steps + progress.local_steps, progress.total_steps
        return None if num == 1 or (of is not None and taken >= of) else progress.version % num

    def finish(self, can_evaluate: bool) -> Final | None:
        """Wait for the others; the model has the run's final weights when this returns. None: the server has
        gone back to a snapshot, and there are steps to take again."""
        self._look_again()
        final = self._finish(can_evaluate)
        self.progress.is_done |= final is not None  # also when there were steps left to take
        self._note()
        return final

    def _finish(self, can_evaluate: bool) -> Final | None:
        return self._exchange.finish(can_evaluate)

    def stop(self, reason: str) -> None:
        """The run is to end for all: said with what is said next."""
        self._exchange.stop_reason = reason

    def settle(self) -> int:
        """The version of the weights in the model, which are the server's when this returns, until `measured`."""
        if self._fragments is not None:
            self._fragments.show()
        return self.progress.version

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        """What an evaluation gave: said with what is said next."""
        if self._fragments is not None:
            self._fragments.show(False)
        sound = {name: value for name, value in metrics.items() if math.isfinite(value)}
        said = {"version": version, "step": self.progress.position, "metrics": sound}
        self._exchange.measured.append({**said, "failure": failure, "exit_code": exit_code})

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        """Go in good order; interrupted, without waiting for a reply on its way."""
        self._exchange.leave(goodbye)

    def drop(self) -> None:
        """Go without a word, as a process that fails does."""
        self._exchange.drop()


def check_takes_dense(optimizer: torch.optim.Optimizer, who: str, fix: str) -> None:
    """UsageError for an optimizer that steps along sparse gradients only. A mean is dense: it does not say which rows
    had a gradient, and SparseAdam changes the moments of those alone."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            f"SparseAdam steps along sparse gradients only, and {who} average gradients as dense tensors",
            fix=f"take torch.optim.Adam; {fix}; or --mode sync and session.rows, a table on the server (sparse_adam)",
        )
