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
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch

from ...common.codecs.base import Codec, decode_payload
from ...common.config.schema import WorkerConfig
from ...common.errors import DivergedError, UsageError
from ...common.kinds import ContributionKind
from ...common.registry import CODECS
from ...common.tensors.layout import new_payload
from ...common.tensors.optimizers import OptimizerSpec, clip
from ...common.wire.records import COUNTED, CompletionInfo, Contribution, Outcome, Reply
from ..conversation.exchange import Exchange
from ..conversation.messages import Final, Goodbye, Outgoing
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors
from ..tensors.watch import Sample
from ..transports.encoding import Encoding
from .base import MIN_MODEL_BYTES, ReadyGradients, Strategy, check_takes_dense
from .buckets import is_finite
from .collectives.backends import Broken, computed, without_watchdog
from .group import Group, Unsound
from .peer_state import NO_VERSION, GroupLifecycle, Mean, StateTransfer, UndoableStep

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
        uploads = info.uploads_weights or outgoing.contribution.training.wants_exact
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

    def _finish(self) -> Final | None:
        self._lifecycle.close_group()  # a member that averages must not wait for this worker
        final = super()._finish()
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


# ---- encoded mean --------------------------------------------------------------------------------
# The mean of gradients that each peer sends encoded (`worker.codec` in mode allreduce).
#
# Each peer encodes its gradient with error feedback (`transports/encoding.py`) and sends it to every other peer. All
# peers decode all payloads in the order of the members, so the mean has the same bits everywhere. If the next
# generation averages a gradient again, its bytes stay the same. The residual changes when the round counts.
#
# Each of N peers sends N - 1 payloads. A sum of raw gradients sends 2 (N - 1) / N payloads, so a codec pays only if
# it saves more than a factor of N / 2.


class EncodedMean:
    """Computes the encoded mean for one peer; `encoding` has its residual.

    `of_sum`: indices of tensors that are summed, not averaged.
    """

    def __init__(self, codec: Codec, model: ModelTensors, of_sum: frozenset[int]) -> None:
        self.encoding = Encoding(codec, model.layout, model.num_exchanged)
        self._model, self._transfer, self._of_sum = model, make_transfer(model), of_sum
        self._sum = new_payload(model.layout.exchange_bytes)
        self._decoded = new_payload(model.layout.exchange_bytes)

    def average(
        self, group: Group, gradients: Sequence[torch.Tensor | None], num_samples: int, metadata: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """The mean over the group, as `Group.average` returns it. The next call overwrites the result."""
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_floating_point() and not is_finite(gradient):
                raise Unsound(index)
        if self.encoding.payload is None:
            trained = enumerate(self._model.layout.entries[: self._model.num_trained])
            self.encoding.rest(frozenset(entry.spec.name for index, entry in trained if gradients[index] is None))
            (stretch,) = self._transfer.gather(ContributionKind.GRADIENT)
            self.encoding.whole(stretch)
        assert self.encoding.payload is not None
        announced, _ = group.announce(gradients, num_samples, metadata)
        payloads = group.gather_payloads(torch.frombuffer(self.encoding.payload, dtype=torch.uint8))
        sums, decoded = self._model.views(self._sum), self._model.views(self._decoded)
        for member, payload in enumerate(payloads):
            decode_payload(self.encoding.codec, self._model.layout, payload, self._decoded)
            share = announced.samples[member] / sum(announced.samples)
            for index, (entry, total, item) in enumerate(zip(self._model.layout.entries, sums, decoded, strict=False)):
                factor = 1.0 if index in self._of_sum else share
                if member == 0:  # buffers that are not averaged come from the lowest member
                    torch.mul(item, factor, out=total) if entry.spec.is_averaged else total.copy_(item)
                elif entry.spec.is_averaged:
                    total.add_(item, alpha=factor)
        return [item if index in announced.present else None for index, item in enumerate(sums)]


# ---- consistency ---------------------------------------------------------------------------------
# Checks that peers start from the same weights and step along the same means with the same hyperparameters.


_NUM_SAMPLED = 16  # elements of each tensor that a checksum covers
_ZERO_BITS = 8  # bits of the combined settings value for worker.zero
_MAY_DIFFER = 1e-3  # allowed relative difference between members' weights


class ConsistencyCheck:
    """The checks of one peer."""

    def __init__(self, lifecycle: GroupLifecycle, step: UndoableStep, config: WorkerConfig) -> None:
        self._lifecycle, self._step, self._config = lifecycle, step, config
        self.weights = Sample(step.model)

    def check_setup(self, group: Group, initial_state: Any) -> None:
        """Compare settings and the initial optimizer state with the other members.

        Raises UsageError if worker.codec or worker.zero differ from the lowest member's, or the state from most
        members'. Raises Broken.
        """
        stage, copies, codec = self._config.zero, self._config.zero_copies, self._config.codec
        rank, ranks = group.generation.members[group.index], group.generation.members
        settings = 10 * stage + copies + (crc32(codec.encode()) << _ZERO_BITS)
        found = self._lifecycle.run(lambda: group.gather_numbers(settings))
        codecs, divisions = [item >> _ZERO_BITS for item in found], [item % (1 << _ZERO_BITS) for item in found]
        if codecs[group.index] != codecs[0]:
            raise UsageError(
                f"worker.codec is {codec} for rank {rank}, but rank {ranks[0]}, which averages with it, has "
                "another codec",
                fix="start all workers with the same worker.codec",
            )
        if divisions[group.index] != divisions[0]:
            raise UsageError(
                f"{_zero_words(stage, copies)} for rank {rank}, but {_zero_words(*divmod(divisions[0], 10))} for "
                f"rank {ranks[0]}, which averages with it",
                fix="start all workers with the same worker.zero and worker.zero_copies",
            )
        has_begun = self._step.version or self._step.has_stepped
        states = self._lifecycle.run(lambda: group.gather_numbers(0 if has_begun else 1 + _crc(initial_state)))
        initial = [state for state in states if state]
        if (local := states[group.index]) and local != (most := _most_common(initial)):
            raise UsageError(
                f"the optimizer of rank {rank} begins with another state than that of rank "
                f"{ranks[states.index(most)]}: their weights would diverge",
                fix="load the same state in every script before session.optimizer(), or in none",
            )

    def metadata(self, outgoing: Outgoing, version: int, change: int) -> tuple[int, ...]:
        """Checksums of the step's hyperparameters and of the weights, the version of the weights, and `change`.

        `change`: whether the script has changed them since the last step: 1; 2: there was none.
        """
        training = outgoing.contribution.training
        numbers = repr((training.hyperparameters, training.clip_norm))
        return crc32(numbers.encode()), crc32(self.weights.bytes()), version, change

    def check(self, group: Group, outgoing: Outgoing, norm: float) -> None:
        """Compare the group's metadata. Raises UsageError in members that differ from most, and Broken."""
        numbers, weights, versions, changes, *_ = group.metadata
        index, ranks = group.index, group.generation.members
        if numbers[index] != (most := _most_common(numbers)):
            training = outgoing.contribution.training
            settings = ", ".join(f"{key} {value}" for key, value in training.hyperparameters[0].items() if key == "lr")
            settings += f", clip_grad_norm {training.clip_norm:g}" if training.clip_norm else ""
            raise UsageError(
                f"the optimizer of rank {ranks[index]} would step with other hyperparameters ({settings}) than that of "
                f"rank {ranks[numbers.index(most)]}",
                fix="use the same schedule in all scripts; session.state(scheduler=...) restores it after a resume",
            )
        if changes[index] == 1 and 0 in changes:
            raise UsageError(
                f"weights of rank {ranks[index]} were changed between two steps, not by its optimizer, and those of "
                f"rank {ranks[changes.index(0)]} were not: they would diverge",
                fix="make the same change in every script; or change weights before session.optimizer()",
            )
        if len(set(zip(versions, weights, strict=True))) == len(set(versions)):
            return
        # On unequal machines the last digits may differ. A float travels as an integer of the same bits.
        bits = int(struct.unpack("q", struct.pack("d", norm))[0])
        norms = self._lifecycle.run(lambda: group.gather_numbers(bits))
        same = [weight for weight, version in zip(weights, versions, strict=True) if version == versions[index]]
        other = weights.index(_most_common(same))
        own_norm, other_norm = _number(norms[index]), _number(norms[other])
        if abs(own_norm - other_norm) > _MAY_DIFFER * other_norm:
            raise UsageError(
                f"the weights of rank {ranks[index]} differ from those of rank {ranks[other]}: the norm of a few "
                f"elements is {own_norm:.6g} here and {other_norm:.6g} there",
                fix="change weights before session.optimizer(), which uploads the first worker's weights; or make the "
                "same change in every script",
            )


def _zero_words(stage: int, copies: int) -> str:
    return f"worker.zero is {stage}" + (f" (worker.zero_copies {copies})" if stage else "")


def _crc(state: Any) -> int:
    """A checksum of nested dicts and of a few elements of each tensor, equal on every machine."""
    if isinstance(state, Mapping):
        return crc32(repr([(str(key), _crc(state[key])) for key in sorted(state, key=str)]).encode())
    if isinstance(state, torch.Tensor):
        flat = state.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _NUM_SAMPLED)].double().tolist()
        return crc32(repr((tuple(state.shape), sample)).encode())
    return crc32(repr(state).encode())


def _number(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def _most_common(values: list[int]) -> int:
    """The most frequent value; among equally frequent ones the lowest rank's."""
    return max(values, key=values.count)
