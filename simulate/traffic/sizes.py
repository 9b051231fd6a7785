"""Returns the bytes of transfers: for a task's model or a given size, in the codecs of the configuration.

torch is loaded only for a task's model or a codec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.wire import records
from ...ps.core import effects

_ROW = 1024  # float32 of a row


def payload_sizes(config: Config, megabytes: float | None) -> Sizes:
    """Returns the sizes of a run whose model has so many megabytes; None: as the task's model."""
    worker = config.worker
    if megabytes is not None and worker.codec == worker.reply_codec == "raw":
        whole = round(megabytes * 1e6)
        return Sizes(whole, whole, whole)
    layout = _layout(config, megabytes)
    whole = layout.exchange_bytes
    return Sizes(_encoded(worker.codec, layout), _encoded(worker.reply_codec, layout), whole)


def _encoded(name: str, layout: Any) -> int:
    from ...common.codecs.base import payload_bytes
    from ...common.registry import CODECS

    return payload_bytes(CODECS.load(name)(), layout)


def _layout(config: Config, megabytes: float | None) -> Any:
    from ...common.tensors.layout import Kind, Layout, TensorSpec

    if megabytes is not None:
        # A matrix, like most of a model. Tensors with one dimension travel in other codecs.
        rows = -(-round(megabytes * 1e6 / 4) // _ROW)
        return Layout([TensorSpec("weights", Kind.PARAMETER, "float32", (rows, _ROW))])
    import torch

    from ...worker.tensors.transfer import ModelTensors
    from ...worker.training.tasks.loading import load_task

    try:
        task = load_task(config.task.name, config.task.args, seed=config.run.seed, device=torch.device("cpu"))
    except UsageError as error:
        message = f"the size of the model of task {config.task.name} is unknown: {error.message}"
        raise UsageError(message, fix="give the size: --mb 10") from None
    return ModelTensors(task.model()).layout


# ---- framing -------------------------------------------------------------------------------------
# Computes the bytes on the wire of a contribution and of its reply, as the server counts them.
#
# The messages are the real ones. They are made once for each combination of what their size depends on. Bytes that
# depend on unknown facts (hyperparameters that a schedule changes, pieces that leave during backward) are fitted
# where a run was recorded (`extra`).


INLINE_BYTES = 64 << 10  # as in common/wire/frames.py: payloads up to this size are in the message that announces them
CHUNK_BYTES = 1 << 20  # of a payload in one message of a stream
OUT_OF_BAND_BYTES = 8 << 20  # of a payload behind one message of a direct connection
_RESIDUAL = records.ResidualInfo(1.0)


class Sizes(NamedTuple):
    """Bytes of the payloads of one run."""

    up: int = 0  # of a contribution
    down: int = 0  # of a reply with weights
    start: int = 0  # of the weights that a worker starts from


@dataclass(frozen=True)
class Framing:
    """The framing of one run. `codec`: as in a contribution. Replies: only if it is not raw."""

    sizes: Sizes
    codec: str = "raw"
    reply_codec: str = ""
    is_direct: bool = True  # else over the stream itself
    has_base: bool = True  # gradient modes: a contribution says whether its worker still has its weights
    extra: tuple[float, float] = (0.0, 0.0)  # bytes of a contribution, and of a reply, that are not counted here
    _found: dict[tuple[Any, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def up(self, contribution: records.Contribution) -> float:
        """Returns the bytes of a contribution: its messages and its payload."""
        counts, timing = contribution.counts, contribution.timing
        key = (
            contribution.id.seq == 1, contribution.id.seq.bit_length(), counts.num_samples.bit_length(),
            counts.num_steps, contribution.base.version.bit_length(),
            timing.compute_s > 0, timing.transfer_s > 0, contribution.training.wants_weights,
        )  # fmt: skip
        found = self._found.get(key)
        if found is None:
            from ...common.wire.messages import contribution_message

            num, is_direct = self.sizes.up, self.is_direct and self.codec == "raw"
            sent = records.changed(
                contribution,
                base=records.Base(contribution.base.version, self.has_base),
                payload=records.PayloadInfo(self.codec, num, is_direct and num > INLINE_BYTES),
                training=records.TrainingInfo(
                    wants_weights=contribution.training.wants_weights, iteration=contribution.id.seq
                ),
            )
            if self.codec != "raw" and contribution.id.seq > 1:
                sent = records.changed(sent, residual=_RESIDUAL)
            found = self._found[key] = contribution_message(sent).ByteSize() + _payload(num, is_direct) + self.extra[0]
        return found

    def down(self, effect: effects.SendReply) -> float:
        """Returns the bytes of a reply: its messages and its weights."""
        result, work, start = effect.reply.result, effect.reply.next_work, effect.reply.start
        key = (
            effect.has_weights, effect.is_start, result.reason, result.seq.bit_length(), result.version.bit_length(),
            result.staleness.bit_length(), work.local_steps.bit_length(),
            work.training_steps.bit_length(), work.num_workers.bit_length(), work.worker_index.bit_length(),
            work.run_steps, work.is_asked, start,
        )  # fmt: skip
        found = self._found.get(key)
        if found is None:
            from ...common.wire.messages import reply_message

            num, codec, extra = self.sizes.down, self.reply_codec, self.extra[1]
            if effect.is_start:
                num, codec, extra = self.sizes.start, "", 0.0
            reply, rest = effect.reply, 0.0
            if effect.has_weights and num:
                reply = records.changed(reply, weights=records.WeightsInfo(num, codec))
                is_direct = self.is_direct and not self.reply_codec and not effect.is_start
                rest = _payload(num, is_direct) + extra
            found = self._found[key] = reply_message(reply).ByteSize() + rest
        return found


def _payload(num: int, is_direct: bool) -> int:
    """Returns the bytes of a payload with its frames: tag, size, and offset."""
    if num <= INLINE_BYTES:
        return num and 1 + _varint(num) + num
    size, most = num, OUT_OF_BAND_BYTES if is_direct else CHUNK_BYTES
    for at in range(0, num, most):
        size += 1 + _varint(min(num - at, most)) + (1 + _varint(at) if is_direct or at else 0)
    return size


def _varint(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
