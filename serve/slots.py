"""The states of the versions that a process has. Pure: no tensors and no threads.

    idle -> arriving -> whole -> serving -> draining -> idle

A version arrives beside the serving one, and is published between two decode steps. New requests get it. Open requests
finish on the draining version. That version stays, for requests that name it, until the next one is published. Of three
slots at most one is arriving (or whole), one serving and one draining.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

NUM_SLOTS = 3


@dataclass(frozen=True)
class Version:
    """A version of a run. The server's `incarnation` grows when the server goes back in the run."""

    run: str
    incarnation: int
    number: int
    fetched_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def name(self) -> str:
        """The version's name within its run. After the server went back, a number stands for other weights."""
        return f"{self.incarnation}.{self.number}"

    @property
    def fingerprint(self) -> str:
        """The version's name in replies."""
        return f"{self.run}:{self.name}"

    @property
    def model(self) -> str:
        """The version's name in requests, as the model."""
        return f"{self.run}@{self.name}"

    def is_newer(self, than: Version | None) -> bool:
        """Return whether this version replaces `than`. A greater incarnation wins, also with a smaller number."""
        return than is None or (self.incarnation, self.number) > (than.incarnation, than.number)


class Slots:
    """The version of each slot, and the slots that have a role. The other slots are idle, and have no version."""

    def __init__(self) -> None:
        self.versions: list[Version | None] = [None] * NUM_SLOTS
        self.arriving: int | None = None
        self.whole: int | None = None
        self.serving: int | None = None
        self.draining: int | None = None

    def live(self) -> list[int]:
        """Return the slots whose version replies, the oldest first."""
        return [slot for slot in (self.draining, self.serving) if slot is not None]

    def begin(self) -> int | None:
        """Begin an arrival. Return its slot, or None while another version arrives."""
        if self.arriving is not None or self.whole is not None:
            return None
        self.arriving = min({*range(NUM_SLOTS)} - {*self.live()})
        return self.arriving

    def arrived(self, slot: int, version: Version | None) -> None:
        """End an arrival: the version is complete, or None if it could not be fetched."""
        assert slot == self.arriving
        self.arriving, self.versions[slot] = None, version
        self.whole = None if version is None else slot

    def publish(self) -> int | None:
        """Serve the complete version, once no other one drains. Return the slot that drains from now on, or None."""
        if self.whole is not None and self.draining is None:
            self.draining, self.serving, self.whole = self.serving, self.whole, None
            return self.draining
        return None

    def drained(self) -> None:
        """Free the slot of the draining version, which no request uses."""
        assert self.draining is not None
        self.versions[self.draining], self.draining = None, None
