"""Memory that worker and server both map: only the whereabouts of a payload are on the stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...common.kinds import ContributionKind
from ...common.wire.frames import INLINE_BYTES, placed_frame
from ...common.wire.segments import Segment, SegmentError, new_segment, open_segment
from ...proto import parameter_server_pb2 as pb
from ..tensors.staged import Transfer
from ..tensors.transfer import Indices
from .base import Transport

# Versions of the weights that a server has on their way at once, and one more, by default.
_MAX_OPEN = 8


class SharedTransport(Transport):
    """The worker's segment holds contributions, the server's the weights of replies."""

    name = "shared memory"
    # What a codec changes is what is computed: who asks for one gets it, and raw memory is no use then.
    carries_codecs = False

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self._may_offer = False
        self._is_broken = False  # a segment that the server named could not be opened
        self._offered: Segment | None = None
        self._mapped: dict[str, Segment] = {}

    def joined(self, welcome: pb.Welcome) -> None:
        # Never the segment of an earlier stream: a contribution that was left behind may still be read there.
        self.is_open, self.segment, self._offered, self._may_offer = False, None, None, False
        self._mapped.clear()
        if self._is_broken:
            return
        if not welcome.HasField("probe"):
            self.reason = "the server shares no memory"
            return
        try:
            open_segment(welcome.probe)
            self._may_offer = True
        except SegmentError as error:
            self.reason = str(error)

    def offer(self, model: pb.Model, num_bytes: int) -> bool:
        if self._may_offer and num_bytes > INLINE_BYTES:
            try:
                self._offered = new_segment(num_bytes)
            except SegmentError as error:
                self.reason = str(error)
        if self._offered is None or self._offered.address is None:
            return False
        model.segment.CopyFrom(self._offered.address)
        return True

    def decided(self, verdict: pb.SharedMemory) -> None:
        assert self._offered is not None
        self.is_open = verdict.accepted
        if verdict.accepted:
            self.segment = self._offered.payload
        else:
            self.reason, self._offered = verdict.reason, None

    def send(self, transfer: Transfer, kind: ContributionKind, indices: Indices) -> Iterator[Iterable[bytes]]:
        assert self.segment is not None
        for start, end in transfer.place(kind, self.segment, indices):
            yield [placed_frame(start, end - start)]

    def memory(self, address: pb.Segment) -> memoryview:
        """When it cannot be opened, there is no more sharing."""
        segment = self._mapped.get(address.label)
        if segment is None:
            try:
                segment = open_segment(address)
            except SegmentError as error:
                self._is_broken, self.reason = True, str(error)
                raise
            while len(self._mapped) >= _MAX_OPEN:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[address.label] = segment
        return segment.bytes
