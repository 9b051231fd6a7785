"""All-reduce strategy (`--mode allreduce`): workers average gradients among themselves, without the server.

    backward | average over the group | completion -> reply | step | next batch

The completion says that this worker has the mean. The reply says that all members have it. Only then the worker
steps. So a member that dies before its completion leaves no other member a step ahead. The others still have their
gradients, and average them again in the group that the reply names. A new worker copies weights and optimizer state
from an existing member when the group forms.

When the server requests the weights, the member of lowest rank steps before the reply, and keeps a copy to undo the
step. In a region (docs/regions.md) all members step before the reply, whose weights replace those of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...common.errors import DivergedError, UsageError
from ...common.kinds import ContributionKind
from ...common.registry import CODECS
from ...common.tensors.clipping import clip
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import COUNTED, CompletionInfo, Contribution, Outcome, Reply
from ..conversation.exchange import Exchange
from ..conversation.messages import Final, Goodbye, Outgoing
from ..tensors.transfer import ModelTensors
from .base import Strategy, check_takes_dense
from .buckets import is_finite
from .collectives.backends import computed, without_watchdog
from .collectives.rendezvous import Broken
from .consistency import ConsistencyCheck
from .early import MIN_MODEL_BYTES, ReadyGradients
from .encoded_mean import EncodedMean
from .group import Group, Unsound
from .group_lifecycle import GroupLifecycle
from .peer_state import NO_VERSION, Mean, StateTransfer, UndoableStep

_NOTHING = Outgoing(Contribution())  # for a failed round, which has no gradients
_UPLOADS, UPLOADS_OPTIMIZER, _RETURNS = 1, 2, 4  # flags: the last metadata of the lowest member


class AllReduceStrategy(Strategy):
    """The rounds of one peer: average, complete, step."""

    _exchange: Exchange
    _step: UndoableStep
    _transfer: StateTransfer
    _check: ConsistencyCheck

    def __init__(self, exchange: Exchange, may_leave_early: bool, stage: int = 0) -> None:
        """`may_leave_early`: gradients may be averaged during backward. `stage`: this worker's in a pipeline."""
        super().__init__(exchange)
        self._confirmed = exchange.progress  # what the server has confirmed
        self._codec = exchange.config.codec
        self._encoded: EncodedMean | None = None  # set if worker.codec encodes gradients
        self._may_leave_early = may_leave_early and self._codec == "raw"
        self._lifecycle = GroupLifecycle(exchange, stage)

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        self._exchange.start(model, optimizer)
        self._trained = range(model.num_trained)
        # parameters in the order of backward, then buffers
        self._order = [*reversed(self._trained), *range(model.num_trained, model.num_exchanged)]
        entries = enumerate(model.layout.entries)
        self._of_lowest = frozenset(index for index, entry in entries if not entry.spec.is_averaged)
        self._of_sum = frozenset(self._trained) if optimizer.reduction == "sum" else frozenset()
        devices = {tensor.device for tensor in model.tensors}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        if self._device.type == "cuda":  # other threads create groups again and again
            without_watchdog()
        if self._codec != "raw":
            self._encoded = EncodedMean(CODECS.load(self._codec)(), self._model, self._of_sum)
            self._exchange.shards.peers_encoding = self._encoded.encoding
        if self._may_leave_early and model.layout.exchange_bytes >= MIN_MODEL_BYTES:
            self._ready_gradients = ReadyGradients(model, self._leave_early)

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Join the first group. On return this worker has the weights of the newest version, and the optimizer state.

        Raises UsageError for an optimizer that cannot step along a mean.
        """
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} computes gradients within its step, but workers of mode "
                f"{self.settings.mode} average them before the step",
                fix="use an optimizer that steps along existing gradients, such as AdamW; or --mode localsgd",
            )
        check_takes_dense(
            optimizer, f"workers of mode {self.settings.mode}", "or --mode localsgd, where each worker steps by itself"
        )
        self._make_parts(optimizer, step)
        self._check = ConsistencyCheck(self._lifecycle, self._step, self._exchange.config)
        self._enter()

    def _make_parts(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        self._step = UndoableStep(self._model, optimizer, step)
        self._transfer = StateTransfer(self._exchange, self._lifecycle, self._step)

    def _leave_early(self, index: int, gradient: torch.Tensor) -> None:
        if self._lifecycle.group is not None:
            self._lifecycle.group.ready(index, gradient)

    # ---- the group ----------------------------------------------------------------------------

    def _enter(self) -> None:
        """Join the newest group after a START reply."""
        while True:
            has_weights = self._exchange.group_view.info.has_weights
            self._step.version = self._confirmed.version if has_weights else NO_VERSION
            if has_weights:
                self._transfer.restore()
            if self._confirmed.is_done or self._form_group():  # a run that is done has no further step
                return
            self._complete_failed()

    def _form_group(self) -> bool:
        return self._lifecycle.form(self._device, self._joined)

    def _joined(self, group: Group) -> None:
        group.like = self._step.weights()
        group.order, group.of_lowest, group.of_sum = self._order, self._of_lowest, self._of_sum
        self._check.check_setup(group, self._transfer.state_to_compare())
        self._transfer.level(group)

    # ---- a round ------------------------------------------------------------------------------

    def _contribute(self, outgoing: Outgoing) -> None:
        is_right = self._ready_gradients is None or self._ready_gradients.settle()
        computed(self._device)  # another thread reads the gradients
        reply = self._until_taken(self._model.sources(ContributionKind.GRADIENT), outgoing, is_right)
        if reply.result.outcome is Outcome.START:
            self._enter()

    def _until_taken(
        self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool = True
    ) -> Reply:
        """Repeat the round, in new groups if necessary, until the contribution counts or the server sends a START."""
        while True:
            reply = self._round(gradients, outgoing, is_right)
            outcome = reply.result.outcome
            if outcome is Outcome.REJECTED:
                raise self._diverged(None)
            if (is_counted := outcome in COUNTED) or outcome is Outcome.START:
                if self._encoded is not None:
                    self._encoded.encoding.commit() if is_counted else self._encoded.encoding.start()
                if is_counted and not self._confirmed.is_done:
                    self._form_group()  # if this fails, the next completion reports it
                return reply

    def _round(self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool) -> Reply:
        """Average the gradients, complete the round, and step if the reply says that all members have the mean."""
        if not self._form_group() or (mean := self._mean_of(gradients, outgoing, is_right)) is None:
            return self._complete_failed(outgoing)
        group = self._lifecycle.group
        assert group is not None
        if clip_norm := outgoing.contribution.training.clip_norm:  # the clipped mean has the same bits on all members
            self._clip([mean[index] for index in self._trained], clip_norm)
        outgoing = outgoing.changed(completion=CompletionInfo(group.generation.number))
        if self._steps_first(group):
            return self._upload(outgoing, mean)
        reply = self._complete(ContributionKind.COMPLETION, outgoing)
        if reply.result.outcome in COUNTED:
            self._take_step(mean)
        return reply

    def _mean_of(self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool) -> Mean | None:
        """The mean over the group; None: the group broke."""
        group = self._lifecycle.group
        assert group is not None
        try:
            metadata, num_samples = self._metadata(outgoing), max(1, outgoing.contribution.counts.num_samples)
            if (encoded := self._encoded) is not None:
                mean = self._lifecycle.run(lambda: encoded.average(group, gradients, num_samples, metadata))
            else:
                mean = self._lifecycle.run(lambda: group.average(gradients, num_samples, metadata, is_right))
            self._check.check(group, outgoing, self._norm())
        except Unsound as unsound:
            raise self._diverged(unsound.index) from None
        except Broken as broken:
            self._lifecycle.log_broken(broken)
            return None
        return mean

    def _clip(self, mean: Mean, max_norm: float) -> None:
        clip([item for item in mean if item is not None], max_norm)

    def _metadata(self, outgoing: Outgoing) -> tuple[int, ...]:
        return *self._check.metadata(outgoing, self._step.version, self._change), self._flags(outgoing)

    def _flags(self, outgoing: Outgoing) -> int:
        """The flags for this round if this member has the lowest rank; 0: it uploads nothing."""
        info = self._exchange.group_view.info
        uploads = info.uploads_weights or outgoing.contribution.training.evaluates
        return uploads * (_UPLOADS + UPLOADS_OPTIMIZER * info.uploads_optimizer + _RETURNS * info.returns_weights)

    def _norm(self) -> float:
        return self._check.weights.norm()

    def _take_step(self, mean: Mean) -> None:
        self._step.step(mean)

    def _steps_first(self, group: Group) -> bool:
        """Whether this member steps before the reply."""
        flags = group.metadata[-1][0]
        return bool(flags if group.index == 0 else flags & _RETURNS)

    def _upload(self, outgoing: Outgoing, mean: Mean) -> Reply:
        """Step, then complete the round. The member of lowest rank uploads the weights."""
        group = self._lifecycle.group
        assert group is not None
        undo = self._step.copy()
        self._step.step(mean)
        if group.index == 0 and group.metadata[-1][0] & UPLOADS_OPTIMIZER:
            outgoing = outgoing._replace(optimizer=self._step.state_for_server())
        return self._complete_upload(group, outgoing, undo)

    def _complete_upload(self, group: Group, outgoing: Outgoing, undo: Callable[[], None]) -> Reply:
        kind = ContributionKind.COMPLETION.received(has_payload=group.index == 0)
        reply = self._complete(kind, outgoing)
        if reply.result.outcome is Outcome.REJECTED:
            raise self._diverged(None)
        if reply.result.outcome not in (*COUNTED, Outcome.START):
            undo()
        return reply

    def _complete_failed(self, outgoing: Outgoing = _NOTHING) -> Reply:
        """Report that this worker's generation has failed. The reply names the next generation."""
        failed = CompletionInfo(self._exchange.group_view.info.generation, failed=True)
        return self._complete(ContributionKind.COMPLETION, outgoing.changed(completion=failed))

    def _complete(self, kind: ContributionKind, outgoing: Outgoing) -> Reply:
        completion = replace(outgoing.contribution.completion, peer_bytes=self._lifecycle.take_num_sent())
        return self._exchange.contribute(outgoing.changed(kind=kind, completion=completion))

    def _diverged(self, index: int | None) -> DivergedError:
        """The error for weights with NaN or Inf, or else for the gradient `index`, which is not finite."""
        tensors = zip(self._model.layout.entries, self._model.sources(ContributionKind.WEIGHTS), strict=False)
        names = [entry.spec.name for entry, item in tensors if item is not None and not is_finite(item)]
        rank = self._confirmed.rank
        if names or index is None:
            where = f" in '{names[0]}'" if names else ""
            return DivergedError(
                f"the weights overflowed: rank {rank} has NaN or Inf{where} at version {self._step.version}, although "
                "all gradients were finite",
                fix="lower --lr, or clip gradients; give Adam an eps above 0; the newest "
                "snapshot (--checkpoint-dir) is unchanged",
            )
        name = self._model.layout.entries[index].spec.name
        return DivergedError(
            f"the gradient of '{name}' of rank {rank} is not finite, so the mean would not be finite",
            fix="lower --lr, or clip gradients; --mode sync drops a contribution that is not finite",
        )

    # ---- the end ------------------------------------------------------------------------------

    def _finish(self, can_evaluate: bool) -> Final | None:
        self._lifecycle.close_group()  # a member that averages must not wait for this worker
        final = super()._finish(can_evaluate)
        if final is None:
            self._enter()
        return final

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        self._lifecycle.close_group()
        super().leave(goodbye, is_interrupted)
        self.end()

    def drop(self) -> None:
        self._lifecycle.close_group()
        super().drop()
        self.end()

    def end(self) -> None:
        """End the connections to the other workers."""
        self._lifecycle.end()
