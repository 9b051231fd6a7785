"""The streams of workers, by which the run's effects find them, and the items that a stream may carry.

The service turns each item into messages; this file knows no messages. A `Peer` is the stream of one worker, in every
mode. The peers of all-reduce are something else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...common.codecs.base import Codec
from ...common.codecs.shared.reference import moves_reference
from ...common.errors import ParamServerError
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.segments import Segment
from ..core import effects
from ..core.counting.stats import Traffic
from ..tensors.replies.publication import Publication
from ..tensors.replies.reference import ReferenceUpdate


class Go(NamedTuple):
    """Lets the worker continue. Its weights come from `payload` (small ones), from `publication`, from the newest
    version, or as an `update` of the reference; or there are none."""

    effect: effects.SendReply
    payload: bytes | None = None
    publication: Publication | None = None
    update: ReferenceUpdate | None = None


class Done(NamedTuple):
    """The run is over; the weights are final."""

    min_version: int
    evaluate: bool


# Items of a stream. A text is the reason that the worker still waits.
Item = str | effects.AskForWeights | Go | Done


@dataclass(frozen=True)
class ShardState:
    """A shard's memory in `bytes`, by kind, and its `traffic`: by rank, bytes received from the worker and sent."""

    version: int
    bytes: dict[str, int] = field(default_factory=dict)
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Peer:
    """One stream of a worker. `state` is text for people: joining, waiting, uploading, computing, finished."""

    rank: int
    incarnation: int
    is_resumed: bool = False  # continues where it was: no START is due
    number: int = 0  # contributions of the rank that count
    is_relay: bool = False  # of a region
    base: int | None = None  # the version that it has all of the weights of, if it has said so
    traffic: Traffic = field(default_factory=Traffic)
    outbox: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    at_once: Callable[[Item], bool] | None = None  # says an item now, or (False) leaves it to the outbox
    state: str = "joining"
    offer: tuple[Layout, OptimizerSpec] | None = None  # its model and optimizer
    reference: int = 0  # the number of its reference; 0: none
    weights: Segment | None = None  # the initial ones, once it has uploaded them
    takes_frames: bool = True  # its replies are frames on the stream, or it reads the weights' own memory
    # By name of a codec of contributions: the reason that it is refused, or "".
    codecs: dict[str, str] = field(default_factory=dict)
    reply_codec: Codec | None = None  # of its weights, except for START and the final ones; None: raw
    hang_up: Callable[[ParamServerError | None], object] = lambda error: None  # ends its call, with a refusal
    is_ended: bool = False

    @property
    def seat(self) -> tuple[int, int]:
        """Rank and incarnation."""
        return self.rank, self.incarnation

    def encodes(self, effect: effects.SendReply) -> bool:
        """Whether this reply's weights are encoded for this worker alone. Weights to be evaluated are exact where the
        worker would otherwise have those of a reference."""
        if self.reply_codec is None:
            return False
        return not effect.is_evaluated if moves_reference(self.reply_codec) else not effect.is_start

    def as_frames(self, effect: effects.SendReply) -> bool:
        """Whether the reply's weights are frames that workers share, or are read from the weights' own memory."""
        return effect.is_start or (self.takes_frames and not self.encodes(effect))

    def say(self, item: Item) -> None:
        """Send an item now, or queue it for the worker."""
        if self.at_once is None or not self.at_once(item):
            self.outbox.put_nowait(item)

    def end(self, error: ParamServerError | None = None) -> None:
        """End its call once, with a refusal if there is an error."""
        if not self.is_ended:
            self.is_ended = True
            self.hang_up(error)
