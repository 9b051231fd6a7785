"""`Strategy`, the base of all strategies; `Exchanger`, its conversation; and the strategy of the server modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.optimizers import IN_WORKERS, OptimizerSpec
from ...common.wire.records import Base, PayloadInfo, Position, Reply
from ..conversation.exchange import Exchange
from ..conversation.messages import Begun, Final, Goodbye, Outgoing, Settings
from ..session import Progress
from ..tensors.local_steps import Anchor
from ..tensors.transfer import ModelTensors, is_divided
from ..tensors.watch import Watch

log = get_logger()


class Exchanger(Protocol):
    """Implemented by `Exchange` (a worker of one process) and `GroupMember` (a process of a replica group)."""

    settings: Settings
    progress: Progress  # as the server knows it
    measured: list[dict[str, Any]]  # evaluations (Metrics in the proto) that the server may not have received
    replies_lose: bool  # a codec of replies makes the model differ from the server's weights until the run ends
    stop_reason: str  # why this worker requests the end of the run; empty: it does not

    @property
    def begun(self) -> Begun | None:
        """Where this rank's last counted contribution began, if the newest START named it."""

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        """Offer the model and receive the weights to start from."""

    def moved(self) -> None:
        """Look up the model's tensors again, because they moved in memory."""

    def contribute(self, outgoing: Outgoing) -> Reply:
        """Send the next contribution. Returns when the model has the weights of the reply."""

    def pull_exact(self, model: ModelTensors) -> int:
        """Write the server's exact newest weights into this model. Returns their version. Waits for a lost server."""

    def finish(self) -> Final | None:
        """Wait for the other workers and receive the final weights. None: the server went back, and steps remain."""

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state of the server's optimizer, by parameter and key. Raises UnreachableError."""

    def leave(self, goodbye: Goodbye) -> None:
        """Leave the run and tell the server."""

    def drop(self) -> None:
        """End the connections without a message, as a crashed process does."""


class Strategy:
    """Exchanges the contributions of a training loop through an exchanger. Used by the training thread only."""

    takes_whole = True  # this process has the whole model
    # Samples of the batch that the model computes now; 0: not known.
    num_samples_now: Callable[[], int] = staticmethod(lambda: 0)
    may_skip = True  # this process may skip a step (fp16 infinities) without asking other processes
    _model: ModelTensors
    _ready_gradients: ReadyGradients | None = None  # set if gradients are sent during backward
    _before_void: dict[int, torch.Tensor] | None = None  # tensors as they were before void steps, by index

    def __init__(self, exchange: Exchanger) -> None:
        self._exchange = exchange
        self.settings = exchange.settings
        self.kind = exchange.settings.kind  # of contributions
        self.progress = exchange.progress  # the training loop's progress in the run
        self._undone: dict[int, torch.Tensor] = {}  # tensors as they were before a replay, by index
        self._aside: list[torch.Tensor] = []  # the model's tensors while it shows others to an evaluation
        # (number of the start, tensors as they arrived with it, by index)
        self._at_start: tuple[int, dict[int, torch.Tensor]] = (0, {})
        self._watch: Watch | None = None  # of the weights as the newest step left them
        self._is_fresh = True  # no step of this process came before the next one, which begins at the run's weights
        self._change = 0  # whether the script has changed the weights before this step: 1; 2: not known

    # ---- the model ----------------------------------------------------------------------------

    def divided(self, model: nn.Module) -> nn.Module:
        """Shard a task's model as `worker.zero` says."""
        return model

    def wraps(self, model: nn.Module) -> None:
        """Check the script's model. Raises UsageError if its wrapper does not work with this strategy."""
        if (name := divided_tensor(model)) is not None:
            raise UsageError(
                f"'{name}' is sharded over processes (fully_shard), but this worker is one process",
                fix="--group makes the processes that share the model one worker (torchrun --nproc-per-node G, or "
                "ps-launch --group G); or give session.optimizer() the unwrapped model",
            )

    def tensors(
        self, model: nn.Module, stepped: Iterable[torch.Tensor], averaged_buffers: Collection[str]
    ) -> ModelTensors:
        """Return the model's tensors that take part in the run. Optimizers step those in `stepped`.

        `averaged_buffers` names running statistics besides those of known layers. Raises UsageError for a name that is
        not a buffer.
        """
        return ModelTensors(model, stepped, averaged_buffers)

    def start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool = False) -> None:
        """Offer the model. On return it has the run's weights.

        `is_parted`: it has several optimizers, and a backward pass for one of them also fills gradients of the others.
        """
        self._model, self._watch = model, Watch(model)
        self._start(model, optimizer, is_parted)

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        raise NotImplementedError

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Called with this worker's own optimizer and the function that runs one step of it."""

    def began(self) -> None:
        """The model has the run's weights. Say once that they are not those that the script gave it."""
        assert self._watch is not None
        replaced = self._watch.changed()
        self._watch.note()
        if replaced and not self.progress.row.steps:
            log.warning(
                "other_weights",
                rank=self.progress.rank,
                tensors=self._watch.names(replaced),
                meaning="the model has the run's weights now, those of rank 0 or of a run that goes on; copies that "
                "were made before session.optimizer() (an average, a target, a teacher) have the script's own",
                fix="make copies after session.optimizer(); or call torch.manual_seed(N) before the model is made",
            )

    def begun(self) -> Begun | None:
        """Where this process begins, as the newest START says; None: at the beginning."""
        return self._exchange.begun

    def optimizer_state(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        """The state of the server's optimizer for these parameters, by their index, in torch's form.

        It is empty before the first step. Raises UnreachableError.
        """
        found = self._exchange.pull_optimizer()
        names = [self._model.names[id(parameter)] for parameter in parameters]
        return {index: found[name] for index, name in enumerate(names) if name in found}

    def _find_model(self) -> None:
        """Look up the model's tensors if they moved. Raises UsageError if the model was replaced."""
        if self._model.has_moved():
            self._exchange.moved()

    def check_model(self) -> None:
        """Check that the model still matches the run. Raises UsageError."""
        self._find_model()
        if self._watch is None:
            return
        if self._watch.frozen and (frozen := self._watch.changed_frozen(is_last=False)):
            raise UsageError(
                f"frozen weights ({self._watch.names(frozen)}) were changed: the run has and saves those that it began "
                "with, so the change would be lost",
                fix="keep what the script updates (a teacher, a target) in a separate model, in session.state()",
            )
        if self.kind.worker_steps:
            return
        if changed := self._watch.changed():
            raise UsageError(
                f"weights ({self._watch.names(changed)}) were changed between two steps, not by this optimizer: in "
                f"mode {self.settings.mode} the server owns the weights, so the change would be lost",
                fix="load or initialise weights before session.optimizer(), which uploads them; if a loop changes "
                "weights temporarily (to evaluate an average, say), restore them before step(); keep an average "
                "that lasts (a teacher) in a separate model; clamp weights in forward(), or " + IN_WORKERS,
            )

    def note(self) -> None:
        """Remember the weights as the newest step left them. Later changes are the script's."""
        if self._watch is not None:
            self._find_model()
            self._watch.note()

    def changes(self) -> dict[int, torch.Tensor]:
        """Copies of the weights that the script has changed since the newest step, by index, and of all buffers.

        It is empty if the script has changed neither.
        """
        if self._watch is None or self.progress.is_replaying:
            return {}
        self._find_model()
        changed = self._watch.changed() + self._watch.changed_frozen(is_last=True)
        has_others = changed or self._watch.has_other_buffers()
        buffers = range(self._model.num_trained, self._model.num_exchanged) if has_others else ()
        return {index: self._model.tensors[index].detach().clone() for index in (*changed, *buffers)}

    def keep(self, changes: dict[int, torch.Tensor]) -> None:
        """Put the script's changes back after the run's final weights came, and say so.

        If only buffers were changed, those of the run stay, which are the same on all workers.
        """
        assert self._watch is not None
        buffers = range(self._model.num_trained, self._model.num_exchanged)
        trained = [index for index in changes if index not in buffers]
        if not trained:
            tensors = self._model.tensors
            if lost := [index for index, mine in changes.items() if not torch.equal(mine, tensors[index])]:
                log.warning(
                    "buffers_replaced",
                    tensors=self._watch.names(lost),
                    meaning="the script changed these buffers after its last step; they have the run's values now",
                    fix="change buffers before a step, or (as swa_utils.update_bn does) after session.finish()",
                )
            return
        for index, tensor in changes.items():
            self._model.tensors[index].data.copy_(tensor)
        log.warning(
            "weights_kept",
            tensors=self._watch.names(trained),
            meaning="the script changed these weights, and no step has the change; they stay so in this process, but "
            "the run's final weights, which the server saves, are without it",
            fix="change weights after session.finish(), and save them in the script",
        )

    # ---- replays ------------------------------------------------------------------------------

    def replay(self, position: Position) -> None:
        """Begin a replay at `position`.

        Until `replayed`, gradients are not sent, and changes of the model will be undone.
        """
        (number, tensors), self._at_start = self._at_start, (0, {})
        self._undone = tensors if number == self.progress.num_starts else self._changing()
        if self._ready_gradients is not None:
            self._ready_gradients.is_paused = True
        self.progress.replay(position)

    def _changing(self) -> dict[int, torch.Tensor]:
        """Copies of the tensors that a training loop changes, by index."""
        changing = range(0 if self.kind.worker_steps else self._model.num_trained, self._model.num_exchanged)
        return {index: self._model.tensors[index].detach().clone() for index in changing}

    def replayed(self) -> int:
        """End the replay. Returns the number of training steps that the run took without this rank."""
        self.check_model()
        for index, tensor in self._undone.items():
            self._model.tensors[index].data.copy_(tensor)  # `data`, because a graph may hold these tensors
        self._undone = {}
        if self._ready_gradients is not None:
            self._ready_gradients.is_paused = False
        self.note()
        return self.progress.replayed()

    def pause(self) -> None:
        """Void steps follow: send no gradients early, and keep what `restore` puts back."""
        self._before_void = self._changing()
        if self._ready_gradients is not None:
            self._ready_gradients.is_paused = True

    def restore(self) -> None:
        """Undo what void steps changed in the model: its buffers, and weights that this worker steps."""
        for index, tensor in (self._before_void or {}).items():
            self._model.tensors[index].data.copy_(tensor)
        if self._ready_gradients is not None and self._before_void is not None:
            self._ready_gradients.is_paused = False
        self._before_void = None

    # ---- steps --------------------------------------------------------------------------------

    def before_step(self, num_samples: int, losses: Sequence[float], groups: Sequence[dict[str, Any]]) -> None:
        """Called before a step with its samples and losses, along the gradients of these parameter groups.

        Raises UsageError for a loop that has replaced the model or its weights: then nothing of the step counts.
        """
        self.check_model()

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> None:
        """Scale these parameters' gradients so that their 2-norm is at most `max_norm`."""
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def agreed(self, is_due: bool) -> bool:
        """Whether an evaluation is due on all processes of this worker."""
        return is_due

    def contribute(self, outgoing: Outgoing, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Exchange a contribution after its last step.

        Returns when the loop may continue, with the weights for the next step.

        `parameters`: with several optimizers, those of the optimizer that steps. If the model moved in memory, its
        tensors are looked up again.
        """
        self._find_model()
        if parameters is not None:
            self._model.step_only(parameters)
        num_starts = self.progress.num_starts
        if self.kind.has_peers and self._watch is not None:
            self._change = 2 if self._is_fresh else bool(self._watch.changed())
        self._contribute(outgoing)
        self._is_fresh = self.progress.num_starts != num_starts
        if self._is_fresh:  # the loop finishes its epoch before the replay
            self._at_start = self.progress.num_starts, self._changing()
        self._note_weights()
        if self.kind.has_peers:  # the optimizer has stepped meanwhile, and may have given the weights other memory
            self._find_model()
        if self._watch is not None:
            self._watch.note()

    def _contribute(self, outgoing: Outgoing) -> None:
        raise NotImplementedError

    def _note_weights(self) -> None:
        """Called when the model has the weights that arrived."""

    def went_on(self) -> None:
        """Called after a training step that does not complete a contribution."""

    def cut_short(self) -> bool:
        """No training step follows: the next contribution has the steps taken so far. False: there are none."""
        return self.progress.cut_short()

    # ---- evaluations, and the end -------------------------------------------------------------

    def finish(self) -> Final | None:
        """Wait for the other workers. On return the model has the run's final weights.

        Returns None if the server went back to a snapshot, so that steps have to be taken again.
        """
        self._find_model()
        final = self._finish()
        self.progress.is_done |= final is not None  # also if steps were left
        self._note_weights()
        self.note()
        return final

    def _finish(self) -> Final | None:
        return self._exchange.finish()

    def stop(self, reason: str) -> None:
        """Request the end of the run for all workers, with the next message to the server."""
        self._exchange.stop_reason = reason

    def settle(self) -> int:
        """Put the server's weights into the model until `measured` is called. Returns their version."""
        return self.progress.version

    def show_exact(self, version: int) -> int:
        """After `settle`: replace decoded weights by the server's exact ones. Returns the version in the model."""
        if not self._exchange.replies_lose:
            return version
        self._set_aside()
        return self._exchange.pull_exact(self._model)

    def _set_aside(self) -> None:
        """Keep the model's tensors until `measured` puts them back."""
        self._aside = self._aside or [tensor.detach().clone() for tensor in self._model.tensors]

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        """Send the result of an evaluation with the next message to the server."""
        for tensor, before in zip(self._model.tensors, self._aside, strict=False):
            tensor.data.copy_(before)
        self._aside = []
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        result = {"version": version, "step": self.progress.position, "metrics": finite}
        self._exchange.measured.append({**result, "failure": failure, "exit_code": exit_code})

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        """Leave the run and tell the server. An interrupted worker does not wait for a pending reply."""
        self._exchange.leave(goodbye)

    def drop(self) -> None:
        """End the connections without a message, as a crashed process does."""
        self._exchange.drop()


def divided_tensor(model: nn.Module) -> str | None:
    """The name of a parameter that is sharded over processes (DTensor), or None."""
    return next((name for name, item in model.named_parameters() if is_divided(item)), None)


def check_takes_dense(optimizer: torch.optim.Optimizer, peers: str, fix: str) -> None:
    """Raises UsageError for an optimizer that needs sparse gradients.

    A mean is dense. It does not say which rows had a gradient, but SparseAdam changes only the moments of those rows.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            f"SparseAdam steps along sparse gradients only, and {peers} average gradients as dense tensors",
            fix=f"use torch.optim.Adam; {fix}; or --mode sync and session.rows, a table on the server (sparse_adam)",
        )


# ---- blocking ------------------------------------------------------------------------------------
# Strategy of the server modes: exchange a contribution and wait for its reply.


class BlockingStrategy(Strategy):
    """Waits for a contribution's reply and its weights before the next step begins.

    With `early`, gradients are sent through that exchange during backward.
    """

    def __init__(self, exchange: Exchanger, early: Exchange | None = None) -> None:
        super().__init__(exchange)
        self._early_exchange = early if self.kind.holds_gradients else None
        self._anchor: Anchor | None = None  # set if deltas are exchanged

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        self._exchange.start(model, optimizer)
        may_send_early = not is_parted and model.layout.exchange_bytes >= MIN_MODEL_BYTES
        if self._early_exchange is not None and may_send_early:
            self._ready_gradients = EarlySender(self._early_exchange, model)
        if self.kind.holds_differences:
            self._anchor = Anchor(model)

    def _note_weights(self) -> None:
        if self._anchor is not None:
            self._anchor.note()

    def _contribute(self, outgoing: Outgoing) -> None:
        if self._anchor is not None:
            self._anchor.measure()
        if self._ready_gradients is not None:
            self._ready_gradients.settle()
        if not self.kind.worker_steps:
            without, is_part = self._model.without_gradient(), outgoing.contribution.counts.part > 0
            if without or is_part:
                outgoing = outgoing.changed(payload=PayloadInfo(without_gradient=without), base=Base(has_all=is_part))
        self._exchange.contribute(outgoing)


# ---- gradients sent during backward --------------------------------------------------------------
# Sends gradients while backward is still running.
#
# Each finished gradient goes into a bucket. A full bucket is sent at once, before the contribution that it belongs
# to, as in PyTorch's DistributedDataParallel (Li et al. 2020). `step()` sends the rest.
#
# A gradient may change after it was sent, by clipping, unscaling or a second backward that accumulates. Torch counts
# each in-place change of a tensor, so `step()` notices it. Then everything is sent again, and later steps send
# nothing early. A change that bypasses the count (`grad.data`) is not noticed, so scripts must enable this feature
# (worker.overlap).


# Small buckets leave little for the end, but each costs messages. So a bucket has at least this size, and there are at
# most 64. Measured with 4 MB over 400 Mbit/s and a real backward: 0.79 of the plain step with 256 KiB, 0.83 with 1 MiB.
_BUCKET_BYTES = 256 << 10
_MAX_BUCKETS = 64
# For smaller models, sending is faster than watching.
MIN_MODEL_BYTES = 1 << 20


class ReadyGradients:
    """Calls `ready(index, gradient)` during backward for each finished gradient, and detects later changes."""

    def __init__(self, model: ModelTensors, ready: Callable[[int, torch.Tensor], None]) -> None:
        self._model, self._ready = model, ready
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}  # finished gradients, and torch's count of their changes
        self._is_wrong = False
        self.is_paused = False  # while True, gradients are not sent
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._accumulated, index))
            for index, tensor in enumerate(model.tensors[: model.num_trained])
            if tensor.requires_grad
        ]

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        self._is_wrong |= index in self._seen or gradient is None or gradient.is_sparse
        if self._is_wrong or self.is_paused or gradient is None:
            return
        self._seen[index] = gradient, gradient._version
        self._ready(index, gradient)

    def note(self, index: int) -> None:
        """The gradient moved to shared memory: watch it there."""
        gradient = self._model.tensors[index].grad
        assert gradient is not None
        self._seen[index] = gradient, gradient._version

    def settle(self) -> bool:
        """Called by `step()`.

        Returns False if a gradient changed after it was finished; then nothing is sent early any more.
        """
        seen, self._seen = self._seen, {}
        is_right = not self._is_wrong and all(
            self._model.tensors[index].grad is gradient and gradient._version == num_changes
            for index, (gradient, num_changes) in seen.items()
        )
        if not is_right:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._is_wrong = [], False
            log.info("overlap_off", reason="gradients change between backward and step(): they leave at step()")
        return is_right


class EarlySender(ReadyGradients):
    """Collects finished gradients in buckets, and sends full ones through the exchange."""

    def __init__(self, exchange: Exchange, model: ModelTensors) -> None:
        super().__init__(model, self._add)
        self._exchange = exchange
        self._bucket: list[int] = []
        self._bucket_bytes = 0
        self._full_bytes = max(_BUCKET_BYTES, model.layout.exchange_bytes // _MAX_BUCKETS)
        self._waiting: list[int] = []  # a bucket that is being copied off its device

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        self._bucket.append(index)
        self._bucket_bytes += self._model.layout.entries[index].num_bytes
        if self._bucket_bytes < self._full_bytes:
            return
        bucket, self._bucket, self._bucket_bytes = self._bucket, [], 0
        if self._exchange.shards.prepare(bucket):
            # This bucket's copy has begun, so send the previous bucket, whose copy has had time to finish.
            bucket, self._waiting = self._waiting, bucket
        if bucket:
            self._exchange.shards.depart(bucket)
        for index in bucket:
            self.note(index)

    def settle(self) -> bool:
        """Called by `step()`: keep the gradients that were sent, or discard them so that all are sent again."""
        if not (is_right := super().settle()):
            self._exchange.shards.recall()
        self._bucket, self._bucket_bytes, self._waiting = [], 0, []
        return is_right
