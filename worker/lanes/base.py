"""What a lane is: where the bytes of bodies go between this worker and one shard, while one stream lasts.

A lane is a file of this folder: over the stream itself (`grpc.py`), or in memory that both map (`shared.py`). All carry
the same conversation. A worker takes the first that it and the server can open (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from ...common.wire.segments import SegmentAddress
from ...proto import parameter_server_pb2 as pb
from ..tensors.transfer import Indices, Source, Transfer

if TYPE_CHECKING:
    import torch


class Lane:
    """The defaults are those of a lane that is always open. `reason` is a sentence: why this one is not."""

    name: ClassVar[str]  # for people
    # Also takes bodies that a codec other than raw has made.
    carries_codecs: ClassVar[bool] = True

    def __init__(self) -> None:
        self.is_open = True
        self.reason = ""
        self.segment: torch.Tensor | None = None  # uint8 [exchange_bytes], where contributions are placed

    # ---- agreed on once on every stream -----------------------------------------------------------

    def joined(self, welcome: pb.Welcome) -> None:
        """A new stream: nothing of an earlier one is used any more."""

    def offer(self, model: pb.Model, num_bytes: int) -> bool:
        """Say in `model` what the server is to open, for contributions of `num_bytes`; True when it will answer."""
        return False

    def decided(self, verdict: pb.SharedMemory) -> None:
        """The server's word."""

    # ---- bodies -----------------------------------------------------------------------------------

    def send(self, transfer: Transfer, source: Source, indices: Indices) -> Iterator[Iterable[bytes]]:
        """These tensors of a contribution (None: all), from where they lie; yields what is said about them on the
        stream, as soon as it may be."""
        raise NotImplementedError

    def memory(self, address: SegmentAddress) -> memoryview:
        """What the weights of an answer are placed in. Raises SegmentError."""
        raise NotImplementedError
