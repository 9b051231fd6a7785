"""Bytes on the wire of a contribution and of its answer, as the server's own counters have them. Pure.

Protobuf writes a field as its tag (one byte up to field 15, then two) and its value; zeros and empty strings do not
travel. Fields have the numbers of proto/parameter_server.proto; the messages that are counted are made in
worker/conversation/messages.py and ps/wire/conversation.py. What depends on things that nothing is told of
(hyperparameters that a schedule changes, pieces that leave while backward still runs) is fitted where a run was
recorded (`extra`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...ps.core import effects, events

INLINE_BYTES = 64 << 10  # as in common/wire/frames.py: up to here a body is in the message that announces it
CHUNK_BYTES = 1 << 20  # of a body in one message of a stream
PLACED_BYTES = 8 << 20  # of a body behind one message of a direct connection
_DOUBLE = 8


class Extra(NamedTuple):
    """Bytes of a contribution, and of an answer with weights, beyond what is counted."""

    up: float = 0.0
    down: float = 0.0


NOTHING = Extra()


@dataclass(frozen=True)
class Framing:
    """Of one run. Sizes in bytes; `codec` as a contribution names it; the answers' only if it is not raw."""

    up_bytes: int = 0
    down_bytes: int = 0
    start_bytes: int = 0
    codec: str = "raw"
    answer_codec: str = ""
    is_direct: bool = True  # else over the stream itself
    has_base: bool = True  # gradient modes: who contributes says that it still has its weights
    extra: Extra = NOTHING

    def up(self, event: events.Contributed, is_cut_short: bool = False) -> float:
        """Of this contribution, its messages and its body."""
        num, is_raw = self.up_bytes, self.codec == "raw"
        size = _number(1, event.number) + _number(2, event.base_version) + _number(3, event.num_samples)
        size += _number(4, num) + (2 if event.wants_weights else 0) + 2 + len(self.codec)
        size += 1 + _DOUBLE  # loss
        size += (1 + _DOUBLE if event.compute_s else 0) + (1 + _DOUBLE if event.transfer_s else 0)
        size += 2 if self.is_direct and is_raw and num > INLINE_BYTES else 0  # in_segment
        size += 3 if self.has_base else 0
        size += 0 if is_raw or event.number == 1 else 2 + _DOUBLE  # residual
        if is_cut_short and event.num_steps is not None:
            size += 2 + _varint(event.num_steps)
        return _framed(size) + self._body(num, self.is_direct and is_raw) + self.extra.up

    def down(self, answer: effects.Answer) -> float:
        """Of this answer, its messages and its weights."""
        is_start = answer.outcome == "START"
        num = (self.start_bytes if is_start else self.down_bytes) if answer.has_weights else 0
        size = 2 + _number(2, answer.number) + _number(3, answer.version) + _number(4, answer.next_local_steps)
        size += _number(5, num) + _number(6, answer.staleness) + (1 + _DOUBLE if answer.held_s else 0)
        size += _text(answer.reason) + _number(9, answer.num_workers) + _number(10, answer.worker_index)
        size += _number(11, answer.training_steps) + _number(15, answer.steps or 0) + (3 if answer.has_spare else 0)
        size += _number(21, answer.in_step)
        if answer.num_batches is not None:
            size += 1 + _varint(answer.num_batches)
        if not is_start and num:
            size += _text(self.answer_codec)
        is_direct = self.is_direct and not self.answer_codec and not is_start
        return _framed(size) + self._body(num, is_direct) + (self.extra.down if num and not is_start else 0)

    def _body(self, num: int, is_direct: bool) -> int:
        """A body and its frames: tag and size, and where it begins."""
        if num <= INLINE_BYTES:
            return num and 1 + _varint(num) + num
        size = num
        for at in range(0, num, PLACED_BYTES if is_direct else CHUNK_BYTES):
            piece = min(num - at, PLACED_BYTES if is_direct else CHUNK_BYTES)
            size += 1 + _varint(piece) + (1 + _varint(at) if is_direct or at else 0)
        return size


def _framed(size: int) -> int:
    """A message of so many bytes as the kind of another one."""
    return 1 + _varint(size) + size


def _number(field: int, value: int) -> int:
    return (1 if field < 16 else 2) + _varint(value) if value else 0


def _text(value: str) -> int:
    num = len(value) if value.isascii() else len(value.encode())
    return 1 + _varint(num) + num if num else 0


def _varint(value: int) -> int:
    return 1 if value < 128 else (value.bit_length() + 6) // 7
