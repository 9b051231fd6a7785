"""Carries out one run in this process: events go in, effects reach tensors, streams, snapshots and observers.

The engine runs on the event loop, which alone applies events. Tensor work goes to one thread, in the order of the
effects, so decisions and their execution differ only in time. The engine knows neither gRPC nor the mode.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NoReturn

from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import moves_reference
from ...common.config.schema import Config
from ...common.errors import DivergedError, ParamServerError, Reason, refusal
from ...common.reporting.log import get_logger
from ..core import effects, events
from ..core.counting import Traffic
from ..core.effects import Fact
from ..core.ending import stopping
from ..core.run import Run, Sequencer
from ..core.state import Options
from ..policies.base import Policy, names
from ..snapshots.common import Keeper
from ..tensors.model import Model
from ..tensors.thread import TensorThread
from .copies import Copies
from .folding import Done, Folding, Go, Peer, ShardState
from .modes import options_of

log = get_logger()

_SAY_WAITING_S = 1.0


class Engine:
    """One run in one process. `finished` resolves when the run is over: with None, or the error that ended it."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        *,
        name: str,
        publish: Callable[[float, Fact], None] = lambda at, fact: None,
        is_observed: Callable[[type[Fact]], bool] = lambda kind: True,
        options: Options | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.shard_addresses: tuple[str, ...] = ()  # of all shards by number, the coordinator's own empty
        self.shard_states: dict[int, ShardState] = {}  # the newest report of each other shard
        self.why_not_ready: Callable[[], str] = lambda: ""  # the reason that workers cannot join yet, as a phrase
        self.run = Run(options or options_of(config), policy, name)
        self.publish, self.now = publish, now
        self.is_observed: dict[type, bool] = {kind: is_observed(kind) for kind in effects.FACTS}  # others: unpublished
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tensors = TensorThread(lambda error: self.broke("tensors", error))
        self.model = Model(config, self.tensors, policy)
        self.folding = Folding(self.model, self.tensors, policy, lambda *found: self.offer(events.Measured(*found)))
        self.copies = Copies(config, self.run.options.keeps_best, self.model, self.tensors, self.notify)
        self.peers: dict[tuple[int, int], Peer] = {}  # the streams of all workers here, by rank and incarnation
        self.traffic: dict[int, Traffic] = {}
        self.sequencer = Sequencer(self.happens, now)
        self.snapshots = Keeper()  # keeps nothing, until another takes its place
        self.send: Callable[[effects.SendReply], object] = self._send  # sends a reply, perhaps later
        self.released: Callable[[int], object] = lambda rank: None  # called when another process has a rank, or none
        self.go_back: Callable[[], object] = lambda: None  # a new server goes on from the newest snapshot
        self.dashboard = ""  # its address
        self.parent: str | None = None  # of a branch: the run and version that it began from
        self.skipped_snapshots: list[str] = []  # damaged snapshots, newer than the one that was loaded
        self.is_broken = False  # an event was partly applied, or tensor work failed: no snapshot is taken
        self._seating: effects.Seated | effects.NotSeated | None = None  # what the newest join led to
        self._num_streams = 0
        self._events: deque[events.Event] = deque()
        self._is_applying = False
        self._said_waiting_at = -float("inf")
        self._waiting_for: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._carry_out = self._handlers()

    # ---- events ---------------------------------------------------------------------------

    @property
    def offer(self) -> Callable[[events.Event], None]:
        """Offers an event that has arrived at this process to the sequencer."""
        return self.sequencer.offer

    def happens(self, event: events.Event) -> None:
        """Apply an event and carry out its effects. Events that happen meanwhile are applied after it."""
        self._events.append(event)
        if self._is_applying:
            return
        self._is_applying = True
        try:
            while self._events and not self.is_broken:
                event = self._events.popleft()
                try:
                    found = self.run.apply(event)
                    for effect in found:
                        if (carry_out := self._carry_out.get(type(effect))) is not None:
                            carry_out(effect)
                        if self.is_observed.get(type(effect)):
                            self.publish(event.at, effect)  # type: ignore[arg-type]  # only facts are observed
                    if self.sequencer.compares:
                        self.sequencer.applied(found)
                except Exception as error:
                    self.broke("event", error, at_event=events.LINES.write(event))
                    break
                if isinstance(event, events.Failed):
                    self.snapshots.drop()
                if self.model.has_weights and self.model.staging.waiters:
                    self.model.staging.look_again()  # the worker that left may have been folded before others
        finally:
            self._is_applying = False
        if self._waiting_for:
            self.notify()

    def broke(self, task: str, error: BaseException, **fields: object) -> None:
        """End the run without a snapshot: its state or its weights may be partly changed.

        Weights that are not finite (`DivergedError`) are the training's fault, and keep their own error."""
        self.is_broken = True
        if isinstance(error, DivergedError):
            log.error("diverged", error=error.message, meaning="no snapshot is taken of this")
            self.end_with(error)
            return
        if frames := traceback.extract_tb(error.__traceback__):
            fields["where"] = f"{frames[-1].filename}:{frames[-1].lineno}"
        text = f"{type(error).__name__}: {error}"
        log.error(f"{task}_failed", error=text, meaning="no snapshot is taken of this", **fields)
        self.end_with(ParamServerError(f"the server failed on {task}: {text}"))

    def end_with(self, error: ParamServerError) -> None:
        self._end_streams(error)
        self._resolve(error)

    def _end_streams(self, error: ParamServerError) -> None:
        for peer in list(self.peers.values()):
            peer.end(error)

    @property
    def error(self) -> BaseException | None:
        """The error that the run ended with; None also while it goes on."""
        is_over = self.finished.done() and not self.finished.cancelled()
        return self.finished.exception() if is_over else None

    def _resolve(self, error: BaseException | None) -> None:
        if self.finished.done():
            return
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)
        self.notify()

    def let_go(self) -> None:
        """Refuse all workers before this process stops, so that they need not detect it themselves."""
        self._end_streams(stopping())

    def close(self) -> None:
        """Stop tensor work and snapshots; waits for those that are in progress."""
        self.tensors.close()
        self.snapshots.close()

    def tell(self, fact: Fact) -> None:
        """Publish a fact of this moment to the observers."""
        self.publish(self.now(), fact)

    def tick(self) -> None:
        """Check time-outs, and send a sign of life to waiting workers; called several times a second."""
        self.offer(events.Ticked())
        now = self.now()
        if now - self._said_waiting_at >= _SAY_WAITING_S:
            self._said_waiting_at = now
            why = self.waiting(now)
            for peer in self.peers.values():
                if peer.state in ("waiting", "finished") and peer.outbox.empty():
                    peer.say(why.get(peer.rank, ""))

    def waiting(self, now: float, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Returns the reason that each of these workers (None: all) waits, by rank; empty for one that does not."""
        run, workers = self.run, self.run.roster.workers
        to_finish = ""
        if run.roster.num_finished:
            busy = sorted(rank for rank, worker in workers.items() if not worker.is_finished)
            absent = run.absent(now)
            to_finish = f"rank {names(busy or absent)} to {'finish' if busy else 'come back'}" if busy or absent else ""
        if ranks is not None:
            workers = {rank: workers[rank] for rank in ranks if rank in workers}
        by_policy = run.policy.waiting(now, workers) if run.has_weights and not run.is_holding else {}
        for_keeper, found = self.snapshots.reason(run.is_holding), {}
        for rank, worker in workers.items():
            peer, why = self.peers.get((rank, worker.incarnation)), ""
            if worker.is_finished:
                why = to_finish
            elif worker.is_away:
                why = "its connection"
            elif shard := self.sequencer.missing(rank) if peer is not None and peer.state == "waiting" else "":
                why = shard
            elif run.has_weights:
                why = by_policy.get(rank, "")
            elif run.initializer not in (None, worker):
                why = f"initial weights from rank {run.initializer.rank}"
            found[rank] = why or for_keeper
        return found

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `condition` holds; it is checked after every event. Raises TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                so = asyncio.get_running_loop().create_future()
                self._waiting_for.append((condition, so))
                try:
                    await so
                finally:
                    self._waiting_for.remove((condition, so))

    def notify(self) -> None:
        """Wake the waiters whose condition holds. The others stay asleep: this is called for every contribution, and
        some task always waits for the end."""
        for condition, so in self._waiting_for:
            if not so.done() and condition():
                so.set_result(None)

    # ---- what comes from workers ------------------------------------------------------------

    def join(self, joined: events.Joined) -> Peer:
        """Request a rank for a stream's process, and number the stream. Raises the refusal."""
        self._num_streams += 1
        joined.stream, self._seating = self._num_streams, None
        self.offer(joined)
        match self._seating:
            case effects.NotSeated(error=error):
                raise error
            case effects.Seated(rank=rank, incarnation=incarnation, is_resumed=is_resumed, number=number):
                return self._attach(Peer(rank, incarnation, is_resumed, number))
        raise refusal(Reason.NOT_READY, "the run has ended with an error")

    async def seated(self, rank: int, incarnation: int, timeout_s: float) -> Peer:
        """Wait on a shard for a worker that the coordinator has seated; returns its stream.

        Raises NOT_JOINED when a newer process holds the rank by then, TimeoutError when the order does not come."""
        workers = self.run.roster.workers

        def is_known() -> bool:
            has_come = rank in workers and workers[rank].incarnation >= incarnation
            return has_come or self.folding.is_fenced(rank, incarnation)

        await self.until(is_known, timeout_s)
        worker = workers.get(rank)
        if worker is None or worker.incarnation != incarnation or (rank, incarnation) in self.peers:
            raise refusal(Reason.NOT_JOINED, f"the coordinator released rank {rank}, incarnation {incarnation}")
        return self._attach(Peer(rank, incarnation, worker.is_resumed, self.run.policy.seq(rank)))

    def _attach(self, peer: Peer) -> Peer:
        """Register a stream, so that effects find it."""
        if not peer.is_resumed:
            self.released(peer.rank)
        peer.traffic = self.traffic.setdefault(peer.rank, Traffic())
        peer.traffic.transport, peer.traffic.transport_reason = "grpc", ""  # until it offers another
        self.peers[peer.seat] = peer
        return peer

    def may_return(self, peer: Peer) -> bool:
        """Whether the stream's process is a member, on this stream or already on a newer one."""
        worker, incarnation = self.run.roster.workers.get(peer.rank), peer.incarnation
        return worker is not None and worker.incarnation in (incarnation, incarnation + worker.is_resumed)

    def detach(self, peer: Peer) -> None:
        """Remove a stream that is over, and release the weights that were still to be sent on it."""
        self.peers.pop(peer.seat, None)
        while not peer.outbox.empty():
            item = peer.outbox.get_nowait()
            if isinstance(item, Go) and item.publication is not None:
                self.model.publisher.release(item.publication, peer.as_frames(item.effect))
        self.notify()

    # ---- effects --------------------------------------------------------------------------

    def _handlers(self) -> dict[type[effects.Effect], Callable[[Any], object]]:
        """Returns the function that carries out each kind of effect. Kinds for observers alone have none."""
        return {
            effects.Seated: self._seat,
            effects.NotSeated: self._seat,
            effects.Adopt: self._adopt,
            effects.ForgetModel: lambda _: self.model.forget(),
            effects.AskForWeights: self._ask_for_weights,
            effects.Begin: self._begin,
            effects.ContributionTaken: self.folding.taken,
            effects.Fold: self.folding.fold,
            effects.Commit: self._commit if self.config.log.level == "debug" else self.folding.commit,
            effects.Clip: self.folding.clip,
            effects.SendReply: self._reply,
            effects.KeepWeights: lambda effect: self.copies.keep(effect.version, effect.reader),
            effects.MetricsTaken: self._measured,
            effects.Refuse: self._refuse,
            effects.Fence: self._fence,
            effects.TakeSnapshot: self._take_snapshot,
            effects.Prune: lambda prune: self.snapshots.prune(prune.version),
            effects.TellDone: self._tell_done,
            effects.End: lambda end: self._resolve(end.error),
            effects.GoBack: lambda _: self.go_back(),
            effects.Log: self._log,
        }

    def _commit(self, commit: effects.Commit) -> None:
        log.debug("commit", version=commit.version, reason=commit.reason)
        self.folding.commit(commit)

    def _seat(self, effect: effects.Seated | effects.NotSeated) -> None:
        self._seating = effect
        self._make_room()

    def _adopt(self, adopt: effects.Adopt) -> None:
        offer = self.peers[adopt.rank, adopt.incarnation].offer
        assert offer is not None
        if self.model.may_change:
            self.model.change(offer[1])
        else:
            self.model.adopt(*offer)

    def _reply(self, reply: effects.SendReply) -> None:
        if reply.is_exact and self.run.options.keeps_best:
            self.copies.keep(reply.reply.result.version)
        self.send(reply)

    def _send(self, effect: effects.SendReply) -> None:
        """Queue a reply. With several shards each retains this version for it, so that all parts are of one version."""
        version, model = effect.reply.result.version, self.model
        is_start = effect.reply.start is not None
        if effect.has_weights and model.references.is_used:  # on all shards, even without a stream here
            model.references.replies(version, is_start)
        peer = self.peers.get((effect.rank, effect.incarnation))
        if peer is None or self.tensors.is_broken:
            return  # its stream has just ended: the worker asks again, or gets the refusal that ends the run
        peer.state = "computing"
        if not effect.has_weights:
            self.tensors.then(partial(peer.say, Go(effect)))
        elif peer.reply_codec is not None and moves_reference(peer.reply_codec) and peer.encodes(effect):
            assert isinstance(peer.reply_codec, ByTensor)
            reference = model.references.of(peer.reply_codec, version)
            update = reference.update_from(0 if is_start else peer.reference)
            effect.reference_version = update.version
            self.tensors.then(partial(peer.say, Go(effect, update=update)))
        elif not model.is_published:
            self.tensors.then(lambda: peer.say(Go(effect, payload=model.small_payload())))
        elif model.is_part or effect.is_exact:  # the weights must be of this version
            peer.say(Go(effect, publication=model.publisher.hold(as_frames=peer.as_frames(effect))))
        else:
            peer.say(Go(effect))

    def _ask_for_weights(self, effect: effects.AskForWeights) -> None:
        if (peer := self.peers.get((effect.rank, effect.incarnation))) is not None:
            peer.state = "uploading"
            peer.say(effect)

    def _refuse(self, refused: effects.Refuse) -> None:
        peer, error = self.peers.get((refused.rank, refused.incarnation)), refused.error
        if peer is None:
            return
        if error.reason in (Reason.MODEL_MISMATCH, Reason.OPTIMIZER_MISMATCH) and peer.offer is not None:
            try:
                self.model.check(peer.rank, *peer.offer)
            except ParamServerError as explained:  # it names the difference
                error = explained
        peer.end(error)

    def _tell_done(self, done: effects.TellDone) -> None:
        for seat in done.workers:
            if (peer := self.peers.get(seat)) is not None:
                self.tensors.then(partial(peer.say, Done(done.version, peer.rank == done.asked)))

    def _begin(self, begin: effects.Begin) -> None:
        weights = self.peers[begin.rank, begin.incarnation].weights
        assert weights is not None
        if self.model.has_weights:
            self.model.replace(weights.payload, self.run.policy.version)
            return
        self.model.begin(weights)
        self._make_room()

    def _measured(self, found: effects.MetricsTaken) -> None:
        own_bytes = sum(value.num_sent + value.num_received for value in self.traffic.values())
        on_shards = (sum(passed) for state in self.shard_states.values() for passed in state.traffic.values())
        found.point.num_bytes = own_bytes + sum(on_shards)
        self.tensors.then(partial(self.copies.measured, found.point.version, found.is_best))

    def _log(self, line: effects.Log) -> None:
        if self.config.server.shard == 0:  # the other shards would log the same
            fields = line.fields
            if line.event in ("admitted", "resumed"):
                traffic = self.traffic[fields["rank"]]
                fields = {**fields, "tensors": traffic.transport}
                fields |= {"reason": traffic.transport_reason} if traffic.transport_reason else {}
            getattr(log, line.level)(line.event, **fields)

    def _make_room(self) -> None:
        """Give each of several shards memory for an upload of every worker, and one more for a worker that comes back.
        With less, two shards could wait for each other's uploads for ever."""
        if self.config.server.shards > 1 and self.model.has_weights:
            self.model.staging.make_room(2 * len(self.run.roster.workers))

    def _fence(self, fenced: effects.Fence) -> None:
        rank, incarnation = fenced.rank, fenced.incarnation
        self.sequencer.fenced(rank, incarnation)
        self.folding.fence(rank, incarnation)
        if rank not in self.run.roster.workers:
            self.released(rank)
        for peer in list(self.peers.values()) if fenced.ends_streams else ():
            if peer.rank == rank and peer.incarnation <= incarnation:
                peer.end()

    def _take_snapshot(self, effect: effects.TakeSnapshot) -> None:
        if not self.is_broken:
            saved, states = self.complete(effect.saved)
            self.snapshots.take(saved, lambda durable: self.offer(events.Stored(effect.attempt, durable)), states)

    def complete(self, saved: dict[str, Any]) -> tuple[dict[str, Any], dict[int, bytes]]:
        """Add what the run does not know to `Run.saved`: traffic, bytes of evaluations and positions.

        Also returns the scripts' states."""
        training = saved["training"]
        for rank, traffic in self.traffic.items():
            if (stats := training["stats"].get(str(rank))) is not None:
                stats.update(bytes_sent=traffic.num_sent, bytes_received=traffic.num_received)
                stats["peer_bytes"] = traffic.num_peers
        states = self.folding.states.saved({rank: row.seq for rank, row in saved["rows"].items()})
        training["places"] = {str(rank): kept.position for rank, kept in states.items()}
        training["curve"] = self.run.curve.saved()
        return saved, {rank: kept.payload for rank, kept in states.items()}

    # ---- how it stands ----------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is in progress."""
        return self.run.rhythm.is_writing and not self.is_broken

    @property
    def state(self) -> ShardState:
        """Returns the memory that this process uses for the model, and its traffic."""
        model = self.model
        memory = dict(model.store.num_bytes) if model.has_weights else {}
        if model.has_weights and (num_bytes := model.references.num_bytes):
            memory["references"] = num_bytes
        traffic = {rank: (value.num_sent, value.num_received) for rank, value in self.traffic.items()}
        return ShardState(self.run.policy.version, memory, traffic)

    def elapsed_s(self) -> float:
        """Seconds of training, over all starts of the server."""
        return self.run.contributions.elapsed_s(self.now(), self.run.has_training_ended)


# ---- clock ---------------------------------------------------------------------------------------
# The time of a server process: its clock, which a test may replace by one that jumps, and tasks beside each other.


class Clock:
    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def every(self, interval_s: float, work: Callable[[], object]) -> NoReturn:
        """Call `work` every `interval_s`, first after one interval. Its exceptions reach the awaiter."""
        while True:
            await self.sleep(interval_s)
            work()


async def until_one_ends(*work: Coroutine[Any, Any, object]) -> None:
    """Run these beside each other until one ends, and cancel the others. Raises the error of one that has failed."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
