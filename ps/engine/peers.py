"""The streams of workers as the run's effects find them, and what may be said on one.

The service puts each item of an outbox into messages; nothing here knows how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...common.codecs.base import Codec
from ...common.errors import ParamServerError
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.segments import Segment
from ..core import effects
from ..tensors.publication import Publication


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Bring the initial weights."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing yet, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Go:
    """Go on. The weights are `body`, small ones, or `held` for this worker, or of the newest version, or none."""

    answer: effects.Answer
    body: bytes | None = None
    held: Publication | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The run is over, these weights are final."""

    min_version: int
    evaluate: bool


Item = SendWeights | Waiting | Go | Done


@dataclass(eq=False, slots=True)
class Traffic:
    """Of one rank with this process, over all its incarnations; bytes with their framing."""

    num_sent: int = 0  # by the worker
    num_received: int = 0
    lane: str = "tcp"


@dataclass(frozen=True)
class ShardState:
    """What a shard holds: `bytes` by what they are; `traffic` by rank: bytes the worker has sent here, and received."""

    version: int
    bytes: dict[str, int] = field(default_factory=dict)
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Peer:
    """One stream of a worker. `state` is for people: joining, waiting, uploading, computing, finished."""

    rank: int
    incarnation: int
    is_resumed: bool = False  # goes on where it was: no START is due
    number: int = 0  # contributions of the rank that count
    traffic: Traffic = field(default_factory=Traffic)
    outbox: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    state: str = "joining"
    offer: tuple[Layout, OptimizerSpec] | None = None  # what it trains
    weights: Segment | None = None  # the initial ones, when it has brought them
    segment: Segment | None = None  # the worker's own, on this host
    answer_codec: Codec | None = None  # of the weights it gets, but for a START's and final ones; None: raw
    reading: Publication | None = None  # in shared memory, by the worker
    interrupt: Callable[[], object] = lambda: None  # stops waiting for what the worker may send
    is_ended: bool = False
    ended_with: ParamServerError | None = None  # the refusal its call is to end with

    @property
    def seat(self) -> tuple[int, int]:
        """Rank and incarnation."""
        return self.rank, self.incarnation

    def say(self, item: Item) -> None:
        """Queue it for the worker."""
        self.outbox.put_nowait(item)

    def end(self, error: ParamServerError | None = None) -> None:
        """End its call, with a refusal if there is an error, whatever it is waiting for. Once."""
        if not self.is_ended:
            self.is_ended, self.ended_with = True, error
            self.interrupt()

    def drained(self) -> Iterator[Item]:
        """What is left in the outbox; nobody will get it."""
        while not self.outbox.empty():
            yield self.outbox.get_nowait()
