"""Contributes the versions of a region's run to the run above.

    first weights ----> join the run above, and begin from its weights
    every K steps ----> weights (or the mean gradient) and the state of the region's run, one contribution
    reply ------------> merged with the steps taken since, in the next version
    end --------------> the final weights of the run above

The server above stores the state when it counts the contribution. So a new relay process gets the weights of the run
above, and the region's counts that belong to them. Workers repeat later steps, so every sample counts once. The relay
writes no file.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..common.combinations import Choices, refusal
from ..common.config.schema import Config
from ..common.errors import ParamServerError, Reason, UsageError
from ..common.reporting.log import get_logger
from ..common.reporting.regions import region_run
from ..common.tensors.layout import Kind, Layout
from ..common.tensors.optimizers import OptimizerSpec
from ..common.wire.records import COUNTED, Contribution, Counts, FirstInfo, Outcome, Position, TrainingInfo
from ..ps.core import effects, events
from ..ps.core.counting import work_of
from ..ps.engine.engine import Engine
from ..ps.engine.resuming import restore_traffic
from ..ps.snapshots.common import Keeper
from ..ps.tensors.model import names_of
from ..ps.tensors.replies import Publication
from ..ps.tensors.store import Store
from ..worker.conversation.channel import worker_credentials
from ..worker.conversation.exchange import Exchange
from ..worker.conversation.messages import Final, Outgoing
from ..worker.conversation.threads import Helper
from ..worker.strategies.choice import make_server_strategy
from ..worker.tensors.packed import pack, unpack
from ..worker.tensors.transfer import ModelTensors
from ..worker.training.readings import Readings

# ---- link -----------------------------------------------------------------------------------------
# A relay's connection to the server above: the relay is one of its workers.


log = get_logger()

OVER = "the run above was over"
_NOT_COUNTED = {
    Outcome.DROPPED: "the contribution came after the end of its round",
    Outcome.REJECTED: "the run above rejected the contribution (store.on_nonfinite, store.max_norm)",
}


class RegionContribution(NamedTuple):
    """A contribution of the region. `payload`, uint8 [exchange_bytes], is a mean gradient, or the region's weights."""

    payload: torch.Tensor | None  # None: no gradient
    record: Contribution
    state: bytes  # of the region's run at this version
    without: frozenset[str] = frozenset()  # parameters without a gradient


class RegionTensors(ModelTensors):
    """Tensors of this layout without an nn.Module. `payload`, uint8 [total_bytes], is their memory."""

    def __init__(self, layout: Layout, payload: torch.Tensor) -> None:
        self.layout, self.payload = layout, payload
        self.tensors = [view.data for _, view in layout.views(payload)]
        of_name = {entry.spec.name: tensor for entry, tensor in zip(layout.entries, self.tensors, strict=True)}
        self.names = {id(of_name[spec.name]): spec.name for spec in layout.specs}
        self._homes = [({"": tensor}, "") for tensor in self.tensors]
        self.places = [tensor.data_ptr() for tensor in self.tensors]

    def set_gradients(self, payload: torch.Tensor | None, without: Collection[str]) -> None:
        """Use `payload`, uint8 [exchange_bytes], as gradients of the parameters, and as values of the buffers."""
        for entry, tensor in zip(self.layout.entries, self.tensors, strict=True):
            if entry.spec.kind is Kind.PARAMETER:
                tensor.grad = None if payload is None or entry.spec.name in without else entry.view(payload)
            elif entry.spec.kind is Kind.BUFFER and payload is not None:
                tensor.copy_(entry.view(payload))


def merge(layout: Layout, now: torch.Tensor, before: torch.Tensor, new: torch.Tensor) -> None:
    """Merge `new` into a region's weights `now`, in place. All weights are uint8 [total_bytes].

    `before`: the region's weights when they were contributed; the steps since then are kept. Buffers that are not
    averaged do not change.
    """
    for flat in (*layout.runs_of(Kind.PARAMETER), *layout.runs_of(Kind.BUFFER)):
        if flat.kind is Kind.PARAMETER or (flat.is_float and flat.is_averaged):
            flat.view(now).sub_(flat.view(before)).add_(flat.view(new))


def log_not_counted(samples: int, steps: int, meaning: str, is_sent_again: bool = False) -> None:
    """Log work of the region that the run above has not counted."""
    log.warning("region_not_counted", samples=samples, steps=steps, meaning=meaning, is_sent_again=is_sent_again)


class Link:
    """The exchange with the server above. Its thread runs one job after another.

    `model`, with the weights of the run above, and `optimizer` exist after `start`.
    """

    model: RegionTensors
    optimizer: OptimizerSpec

    def __init__(self, config: Config) -> None:
        """Join the run above. Raises UnreachableError, AuthError or the server's refusal."""
        upstream = config.upstream
        assert upstream.server is not None
        self.address = upstream.server
        changes = upstream.model_dump(include={"server", "rank", "codec", "reply_codec"})
        worker = config.worker.model_copy(update={**changes, "device": "cpu"})
        identity = {"cert": upstream.cert, "key": upstream.key} if upstream.cert is not None else {}
        security = config.security.model_copy(update=identity)
        credentials = worker_credentials(config.model_copy(update={"worker": worker, "security": security}))
        self._sent_first_for = -1  # `num_starts` when FirstInfo was sent
        name, num_workers = upstream.region or socket.gethostname(), config.run.workers or 1
        self.joins_as: dict[str, Any] = {"region": name, "num_workers": num_workers}
        self._exchange = Exchange(worker, upstream.rank, None, credentials, self.joins_as)
        self.settings, self.progress = self._exchange.settings, self._exchange.progress
        self.strategy = make_server_strategy(self._exchange, waits=True)  # the region itself trains on meanwhile
        self.readings = Readings()  # of the region; the server above shows them
        self._exchange.heartbeat.measure = self.readings.taken
        self.thread = Helper("upstream")
        self.has_model = False

    @property
    def run_name(self) -> str:
        """The name of the region's run, the same in each relay process of this rank."""
        assert self.progress.rank is not None
        return region_run(self.progress.run, self.progress.rank)

    @property
    def incarnation(self) -> int:
        """A server incarnation that no earlier server of the region had. The next number is for a restored run."""
        return 2 * self.progress.incarnation

    @property
    def state(self) -> bytes | None:
        """The state of the region's run that came with the newest START reply; None: the run is new."""
        begun = self.strategy.begun()
        return begun.payload if begun is not None else None

    # ---- on the thread ----------------------------------------------------------------------

    def start(self, layout: Layout, optimizer: OptimizerSpec, weights: torch.Tensor) -> None:
        """Offer the model. On return `model` has the weights of the run above. Later requests wait without a limit."""
        self.model, self.optimizer, self.has_model = RegionTensors(layout, weights.clone()), optimizer, True
        self.strategy.start(self.model, optimizer)
        self._exchange.retry.give_up_s = math.inf  # only now: a new relay must not wait for a run above that is over

    def send(self, contribution: RegionContribution) -> Outcome:
        """Contribute. On return `model` has new weights. After START the region must begin again from them.

        If weights come too late for their round, this method adds the region's steps to the newer weights, and sends
        these.
        """
        while True:
            before = self.model.payload.clone() if self.settings.kind.worker_steps else None
            if self.settings.kind.holds_gradients:
                self.model.set_gradients(contribution.payload, contribution.without)
            elif contribution.payload is not None:
                exchanged = slice(self.model.layout.exchange_bytes)
                self.model.payload[exchanged].copy_(contribution.payload[exchanged])
            record, counts = contribution.record, contribution.record.counts
            if self._sent_first_for == self.progress.num_starts:  # it is of a new process
                record = replace(record, first=None)
            self._sent_first_for = self.progress.num_starts
            self.joins_as["num_workers"] = counts.num_workers
            self.strategy.contribute(Outgoing(record, contribution.state))
            outcome, work = self.progress.outcome, (counts.num_samples, counts.num_steps)
            if outcome not in _NOT_COUNTED:
                return outcome
            meaning = _NOT_COUNTED[outcome]
            if before is None or contribution.payload is None or outcome is Outcome.REJECTED:
                log_not_counted(*work, meaning)
                return outcome
            is_over = self.progress.is_done
            log_not_counted(*work, OVER if is_over else meaning, is_sent_again=not is_over)
            if is_over:
                return outcome
            moved = contribution.payload.clone()
            # The steps of a dropped delta are in the codec's residual, so the next delta must not have them again.
            since = contribution.payload if self.settings.kind.holds_differences else before
            merge(self.model.layout, moved, since, self.model.payload)
            contribution = contribution._replace(payload=moved)

    def finish(self, stays: bool) -> Final | None:
        """Wait for the end of the run above. `stays`: some worker of the region may be asked for metrics."""
        self._exchange.stays = stays
        return self.strategy.finish()

    # ---- from any thread ----------------------------------------------------------------------

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of an evaluation, after `step` steps of the region. They travel with the next message."""
        result = {"version": self.progress.version, "step": step, "metrics": metrics}
        self.thread.submit(lambda: self._exchange.measured.append(result))

    def close(self) -> None:
        """End the connections. A pending job ends with an error."""
        self.strategy.drop()
        self.thread.stop()
        self.thread.dismiss()


log = get_logger()

_SHOW_AFTER_S = 1.0  # waits that are shorter have no number of seconds
_ABOVE_IS_OVER = "the run of the server above is over"  # why the region ends
_AHEAD = 4  # default of `upstream.ahead`, in contributions


class Region(Keeper):
    """Passes the versions of a region's run to the server above: it keeps them, and makes them (`commit`).

    It calls `goes_back` when the run above has another position of this region, from which a new server must begin.

    The region's training steps are those of its slowest worker. Unless it waits for each reply, the region trains on,
    at most `upstream.ahead` steps beyond the oldest contribution without a reply. While one contribution is in flight,
    later ones are queued.
    """

    def __init__(self, config: Config, engine: Engine, link: Link, goes_back: Callable[[], object]) -> None:
        self._config, self._engine, self._link, self._goes_back = config.upstream, engine, link, goes_back
        self._run, self._model, self._tensors = engine.run, engine.model, engine.tensors
        self._passes_gradients = link.settings.kind.holds_gradients
        self._waits_for_each = self._passes_gradients or config.upstream.every == 0
        self._every = max(1, link.progress.local_steps)  # training steps of one contribution
        self._steps = 0  # at the newest contribution, sent or queued
        self._unanswered: deque[int] = deque()  # steps at each contribution without a reply; the first one is sent
        self._num_samples = 0  # since the newest contribution
        self._sent: torch.Tensor | None = None  # the contributed weights, until their reply comes
        # Used on the tensor thread: contributions that are not sent yet, and replies that are not in a version yet, as
        # (contributed weights, the reply's weights).
        self._queue: deque[RegionContribution] = deque()
        self._replies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._publication: Publication | None = None  # of the version that waits for a reply
        self._requested_at: float | None = None  # when the pending job began; None: no job
        self._is_finishing = False  # the end of the run waits for the pending replies
        self._is_merging = False  # the tensor thread merges a reply
        self._done: Callable[[], object] = lambda: None  # completes the pending `take`
        self._ranks: tuple[int, ...] = ()  # whose gradients are in the newest contribution
        self._is_over = False  # the run above takes no more contributions
        self._has_unmerged_reply = False  # the weights of a reply are not in a version yet

    def restore(self) -> None:
        """Continue the region's run from the weights and the state in the newest START.

        Without a state, no contribution of the region has counted yet. Its run then begins anew from these weights.
        """
        link, model, run = self._link, self._model, self._run
        state, weights = unpack(self._state() if link.state is None else link.state), link.model.payload
        saved: dict[str, Any] = state["run"]

        def fill(store: Store) -> None:
            store.replace(weights, store.weights)
            store.version = saved["version"]

        model.adopt(link.model.layout, link.optimizer, f"the server above, at {link.address}")
        model.begin(model.new_memory(), fill)
        run.restore(saved["version"], names_of(link.model.layout, link.optimizer), saved, model.source)
        run.incarnation = link.incarnation + 1
        payloads = {int(rank): bytes(item.numpy()) for rank, item in state["states"].items()}
        self._engine.folding.states.restore(run.policy.rows, saved["training"]["places"], payloads)
        restore_traffic(self._engine, saved["training"])
        self._steps = run.policy.min_steps_done
        log.info("resumed", path=model.source, version=saved["version"], run=run.name, incarnation=run.incarnation)
        if model.store.optimizer is not None and not self._passes_gradients:
            log.warning("moments_began_anew", meaning="the run above keeps no state of the region's optimizer")
        self._notify_run()

    # ---- every version ------------------------------------------------------------------------

    def commit(
        self, commit: effects.Commit, step: Callable[..., list[torch.Tensor]], publication: Publication,
        without: frozenset[str],
    ) -> None:  # fmt: skip
        """Make a version, as a `Committer`."""
        self._num_samples += commit.num_samples
        steps = self._run.policy.min_steps_done
        if self._is_over:
            self._tensors.submit(partial(self._receive, publication), self._model.staging.reclaim)
        elif self._passes_gradients:
            self._publication, self._ranks = publication, tuple(id.rank for id in commit.contributions)
            groups = commit.hyperparameters or ()
            training = TrainingInfo(groups, commit.clip_norm, self._loss(), iteration=commit.iteration)
            contribution = self._contribution(steps, training, without)
            self._tensors.submit(
                self._model.store.mean, lambda mean: self._send(contribution._replace(payload=mean)), pauses=True
            )
        else:
            has_weights = self._run.policy.has_newest_weights  # always True without all-reduce peers
            due = self._contribution(steps) if has_weights and self._is_due(steps) else None
            # If a version already waits for a reply, later versions queue behind it on the tensor thread.
            waits = self._must_wait(steps) and not self._tensors.is_paused
            if waits and has_weights:
                self._publication = publication
            self._has_unmerged_reply &= not has_weights
            now = None if waits and has_weights else publication
            work = partial(self._step, step, now, due, merges=has_weights, is_queued=len(self._unanswered) > 1)
            self._tensors.submit(work, self._stepped, pauses=waits)

    def reply(self, send: Callable[[effects.SendReply], object], reply: effects.SendReply) -> None:
        """Send a reply to a worker; if the region waits, once the run above has replied."""
        if reply.reply.group is not None:
            self._request_weights(reply)
        if self._tensors.is_paused:
            self._tensors.then(partial(send, reply))
        else:
            send(reply)

    def _request_weights(self, reply: effects.SendReply) -> None:
        """Request weights from the all-reduce peer of lowest rank for the next exchange.

        All peers get the weights of that version back, merged with those of the server above.
        """
        policy, group = self._run.policy, reply.reply.group
        assert group is not None
        steps = policy.min_steps_done + 1
        is_needed = self._has_unmerged_reply or self._is_due(steps) or self._must_wait(steps)
        uploads = group.uploads_weights or is_needed
        uploads &= group.members[:1] == (reply.rank,)
        reply.reply = replace(reply.reply, group=replace(group, uploads_weights=uploads, returns_weights=True))
        reply.has_weights |= reply.reply.result.outcome in COUNTED and policy.has_newest_weights

    def _step(
        self, step: Callable[..., list[torch.Tensor]], publication: Publication | None, due: RegionContribution | None,
        *, merges: bool, is_queued: bool,
    ) -> tuple[list[torch.Tensor], RegionContribution | None]:  # fmt: skip
        """On the tensor thread: step, merge replies, publish, and copy the weights that are contributed.

        Returns payloads that may be reused, and the contribution to send, if there is one.
        """
        store = self._model.store
        reusable = step(progress=lambda _: None)
        if merges:
            self._merge(store)
        if publication is not None:
            publication.made(store.layout.exchange_bytes)
        if due is not None:
            due = due._replace(payload=store.weights.clone())
            if is_queued:
                self._queue.append(due)
        return reusable, None if is_queued else due

    def _stepped(self, found: tuple[list[torch.Tensor], RegionContribution | None]) -> None:
        reusable, contribution = found
        self._model.staging.reclaim(reusable)
        if contribution is not None:
            self._send(contribution)

    def _merge(self, store: Store) -> None:
        """On the tensor thread: merge replies into the region's weights."""
        for sent, new in self._replies:
            store.change(merge, sent, new)
        self._replies.clear()

    def _receive(self, publication: Publication) -> list[torch.Tensor]:
        """On the tensor thread: make this version from the weights of the run above."""
        store = self._model.store
        reusable = store.receive(self._link.model.payload, publication.segment.payload)
        publication.made(store.layout.exchange_bytes)
        return reusable

    # ---- the exchange -------------------------------------------------------------------------

    def _contribution(
        self, steps: int, training: TrainingInfo | None = None, without: frozenset[str] = frozenset()
    ) -> RegionContribution:
        """Return a contribution of the version after so many steps, without its payload."""
        policy, traffic = self._run.policy, self._engine.traffic
        num_counted = sum(row.seq for row in policy.rows.values())
        self._link.readings.note({  # for the server above
            "region_workers": len(policy.members), "region_ahead": self._num_ahead,
            "region_bytes": sum(item.num_sent + item.num_received for item in traffic.values()),
            "region_staleness": sum(item.staleness_sum for item in self._run.roster.stats.values())
            / max(1, num_counted),
        })  # fmt: skip
        num_steps, first = steps - self._steps, self._steps
        self._steps = steps
        self._unanswered.append(steps)
        num_workers = self._run.options.num_workers or len(policy.members)
        record = Contribution(
            kind=self._link.settings.kind,
            counts=Counts(self._num_samples, num_steps, num_steps, num_workers=num_workers),
            training=training or TrainingInfo(loss=self._loss()),
            first=FirstInfo(work=work_of(traffic)),
            position=Position(first, num_steps),
        )
        self._num_samples = 0
        return RegionContribution(None, record, self._state(), without)

    @property
    def _num_ahead(self) -> int:
        """Training steps since the newest contribution with a reply."""
        return self._run.policy.min_steps_done - min(self._unanswered, default=self._steps)

    def _is_due(self, steps: int) -> bool:
        """Whether to contribute the version after so many steps."""
        return steps - self._steps >= self._every

    def _must_wait(self, steps: int) -> bool:
        """Whether the region waits, after so many steps, for the oldest reply."""
        most = self._every * _AHEAD if self._config.ahead is None else self._config.ahead
        return bool(self._unanswered) and (self._waits_for_each or steps - self._unanswered[0] >= most)

    def _send(self, contribution: RegionContribution) -> None:
        if not self._passes_gradients:
            self._sent = contribution.payload
        self._request(partial(self._link.send, contribution), self._replied)

    def _request(self, job: Callable[[], Any], replied: Callable[[Any], None]) -> None:
        """Run a job on the link's thread. Its result goes to `replied`, on the event loop. An error ends the run."""
        if self._run.ended_by not in ("", _ABOVE_IS_OVER):
            self._link.strategy.stop(self._run.ended_by)
        self._requested_at = time.monotonic()
        loop = self._engine.finished.get_loop()

        def done(found: Future[Any]) -> None:
            self._requested_at = None
            try:
                replied(found.result())
            except ParamServerError as error:
                self._engine.end_with(error)
            except Exception as error:
                self._engine.broke("upstream", error)

        self._link.thread.submit(job).add_done_callback(
            lambda found: loop.is_closed() or loop.call_soon_threadsafe(done, found)
        )

    def _replied(self, outcome: Outcome) -> None:
        if outcome is Outcome.START:
            self._goes_back()
            return
        self._is_over, self._is_merging = self._link.progress.is_done, True
        self._unanswered.popleft()
        self._every = max(1, self._link.progress.local_steps)
        if self._is_over:
            self._unanswered.clear()
        has_queue = bool(self._unanswered)
        self._notify_run(lost=() if outcome in COUNTED else self._ranks)
        publication, self._publication = self._publication, None
        if self._passes_gradients:
            assert publication is not None
            self._tensors.go_on(partial(self._receive, publication), self._model.staging.reclaim)
            self._after_replies(None)
            return
        assert self._sent is not None
        work = partial(self._take_reply, self._sent, publication)
        self._has_unmerged_reply = publication is None
        if self._tensors.is_paused:
            self._tensors.go_on(work, lambda _: None)
        else:
            self._tensors.submit(work)
        # Behind the versions that queue on the tensor thread: the next contribution may be one of them.
        self._tensors.submit(lambda: self._queue.popleft() if has_queue else None, self._after_replies)

    def _take_reply(self, sent: torch.Tensor, publication: Publication | None) -> None:
        """On the tensor thread: merge a reply into queued contributions, and into the version that waits."""
        new = self._link.model.payload.clone()
        for queued in self._queue:
            assert queued.payload is not None
            merge(self._model.store.layout, queued.payload, sent, new)
        self._replies.append((sent, new))
        if publication is not None:
            self._merge(self._model.store)
            publication.made(self._model.store.layout.exchange_bytes)

    def _after_replies(self, contribution: RegionContribution | None) -> None:
        self._is_merging = False
        if contribution is not None:
            self._send(contribution)
        elif self._is_finishing:
            self._end()

    def _notify_run(self, is_final: bool = False, may_ask: bool = False, lost: tuple[int, ...] = ()) -> None:
        """Pass the decisions of the run above to the region's run."""
        progress = self._link.progress
        index, num_others = progress.worker_index, max(0, progress.num_workers - self._link.joins_as["num_workers"])
        over = _ABOVE_IS_OVER if progress.is_done else ""
        self._engine.offer(events.CommitterReplied(index, num_others, over, is_final, may_ask, lost))

    def _state(self) -> bytes:
        """The state of the region's run at its newest version."""
        saved, states = self._engine.complete(self._run.saved(self._engine.now()))
        payloads = {str(rank): torch.frombuffer(bytearray(state), dtype=torch.uint8) for rank, state in states.items()}
        return pack({"run": {**saved, "version": self._run.policy.version}, "states": payloads})

    def _loss(self) -> float:
        """The mean of the workers' newest losses; NaN without one."""
        losses = [self._run.roster.stats[rank].loss for rank in self._run.policy.members]
        losses = [loss for loss in losses if math.isfinite(loss)]
        return sum(losses) / len(losses) if losses else math.nan

    def reason(self, is_holding: bool) -> str:
        if self._requested_at is None or not (self._tensors.is_paused or is_holding or self._is_finishing):
            return ""
        waited_s = time.monotonic() - self._requested_at
        state = f"has not replied for {waited_s:.0f} s" if waited_s >= _SHOW_AFTER_S else "has not replied yet"
        rest = f"; this region is {self._num_ahead} steps ahead" if self._num_ahead else ""
        return f"the server above, at {self._link.address}, {state}{rest}"

    # ---- the beginning and the end (`Keeper`) -----------------------------------------------------

    def take(self, saved: dict[str, Any], done: Callable[[int], object], states: Mapping[int, bytes]) -> None:
        version = self._run.policy.version
        self._done = partial(done, version)
        if not self._link.has_model:
            self._start()
        elif self._run.is_closed or self._run.roster.num_finished < len(self._run.roster.workers):
            done(version)  # a stop, or a snapshot that a user requested
        else:
            self._is_finishing = True
            if not (self._unanswered or self._is_merging):
                self._end()

    def _start(self) -> None:
        """Join the run above with the model and the weights of the region's first worker."""
        whole, optimizer = self._model.whole, self._model.whole_optimizer
        if error := refusal(Choices(mode="", kind=None, in_region=True, has_rows=bool(optimizer.tables))):
            self._engine.end_with(error)
            return

        def started(_: None) -> None:
            if self._link.state is not None:
                self._goes_back()
                return
            every, above = self._config.every, self._link.progress.local_steps
            if every and above and every != above:
                message = f"--upstream-every {every}, but policy.local_steps of the run above is {above}"
                fix = f"leave out --upstream-every, or give the server above --local-steps {every}"
                raise UsageError(message, fix=fix, reason=Reason.BAD_REQUEST)  # its workers get the same message
            self._every = max(1, above)
            self._model.replace(self._link.model.payload, self._run.policy.version)
            self._notify_run()
            self._done()

        self._request(partial(self._link.start, whole, optimizer, self._model.store.weights), started)

    def _end(self) -> None:
        """All workers of the region have finished: contribute the remaining steps, and wait for the final weights."""
        steps = self._run.policy.min_steps_done
        has_rest = steps > self._steps or self._num_samples
        if has_rest and not self._link.progress.is_done and not self._passes_gradients:
            contribution = self._contribution(steps)
            work = partial(self._step, lambda progress: [], None, contribution, merges=True, is_queued=False)
            self._tensors.submit(work, self._stepped)
            return  # the reply calls this method again

        def finished(final: Any) -> None:
            if final is None:
                self._goes_back()
                return
            queued = [item.record for item in self._queue]
            if lost := self._num_samples + sum(record.counts.num_samples for record in queued):
                first = queued[0].position if queued else None
                log_not_counted(lost, steps - (self._steps if first is None else first.step), OVER)
            self._model.replace(self._link.model.payload, self._run.policy.version)
            self._notify_run(is_final=True, may_ask=final.is_asked)
            self._done()

        stays = any(worker.stays for worker in self._run.roster.workers.values())
        self._request(partial(self._link.finish, stays), finished)

    def give_up(self) -> None:
        """Complete the pending `take` at once, because the server stops."""
        if self._engine.is_writing:
            self._done()
