"""Computes the bytes on the wire of a contribution and of its reply, as the server counts them. Pure.

Protobuf writes a field as its tag (one byte up to field 15, then two) and its value; zeros and empty strings are
absent. Field numbers are those of proto/parameter_server.proto. The messages are made in
worker/conversation/messages.py and ps/wire/conversation.py. Bytes that depend on unknown facts (hyperparameters that a
schedule changes, pieces that leave during backward) are fitted where a run was recorded (`extra`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ...common.wire.records import Contribution
from ...ps.core import effects

INLINE_BYTES = 64 << 10  # as in common/wire/frames.py: payloads up to this size are in the message that announces them
CHUNK_BYTES = 1 << 20  # of a payload in one message of a stream
OUT_OF_BAND_BYTES = 8 << 20  # of a payload behind one message of a direct connection
_DOUBLE = 8
# Bytes of a field up to field 15 with its tag, by the bits of the number; or of a message's kind and size.
_FIELD = (0, *(1 + (bits + 6) // 7 for bits in range(1, 65)))


class Extra(NamedTuple):
    """Bytes of a contribution and of a reply with weights that the framing does not count."""

    up: float = 0.0
    down: float = 0.0


NOTHING = Extra()


@dataclass(frozen=True)
class Framing:
    """The framing of one run. Sizes are in bytes. `codec`: as in a contribution. Replies: only if it is not raw."""

    up_bytes: int = 0
    down_bytes: int = 0
    start_bytes: int = 0
    codec: str = "raw"
    reply_codec: str = ""
    is_direct: bool = True  # else over the stream itself
    has_base: bool = True  # gradient modes: a contribution says whether its worker still has its weights
    extra: Extra = NOTHING

    def up(self, contribution: Contribution, is_cut_short: bool = False) -> float:
        """Returns the bytes of a contribution: its messages and its payload."""
        counts, timing = contribution.counts, contribution.timing
        key = (
            contribution.id.seq == 1, contribution.id.seq.bit_length(), counts.num_samples.bit_length(),
            counts.num_training_steps if is_cut_short else None, contribution.base.version.bit_length(),
            (timing.compute_s > 0) + (timing.transfer_s > 0), contribution.training.wants_weights,
        )  # fmt: skip
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._up_of(*key)
        return found

    def _up_of(
        self, is_first: bool, seq: int, samples: int, num_steps: int | None, version: int, num_times: int, wants: bool
    ) -> float:
        """Returns the bytes of a contribution. `seq`, `samples` and `version` are in bits."""
        size = self._up_size + _FIELD[seq]
        size += _topic(_FIELD[samples] + (0 if num_steps is None else 1 + _varint(num_steps)))
        size += _topic(_FIELD[version] + (2 if self.has_base else 0))
        size += _topic(num_times * (1 + _DOUBLE))
        size += _topic(1 + _DOUBLE + (2 if wants else 0))  # loss
        if self.codec != "raw" and not is_first:
            size += _topic(1 + _DOUBLE)  # residual
        return size + _FIELD[size.bit_length()] + self._up_payload

    def down(self, effect: effects.SendReply) -> float:
        """Returns the bytes of a reply: its messages and its weights."""
        result, work, start = effect.reply.result, effect.reply.next_work, effect.reply.start
        if start is None and not work.has_evaluator:
            key = (
                effect.has_weights, result.reason, result.seq.bit_length(), result.version.bit_length(),
                result.staleness.bit_length(), work.local_steps.bit_length(), work.training_steps.bit_length(),
                work.num_workers.bit_length(), work.worker_index.bit_length(), work.run_steps,
            )  # fmt: skip
            found = self._found.get(key)
            if found is None:
                found = self._found[key] = self._down_of(effect)
            return found
        return self._down_of(effect)

    def _down_of(self, effect: effects.SendReply) -> float:
        result, work, start = effect.reply.result, effect.reply.next_work, effect.reply.start
        size, payload = self._down_sizes[effect.is_start if effect.has_weights else 2]
        numbers = _FIELD[result.seq.bit_length()] + _FIELD[result.version.bit_length()]
        numbers += _FIELD[result.staleness.bit_length()]
        size += _topic(2 + 1 + _DOUBLE + numbers + _text(result.reason))  # outcome, gate_wait_s
        numbers = _FIELD[work.local_steps.bit_length()] + _FIELD[work.training_steps.bit_length()]
        numbers += _FIELD[work.num_workers.bit_length()] + _FIELD[work.worker_index.bit_length()]
        size += _topic(numbers + _FIELD[(work.run_steps or 0).bit_length()] + 2 * work.has_evaluator)
        if start is not None:
            num_batches = 0 if start.num_batches is None else 1 + _varint(start.num_batches)
            size += 2 + num_batches + _FIELD[start.in_step.bit_length()]
        return size + _FIELD[size.bit_length()] + payload

    @cached_property
    def _found(self) -> dict[tuple[Any, ...], float]:
        """Sizes of contributions and replies by what they depend on."""
        return {}

    @cached_property
    def _up_size(self) -> int:
        """Returns the bytes that are the same in every contribution message."""
        num, is_raw = self.up_bytes, self.codec == "raw"
        is_out_of_band = self.is_direct and is_raw and num > INLINE_BYTES
        return _topic(_number(2, num) + _text(self.codec) + (2 if is_out_of_band else 0))  # payload

    @cached_property
    def _up_payload(self) -> float:
        return self._payload(self.up_bytes, self.is_direct and self.codec == "raw") + self.extra.up

    @cached_property
    def _down_sizes(self) -> tuple[tuple[int, float], ...]:
        """Returns the constant bytes of the message and the bytes of the payload, for a reply, a START, no weights."""
        found: list[tuple[int, float]] = []
        for num, codec, extra in (
            (self.down_bytes, self.reply_codec, self.extra.down), (self.start_bytes, "", 0.0), (0, "", 0.0)
        ):  # fmt: skip
            is_start = len(found) == 1
            payload = self._payload(num, self.is_direct and not self.reply_codec and not is_start)
            size = _topic(_number(1, num) + _text(codec)) if num else 0
            found.append((size, payload + (extra if num else 0.0)))
        return tuple(found)

    def _payload(self, num: int, is_direct: bool) -> int:
        """Returns the bytes of a payload with its frames: tag, size, and offset."""
        if num <= INLINE_BYTES:
            return num and 1 + _varint(num) + num
        size = num
        for at in range(0, num, OUT_OF_BAND_BYTES if is_direct else CHUNK_BYTES):
            piece = min(num - at, OUT_OF_BAND_BYTES if is_direct else CHUNK_BYTES)
            size += 1 + _varint(piece) + (1 + _varint(at) if is_direct or at else 0)
        return size


def _topic(num: int) -> int:
    """Returns the bytes of a message within another message. An empty message is absent."""
    return num and 1 + _varint(num) + num


def _number(field: int, value: int) -> int:
    return (1 if field < 16 else 2) + _varint(value) if value else 0


@lru_cache(maxsize=1024)
def _text(value: str) -> int:
    num = len(value) if value.isascii() else len(value.encode())
    return 1 + _varint(num) + num if num else 0


def _varint(value: int) -> int:
    return 1 if value < 128 else (value.bit_length() + 6) // 7
