"""The states of the versions that a process has. Pure: no tensors and no threads.

    idle -> arriving -> whole -> serving -> draining -> idle

A version arrives beside the serving one, and is published between two decode steps. New requests get it. Open requests
finish on the draining version. That version stays, for requests that name it, until the next one is published. Of three
slots at most one is arriving (or whole), one serving and one draining.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
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
    """The state and the version of each slot."""

    def __init__(self) -> None:
        self.states = [State.IDLE] * NUM_SLOTS
        self.versions: list[Version | None] = [None] * NUM_SLOTS

    def find(self, state: State) -> int | None:
        """Return the first slot in this state, or None."""
        return self.states.index(state) if state in self.states else None

    def live(self) -> list[int]:
        """Return the slots whose version replies, the oldest first."""
        return [slot for state in (State.DRAINING, State.SERVING) if (slot := self.find(state)) is not None]

    def begin(self) -> int | None:
        """Begin an arrival. Return its slot, or None while another version arrives."""
        if any(state in (State.ARRIVING, State.WHOLE) for state in self.states):
            return None
        slot = self.states.index(State.IDLE)
        self.states[slot] = State.ARRIVING
        return slot

    def arrived(self, slot: int, version: Version | None) -> None:
        """End an arrival: the version is complete, or None if it could not be fetched."""
        assert self.states[slot] is State.ARRIVING
        self.states[slot] = State.IDLE if version is None else State.WHOLE
        self.versions[slot] = version

    def publish(self) -> int | None:
        """Serve the complete version, once no other one drains. Return the slot that drains from now on, or None."""
        slot, before = self.find(State.WHOLE), self.find(State.SERVING)
        if slot is None or self.find(State.DRAINING) is not None:
            return None
        self.states[slot] = State.SERVING
        if before is not None:
            self.states[before] = State.DRAINING
        return before

    def drained(self) -> None:
        """Free the slot of the draining version, which no request uses."""
        slot = self.find(State.DRAINING)
        assert slot is not None
        self.states[slot], self.versions[slot] = State.IDLE, None
