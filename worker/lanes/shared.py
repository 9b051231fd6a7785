"""A worker's side of the shared memory lane: may it be used, and with which segments."""

from __future__ import annotations

import torch

from ...common.reporting.log import get_logger
from ...common.wire.frames import INLINE_BYTES
from ...common.wire.segments import Segment, SegmentAddress, SegmentError, new_segment, open_segment

log = get_logger()

# Versions of the weights that a server has on their way at once, and one more, by default.
_MAX_OPEN = 8


class Sharing:
    """One stream's segments. `segment` is what contributions are placed in; None: tensors go over the connection."""

    def __init__(self, is_wanted: bool, codec: str) -> None:
        self.segment: torch.Tensor | None = None  # uint8 [exchange_bytes]
        # A codec other than raw changes what is computed: who asks for one gets it.
        self._is_wanted = is_wanted and codec == "raw"
        self.reason = ""  # why it is not used
        if not self._is_wanted:
            self.reason = "off (worker.shared_memory)" if not is_wanted else f"off (worker.codec is {codec})"
        self._may_offer = False
        self._offered: Segment | None = None
        self._open: dict[str, Segment] = {}

    def joined(self, probe: SegmentAddress | None) -> None:
        """On a new stream: find out whether the server's memory can be opened from here."""
        # Never the segment of an earlier stream: a contribution that was left behind may still be read there.
        self.segment, self._offered, self._may_offer = None, None, False
        self._open.clear()
        if not self._is_wanted:
            return
        if probe is None:
            self.reason = "the server shares no memory"
            return
        try:
            open_segment(probe)
            self._may_offer = True
        except SegmentError as error:
            self.reason = str(error)

    def offer(self, num_bytes: int) -> SegmentAddress | None:
        """Memory for contributions, for the server to open; None where there is no use or no way."""
        if self._may_offer and num_bytes > INLINE_BYTES:
            try:
                self._offered = new_segment(num_bytes)
            except SegmentError as error:
                self.reason = str(error)
        return self._offered.address if self._offered is not None else None

    @property
    def has_offered(self) -> bool:
        return self._offered is not None

    def decided(self, is_accepted: bool, reason: str) -> None:
        """The server's word."""
        assert self._offered is not None
        if is_accepted:
            self.segment = self._offered.body
        else:
            self.reason, self._offered = reason, None

    def open(self, address: SegmentAddress) -> memoryview:
        """The server's segment. When it cannot be opened, SegmentError, and no more sharing."""
        segment = self._open.get(address.label)
        if segment is None:
            try:
                segment = open_segment(address)
            except SegmentError:
                self._is_wanted = False
                raise
            while len(self._open) >= _MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._open[address.label] = segment
        return segment.bytes

    @property
    def lane(self) -> str:
        """How tensors travel, for people."""
        return "shared memory" if self.segment is not None else "tcp"
