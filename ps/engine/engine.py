"""Carries one run out in this process: events go in, effects reach tensors, streams, snapshots and observers.

Lives on the event loop, which is the only one to apply events. Tensor work goes to one thread in the order of the
effects, so what is decided and what is done differ only in time. Nothing here knows gRPC, or which mode runs.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.wire.frames import INLINE_BYTES
from ..core import effects, events
from ..core.effects import Fact
from ..core.events import Identity
from ..core.replication import Sequencer
from ..core.run import Options, Run
from ..policies.base import Policy
from ..snapshots.snapshots import Snapshots
from ..tensors.codec_memory import CodecMemory
from ..tensors.model import Model
from ..tensors.thread import TensorThread
from .peers import Done, Go, Peer, SendWeights, ShardState, Traffic, Waiting
from .waiting import reasons

log = get_logger()

_SAY_WAITING_S = 1.0
_FEW = "too few to leave out so many (policy.aggregation): fewer workers that lie are withstood"


class Engine:
    """One run in one process. `finished` resolves when the run is over: with None, or the error that ended it."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        *,
        name: str,
        incarnation: int = 1,
        publish: Callable[[float, Fact], None] = lambda at, fact: None,
        options: Options | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.shard_addresses: tuple[str, ...] = ()  # of all shards by number, the coordinator's own empty
        self.shard_states: dict[int, ShardState] = {}  # what the others said last about themselves
        self.why_not_ready: Callable[[], str] = lambda: ""  # what keeps workers from joining, as a phrase
        self.run = Run(options or options_of(config), policy, name, incarnation)
        self.publish = publish
        self.now = now
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tensors = TensorThread(self._tensors_failed)
        self.model = Model(config, self.tensors, policy.contribution == "gradient")
        self.sequencer = Sequencer(self.happens, now)
        self.snapshots: Snapshots | None = None
        self.skipped_snapshots: list[str] = []  # damaged ones, newer than the one it goes on from
        self.peers: dict[tuple[int, int], Peer] = {}  # by rank and incarnation
        self.traffic: dict[int, Traffic] = {}
        self._codec_memories: dict[int, CodecMemory] = {}  # of the processes that have these ranks
        self.is_broken = False  # an event was half applied, or tensor work failed: no state to keep
        self._joining: dict[int, effects.Seated | effects.NotSeated | None] = {}  # by stream
        self._num_streams = 0
        self._events: deque[events.Event] = deque()
        self._is_applying = False
        # Bodies, uint8 [exchange_bytes]: that came here whole, and of contributions that count and are to be folded.
        self._staged: dict[Identity, torch.Tensor] = {}
        self._kept: dict[Identity, torch.Tensor] = {}
        self._withdrawn: dict[int, int] = {}  # by rank, the newest incarnation of which nothing is taken
        self._are_few = False  # contributions of the newest commit
        self._said_waiting_at = -float("inf")
        self._waiters: list[asyncio.Future[None]] = []  # for something to happen

    # ---- events ---------------------------------------------------------------------------

    def offer(self, event: events.Event) -> None:
        """Something has come to this process."""
        self.sequencer.offer(event)

    def happens(self, event: events.Event) -> None:
        """Apply an event and carry out what it leads to. Whatever happens meanwhile happens after it."""
        self._events.append(event)
        if self._is_applying:
            return
        self._is_applying = True
        try:
            while self._events and not self.is_broken:
                self._apply(self._events.popleft())
        finally:
            self._is_applying = False
        self.notify()

    def _apply(self, event: events.Event) -> None:
        try:
            found = self.run.apply(event)
            for effect in found:
                self._carry_out(effect)
                if isinstance(effect, Fact):
                    self.publish(event.at, effect)
            self.sequencer.applied(found)
        except Exception as error:
            self._break(error, event)
            return
        if self.model.has_weights:
            self.model.staging.look_again()  # who left may have been folded before others

    def _break(self, error: Exception, event: events.Event) -> None:
        """A mistake of ours, with the run half changed: it ends, and nothing of it is kept."""
        self.is_broken = True
        where = traceback.extract_tb(error.__traceback__)[-1]
        log.error(
            "event_failed", at_event=events.LINES.write(event), error=f"{type(error).__name__}: {error}",
            where=f"{where.filename}:{where.lineno}", meaning="a mistake of the server's; no snapshot is taken of this",
        )  # fmt: skip
        self.end_with(ParamServerError(f"the server failed on an event: {type(error).__name__}: {error}"))

    def end_with(self, error: ParamServerError) -> None:
        for peer in list(self.peers.values()):
            peer.end(error)
        self._resolve(error)

    def _tensors_failed(self, error: BaseException) -> None:
        """The weights are in no known state: the run ends, without a snapshot of them."""
        self.is_broken = True
        log.error("tensors_failed", error=f"{type(error).__name__}: {error}", meaning="no snapshot is taken of this")
        self.end_with(ParamServerError(f"the server failed on tensors: {type(error).__name__}: {error}"))

    def let_go(self) -> None:
        """This process is about to stop: every worker is told, so that it need not find out."""
        for peer in list(self.peers.values()):
            peer.end(refusal(Reason.DRAINING, "the server is stopping", fix="start ps-server again"))

    def close(self) -> None:
        """No more tensor work, no more snapshots; waits for those that are on their way."""
        self.tensors.close()
        if self.snapshots is not None:
            self.snapshots.close()

    def tell(self, fact: Fact) -> None:
        """A fact of now, for the observers."""
        self.publish(self.now(), fact)

    def _resolve(self, error: BaseException | None) -> None:
        if self.finished.done():
            return
        self.notify()
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)

    def tick(self) -> None:
        """Called every fraction of a second: time-outs, and a sign of life to those who wait."""
        self.offer(events.Ticked())
        now = self.now()
        if now - self._said_waiting_at < _SAY_WAITING_S:
            return
        self._said_waiting_at = now
        why = self.waiting(now)
        for peer in self.peers.values():
            if peer.state in ("waiting", "finished") and peer.outbox.empty():
                peer.say(Waiting(why.get(peer.rank, "")))

    async def changed(self) -> None:
        """Returns when something has happened."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def notify(self) -> None:
        """Let those look again who wait for something to happen."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def waiting(self, now: float) -> dict[int, str]:
        """Why each worker waits, by rank; empty for one that does not."""
        return reasons(self.run, self.peers, self.sequencer, now)

    # ---- streams --------------------------------------------------------------------------

    def join(self, asked: Callable[[int], events.Joined]) -> Peer:
        """A stream's process asks for a rank; `asked` makes the event of the stream's number. Raises the refusal."""
        self._num_streams += 1
        stream = self._num_streams
        self._joining[stream] = None
        self.offer(asked(stream))
        match self._joining.pop(stream):
            case effects.NotSeated(error=error):
                raise error
            case effects.Seated(rank=rank, incarnation=incarnation, is_resumed=is_resumed, number=number):
                return self.attach(Peer(rank, incarnation, is_resumed, number))
        raise refusal(Reason.NOT_READY, "the run has ended with an error")

    async def seated(self, rank: int, incarnation: int) -> Peer:
        """On a shard that seats nobody: the stream of a worker that the coordinator has seated, once that is known
        here. Raises NOT_JOINED when a newer process has the rank by then."""
        while (worker := self.run.roster.workers.get(rank)) is None or worker.incarnation < incarnation:
            if self._withdrawn.get(rank, 0) >= incarnation:
                break
            await self.changed()
        if worker is None or worker.incarnation != incarnation or (rank, incarnation) in self.peers:
            raise refusal(Reason.NOT_JOINED, f"rank {rank}, incarnation {incarnation}, was let go by the coordinator")
        return self.attach(Peer(rank, incarnation, worker.is_resumed, self.run.policy.num_counted.get(rank, 0)))

    def attach(self, peer: Peer) -> Peer:
        """Its effects find this stream from now on."""
        peer.traffic = self.traffic.setdefault(peer.rank, Traffic())
        peer.traffic.lane = "tcp"  # until it offers a segment
        self.peers[peer.rank, peer.incarnation] = peer
        if not peer.is_resumed:
            self._codec_memories.pop(peer.rank, None)
        return peer

    def codec_memory(self, rank: int) -> CodecMemory:
        """What the codecs of the process with this rank remember here; used on the tensor thread."""
        if rank not in self._codec_memories:
            assert self.model.layout is not None
            self._codec_memories[rank] = CodecMemory(self.model.layout)
        return self._codec_memories[rank]

    def _settle_codec(self, rank: int, is_folded: bool) -> None:
        """What came last from this rank is folded, or will never be."""
        if (memory := self._codec_memories.get(rank)) is not None:
            self.tensors.submit(partial(memory.settle, is_folded))

    def detach(self, peer: Peer) -> None:
        """The stream is over: what was still to be sent on it is given back."""
        self.peers.pop((peer.rank, peer.incarnation), None)
        self.notify()
        for item in peer.drained():
            if isinstance(item, Go) and item.held is not None:
                self.model.publisher.release(item.held, as_frames=self.goes_as_frames(peer, item.answer))

    # ---- contributions --------------------------------------------------------------------

    def contributed(self, event: events.Contributed, body: torch.Tensor) -> None:
        """A contribution lies whole in `body`, uint8 [exchange_bytes], which is the engine's from here on."""
        identity = event.identity
        if self._withdrawn.get(event.rank, 0) >= event.incarnation or identity in self._staged:
            self.model.staging.give_back(body)  # it has been let go, or said this before
        else:
            self._staged[identity] = body
        self.offer(event)

    # ---- effects --------------------------------------------------------------------------

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Keep(identity):
                self._kept[identity] = self._staged.pop(identity)
                self._settle_codec(identity.rank, True)
            case effects.Fold():
                self._fold(effect)
            case effects.Commit():
                self._commit(effect)
            case effects.Answer():
                self._answer(effect)
            case effects.Log(level, event, fields):
                self._log(level, event, fields)
            case effects.Discard(identity):
                self._give_back(identity)
                self._settle_codec(identity.rank, False)
            case effects.Withdraw(rank, incarnation, ends_streams):
                self._withdraw(rank, incarnation, ends_streams)
            case effects.Seated() | effects.NotSeated():
                if effect.stream in self._joining:
                    self._joining[effect.stream] = effect
                self._make_room()
            case effects.Adopt(rank, incarnation):
                layout, optimizer = self._offered(rank, incarnation)
                self.model.adopt(layout, optimizer)
            case effects.ForgetModel():
                self.model.forget()
            case effects.AskForWeights(rank, incarnation):
                if (peer := self.peers.get((rank, incarnation))) is not None:
                    peer.state = "uploading"
                    peer.say(SendWeights())
            case effects.Begin(rank, incarnation):
                weights = self.peers[rank, incarnation].weights
                assert weights is not None
                self.model.begin(weights)
                self._make_room()
            case effects.Refuse(rank, incarnation, error):
                if (peer := self.peers.get((rank, incarnation))) is not None:
                    peer.end(self._explained(peer, error))
            case effects.TellDone(workers, evaluator, version):
                for rank, incarnation in workers:
                    if (peer := self.peers.get((rank, incarnation))) is not None:
                        self.tensors.then(partial(peer.say, Done(version, rank == evaluator)))
            case effects.TakeSnapshot():
                self._take_snapshot(effect)
            case effects.Prune(version):
                if self.snapshots is not None:
                    self.snapshots.prune(version)
            case effects.End(error):
                self._resolve(error)

    def _log(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self.config.server.shard == 0:  # the others would say the same
            if event in ("admitted", "resumed"):
                fields = {**fields, "tensors": self.traffic[fields["rank"]].lane}
            getattr(log, level)(event, **fields)

    def _make_room(self) -> None:
        """Of several shards each may hold an upload of every worker, and one more of who comes back: two that wait for
        each other's uploads would wait for ever."""
        if self.config.server.shards > 1 and self.model.has_weights:
            self.model.staging.make_room(2 * len(self.run.roster.workers))

    def _offered(self, rank: int, incarnation: int) -> Any:
        offer = self.peers[rank, incarnation].offer
        assert offer is not None
        return offer

    def _explained(self, peer: Peer, error: ParamServerError) -> ParamServerError:
        """A refusal of a model, with what differs."""
        if error.reason in (Reason.MODEL_MISMATCH, Reason.OPTIMIZER_MISMATCH) and peer.offer is not None:
            try:
                self.model.check(peer.rank, *peer.offer)
            except ParamServerError as told:
                return told
        return error

    def _give_back(self, identity: Identity) -> None:
        body = self._staged.pop(identity, None)
        if body is not None:
            self.model.staging.give_back(body)

    def _withdraw(self, rank: int, incarnation: int, ends_streams: bool) -> None:
        self._withdrawn[rank] = max(incarnation, self._withdrawn.get(rank, 0))
        self.sequencer.withdrawn(rank, incarnation)
        for identity in [one for one in self._staged if one.rank == rank and one.incarnation <= incarnation]:
            self._give_back(identity)
        self._settle_codec(rank, False)
        if rank not in self.run.roster.workers:
            self._codec_memories.pop(rank, None)
        for key in [key for key in self.peers if key[0] == rank and key[1] <= incarnation]:
            if ends_streams:
                self.peers[key].end()

    def _fold(self, fold: effects.Fold) -> None:
        store, staging = self.model.store, self.model.staging
        body = self._kept.pop(fold.identity)
        may_keep = not staging.is_own(body)
        is_copied = may_keep and self.run.policy.answers_before_commit  # its worker writes there when it is answered

        def work() -> list[torch.Tensor]:
            taken = body.clone() if is_copied else body
            if fold.scale != 1.0:
                store.sanity.scale(taken, fold.scale)
            return store.fold(taken, fold.weight, fold.identity.rank, may_keep)

        def folded(reusable: list[torch.Tensor]) -> None:
            if not any(one is body for one in reusable):
                staging.donate(body)
            for one in reusable:
                staging.give_back(one)

        self.tensors.submit(work, folded)

    def _commit(self, commit: effects.Commit) -> None:
        store, publisher = self.model.store, self.model.publisher
        log.debug("commit", version=commit.version, reason=commit.reason)
        publication = publisher.next(commit.version)
        self._warn_of_few(len(commit.contributions), store.aggregator.fewest)
        told = list(commit.hyperparameters) if commit.hyperparameters is not None else None
        work = partial(
            store.commit, len(commit.members), min(commit.members, default=0), told, publication.segment.body,
            publication.made, lr_scale=commit.lr_scale,
        )  # fmt: skip
        self.tensors.submit(work, self.model.staging.reclaim)

    def _warn_of_few(self, count: int, fewest: int) -> None:
        """Say it once, and again when there were enough in between."""
        if count >= fewest:
            self._are_few = False
        elif count and not self._are_few:
            self._are_few = True
            log.warning("few_contributions", count=count, fewest=fewest, meaning=_FEW)

    def _answer(self, answer: effects.Answer) -> None:
        peer = self.peers.get((answer.rank, answer.incarnation))
        if peer is None:
            return  # its stream has just ended: it asks again
        peer.state = "computing"
        assert self.model.layout is not None
        if not answer.has_weights:
            self.tensors.then(partial(peer.say, Go(answer)))
        elif self.model.layout.exchange_bytes <= INLINE_BYTES:
            peer.say(Go(answer, body=self.model.small_body()))
        elif self.config.server.shards > 1:  # the parts of one answer are of one version
            held = self.model.publisher.hold(as_frames=self.goes_as_frames(peer, answer))
            peer.say(Go(answer, held=held))
        else:
            peer.say(Go(answer))

    @staticmethod
    def goes_as_frames(peer: Peer, answer: effects.Answer) -> bool:
        """Whether its weights go over the connection, or lie in memory that the worker can read."""
        return answer.outcome == "START" or (peer.segment is None and peer.answer_codec is None)

    # ---- snapshots ------------------------------------------------------------------------

    def _take_snapshot(self, effect: effects.TakeSnapshot) -> None:
        if self.snapshots is None or self.is_broken:
            return
        traffic = {
            str(rank): {"bytes_sent": one.num_sent, "bytes_received": one.num_received}
            for rank, one in self.traffic.items()
        }
        stats = effect.saved["training"]["stats"]
        training = {
            **effect.saved["training"],
            "stats": {rank: {**values, **traffic.get(rank, {})} for rank, values in stats.items()},
        }

        def over(durable: int) -> None:
            self.offer(events.Stored(effect.attempt, durable))

        self.snapshots.take({**effect.saved, "training": training}, over)

    @property
    def durable_version(self) -> int:
        """Of the newest snapshot that all shards have."""
        return self.run.rhythm.durable_version

    @property
    def is_writing(self) -> bool:
        """A snapshot is being taken."""
        return self.run.rhythm.is_writing and not self.is_broken

    @property
    def state(self) -> ShardState:
        """What this process holds of the model, and what has passed through it."""
        held = dict(self.model.store.num_bytes) if self.model.has_weights else {}
        traffic = {rank: (one.num_sent, one.num_received) for rank, one in self.traffic.items()}
        return ShardState(self.run.policy.version, held, traffic)

    def elapsed_s(self) -> float:
        """Of training, over all starts of the server."""
        return self.run.contributions.elapsed_s(self.now(), self.run.is_over)


def options_of(config: Config) -> Options:
    """What a run is told of the configuration."""
    keeps = config.checkpoint.dir is not None
    return Options(
        mode=config.run.mode,
        num_workers=config.run.workers,
        max_workers=config.limits.workers,
        lease_s=config.server.lease_s,
        absent_s=config.server.absent_s,
        max_rejected=config.store.max_nonfinite,
        keeps_snapshots=keeps,
        every_steps=config.checkpoint.every_steps,
        every_s=config.checkpoint.every_s,
        waits_for_first_snapshot=keeps and config.server.shards > 1,
    )
