"""A socket beside the stream: payloads leave raw, from where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...common.wire.direct import placed_messages
from .base import Messages, Transport


class DirectTransport(Transport):
    """Open where the client has a direct connection."""

    name = "direct"

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False

    @property
    def is_placed(self) -> bool:
        return True

    def reached(self, why_not: str) -> None:
        """There is a direct connection; or there is none, and a phrase says why not."""
        self.is_open, self.reason = not why_not, why_not

    def raw(self, pieces: Iterable[memoryview], offset: int) -> Iterator[Messages]:
        return self.messages(pieces, offset, lambda *of: list(placed_messages(*of)))
