"""Which versions of the weights a process has: a state machine without tensors, threads and time.

    idle -> arriving -> whole -> serving -> draining -> idle

A version arrives beside the one that serves. It is published between two decode steps: new requests get it, and those
under way finish on the version that drains. There are three slots, and each of arriving (or whole), serving and
draining is at most one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

NUM_SLOTS = 3


class State(Enum):
    IDLE = "idle"
    ARRIVING = "arriving"
    WHOLE = "whole"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True)
class Version:
    """Weights of a run. `incarnation` is the server's: one that goes back has a greater incarnation."""

    run: str
    incarnation: int
    number: int

    @property
    def fingerprint(self) -> str:
        """The name of the version in replies."""
        return f"{self.run}:{self.number}"

    def is_newer(self, than: Version | None) -> bool:
        """Whether a reader that serves `than` follows to this version: of two incarnations the greater counts."""
        return than is None or (self.incarnation, self.number) > (than.incarnation, than.number)


class Slots:
    """The states of the slots, by index."""

    def __init__(self) -> None:
        self.states = [State.IDLE] * NUM_SLOTS
        self.versions: list[Version | None] = [None] * NUM_SLOTS

    def find(self, state: State) -> int | None:
        """The slot in this state; of idle ones the first."""
        return self.states.index(state) if state in self.states else None

    def live(self) -> Iterator[int]:
        """The slots whose version replies, the oldest first."""
        for state in (State.DRAINING, State.SERVING):
            if (slot := self.find(state)) is not None:
                yield slot

    def begin(self) -> int | None:
        """Begin an arrival. Returns its slot; None while another arrives, or one drains."""
        busy = (State.ARRIVING, State.WHOLE, State.DRAINING)
        if any(state in busy for state in self.states):
            return None
        slot = self.states.index(State.IDLE)
        self.states[slot] = State.ARRIVING
        return slot

    def arrived(self, slot: int, version: Version | None) -> None:
        """The last byte of a version is there; None: it cannot be had."""
        assert self.states[slot] is State.ARRIVING
        self.states[slot] = State.IDLE if version is None else State.WHOLE
        self.versions[slot] = version

    def publish(self) -> int | None:
        """Serve the version that is whole. Returns the slot that drains now, or None."""
        slot, before = self.find(State.WHOLE), self.find(State.SERVING)
        if slot is None:
            return None
        self.states[slot] = State.SERVING
        if before is not None:
            self.states[before] = State.DRAINING
        return before

    def drained(self) -> None:
        """The last request on the draining version is over."""
        slot = self.find(State.DRAINING)
        assert slot is not None
        self.states[slot], self.versions[slot] = State.IDLE, None
