"""The streams of workers, by which the run's effects find them, and the items that a stream may carry.

The service turns each item into messages; this file knows no messages. A `Peer` is the stream of one worker, in every
mode. The peers of all-reduce are something else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ...common.codecs.base import Codec
from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import moves_reference
from ...common.errors import ParamServerError, Reason
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.frames import INLINE_BYTES
from ...common.wire.segments import Segment
from ..core import effects
from ..core.counting.stats import Traffic
from ..core.replication import Sequencer
from ..core.run import Run
from ..policies.base import names
from ..tensors.model import Model
from ..tensors.replies.publication import Publication
from ..tensors.replies.reference import ReferenceUpdate
from ..tensors.thread import TensorThread


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


class Streams:
    """The streams of all workers here. `are_parts`: replies are parts of a version, and other shards have the rest."""

    def __init__(self, model: Model, tensors: TensorThread, are_parts: bool) -> None:
        self.peers: dict[tuple[int, int], Peer] = {}  # by rank and incarnation
        self.traffic: dict[int, Traffic] = {}
        self._model = model
        self._tensors = tensors
        self._are_parts = are_parts

    def detach(self, peer: Peer) -> None:
        """Remove a stream that is over, and release the weights that were still to be sent on it."""
        self.peers.pop(peer.seat, None)
        while not peer.outbox.empty():
            item = peer.outbox.get_nowait()
            if isinstance(item, Go) and item.publication is not None:
                self._model.publisher.release(item.publication, peer.as_frames(item.effect))

    def end(self, error: ParamServerError) -> None:
        """End all streams with this refusal."""
        for peer in list(self.peers.values()):
            peer.end(error)

    def refuse(self, refused: effects.Refuse) -> None:
        peer, error = self.peers.get((refused.rank, refused.incarnation)), refused.error
        if peer is None:
            return
        if error.reason in (Reason.MODEL_MISMATCH, Reason.OPTIMIZER_MISMATCH) and peer.offer is not None:
            try:
                self._model.check(peer.rank, *peer.offer)
            except ParamServerError as explained:  # it names the difference
                error = explained
        peer.end(error)

    def fence(self, rank: int, incarnation: int) -> None:
        """End the streams of this incarnation of a rank and of older ones."""
        for peer in list(self.peers.values()):
            if peer.rank == rank and peer.incarnation <= incarnation:
                peer.end()

    def ask_for_weights(self, effect: effects.AskForWeights) -> None:
        if (peer := self.peers.get((effect.rank, effect.incarnation))) is not None:
            peer.state = "uploading"
            peer.say(effect)

    def reply(self, effect: effects.SendReply) -> None:
        """Queue a reply. With several shards each retains this version for it, so that all parts are of one version."""
        version = effect.reply.result.version
        if effect.has_weights:  # on all shards, even without a stream here
            self._model.references.replies(version, effect.is_start)
        peer = self.peers.get((effect.rank, effect.incarnation))
        if peer is None or self._tensors.is_broken:
            return  # its stream has just ended: the worker asks again, or gets the refusal that ends the run
        peer.state = "computing"
        if not effect.has_weights:
            self._tensors.then(partial(peer.say, Go(effect)))
        elif peer.encodes(effect) and moves_reference(peer.reply_codec):
            assert isinstance(peer.reply_codec, ByTensor)
            reference = self._model.references.of(peer.reply_codec, version)
            update = reference.update_from(0 if effect.is_start else peer.reference)
            effect.reference_version = update.version
            self._tensors.then(partial(peer.say, Go(effect, update=update)))
        elif self._model.store.layout.exchange_bytes <= INLINE_BYTES:
            self._tensors.then(lambda: peer.say(Go(effect, payload=self._model.small_payload())))
        elif self._are_parts or effect.is_evaluated:  # the weights must be of this version
            publication = self._model.publisher.hold(as_frames=peer.as_frames(effect))
            peer.say(Go(effect, publication=publication))
        else:
            peer.say(Go(effect))

    def tell_done(self, done: effects.TellDone) -> None:
        for seat in done.workers:
            if (peer := self.peers.get(seat)) is not None:
                self._tensors.then(partial(peer.say, Done(done.version, peer.rank == done.evaluator)))

    def say_why(self, why: Mapping[int, str]) -> None:
        """Send a sign of life to the waiting workers, with the reason (`why`, by rank)."""
        for peer in self.peers.values():
            if peer.state in ("waiting", "finished") and peer.outbox.empty():
                peer.say(why.get(peer.rank, ""))


def reasons(
    run: Run,
    peers: Mapping[tuple[int, int], Peer],
    sequencer: Sequencer,
    now: float,
    ranks: Iterable[int] | None = None,
) -> dict[int, str]:
    """Returns the reasons for which these workers wait (None: all), by rank; empty for one that does not wait."""
    workers = run.roster.workers
    if ranks is not None:
        workers = {rank: workers[rank] for rank in ranks if rank in workers}
    by_policy = run.policy.waiting(now, workers) if run.has_weights else {}
    to_finish = _who_finishes(run, now) if run.roster.num_finished else ""
    found = {}
    for rank, worker in workers.items():
        peer = peers.get((rank, worker.incarnation))
        if worker.is_finished:
            found[rank] = to_finish
        elif worker.is_away:
            found[rank] = "its connection"
        elif shard := sequencer.missing(rank) if peer is not None and peer.state == "waiting" else "":
            found[rank] = shard
        elif run.is_holding:
            found[rank] = "" if run.options.is_region else "the first snapshot on all shards"
        elif not run.has_weights:
            initializer = run.initializer
            found[rank] = f"initial weights from rank {initializer.rank}" if initializer not in (None, worker) else ""
        else:
            found[rank] = by_policy.get(rank, "")
    return found


def _who_finishes(run: Run, now: float) -> str:
    busy = sorted(rank for rank, worker in run.roster.workers.items() if not worker.is_finished)
    if busy:
        return f"rank {names(busy)} to finish"
    absent = run.absent(now)
    return f"rank {names(absent)} to come back" if absent else ""
