"""What lanes have in common: how a body of weights is announced."""

from __future__ import annotations

from typing import Protocol

from ....common.wire.segments import SegmentAddress
from ....proto import parameter_server_pb2 as pb


class Header(Protocol):
    """Makes the message that announces a body: its version, its size, and where it lies."""

    def __call__(self, version: int, num_bytes: int, segment: SegmentAddress | None) -> pb.ServerMessage: ...
