"""What a transport is: where the bytes of payloads go between this worker and one shard, while one stream lasts.

The one here is always there: the stream itself. Others, each a file of this folder, carry the same conversation. A
worker takes the first that it and the server can open (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from ...common.errors import Reason, refusal
from ...common.kinds import ContributionKind
from ...common.wire.direct import Placed
from ...common.wire.frames import left_out_frame, payload_frames, without_zeros
from ...proto import parameter_server_pb2 as pb
from ..tensors.staged import Transfer
from ..tensors.transfer import Indices

if TYPE_CHECKING:
    import torch

Messages = Iterable[bytes | Placed]


class Transport:
    """Pieces of a payload are messages of their own. `reason` is a sentence: why a transport is not open."""

    name: ClassVar[str] = "grpc"  # for people
    # Also takes payloads that a codec other than raw has made.
    carries_codecs: ClassVar[bool] = True

    def __init__(self) -> None:
        self.is_open = True
        self.reason = ""
        self.segment: torch.Tensor | None = None  # uint8 [exchange_bytes], where contributions are placed
        self._may_leave_out = False  # zeros

    @property
    def is_placed(self) -> bool:
        """Whether a contribution of more than INLINE_BYTES is announced as one that is placed."""
        return self.segment is not None

    # ---- agreed on once on every stream -----------------------------------------------------------

    def joined(self, welcome: pb.Welcome) -> None:
        """A new stream: nothing of an earlier one is used any more."""
        self._may_leave_out = welcome.takes_left_out

    def offer(self, model: pb.Model, num_bytes: int) -> bool:
        """Say in `model` what the server is to open, for contributions of `num_bytes`; True when it will reply."""
        return False

    def decided(self, verdict: pb.SharedMemory) -> None:
        """The server's word."""

    # ---- payloads -----------------------------------------------------------------------------------

    def send(self, transfer: Transfer, kind: ContributionKind, indices: Indices) -> Iterator[Messages]:
        """These tensors of a contribution (None: all), from where they lie; yields what is said about them on the
        stream, as soon as it may be."""
        for stretch in transfer.stream(kind, indices):
            yield from self.raw(stretch.pieces, stretch.offset)

    def raw(self, pieces: Iterable[memoryview], offset: int) -> Iterator[Messages]:
        """Pieces of a raw payload from `offset`."""
        return self.messages(pieces, offset)

    def messages(
        self,
        pieces: Iterable[memoryview],
        offset: int = 0,
        carry: Callable[[Iterable[memoryview], int], Messages] = payload_frames,
    ) -> Iterator[Messages]:
        """Pieces of a payload from `offset`, each stretch as `carry` has it. Zeros stay at home: of a model in parts
        those of the other parts, and what a loss does not reach."""
        if not self._may_leave_out:
            yield carry(pieces, offset)
            return
        for at, parts, num_zeros in without_zeros(pieces, offset):
            yield carry(parts, at) if parts else [left_out_frame(at, num_zeros)]

    def memory(self, address: pb.Segment) -> memoryview:
        """What the weights of a reply are placed in. Raises SegmentError."""
        raise refusal(Reason.BAD_REQUEST, "the server sends weights in shared memory, which was not agreed on")
