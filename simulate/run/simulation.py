"""The run itself, `ps/core`, under a virtual clock: workers, links and tensor work decide when events happen.

    compute -> (wait for one of max_staged) -> upload -> Run.apply(Contributed) -> fold, step -> download -> compute

The real run decides. This module knows no modes. It only uses the facts that every worker knows: the kind of its
contributions, the number of local steps, and when it fetches weights. The same world and configuration give the same
events, and so the same `digest` of the tally.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.wire.records import Base, Contribution, ContributionId, Counts, Outcome, Timing, TrainingInfo
from ...ps.core import effects, events
from ...ps.core.run import Run
from ...ps.engine.modes import make_policy, options_of
from ...ps.policies.base import Policy
from ..machines.world import Compute, Recorded, World
from ..traffic.sizes import INLINE_BYTES
from .agenda import Agenda, Handler, Worker
from .tally import FLUSHED, Sample, Tally

if TYPE_CHECKING:
    from ..learning.learner import Learner


TICK_S = 0.2  # as in a server
NUM_SAMPLES = 100  # of a run: looking at all workers this often costs almost nothing
_MOST_IDLE_TICKS = 100_000
_SILENT = TrainingInfo()
_NAMES = ["", *(outcome.name for outcome in Outcome)]  # by value; the property `name` takes ten times as long


class Simulation:
    """One run of one mode: `go`, then read its `tally`.

    `observe` gets the facts that the run decides. `clock` measures the cost of decisions. A `learner` trains.
    `progressed` gets, now and then, the part (0..1) of the training steps that is taken, and may raise.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        clock: Callable[[], float] = lambda: 0.0,
        observe: Callable[[float, effects.Fact], None] | None = None,
        learner: Learner | None = None,
        progressed: Callable[[float], object] = lambda part: None,
    ) -> None:
        self.config, self.world, self.learner = config, world, learner
        self.policy = policy = make_policy(config)
        if policy.kind.has_peers:
            message = f"mode {config.run.mode}: its workers average among themselves, over links that are not simulated"
            raise UsageError(message, fix="use a mode whose workers exchange with the server")
        plain = {"keeps_snapshots": False, "epochs": None, "stop_when": None, "patience": None}
        options = replace(options_of(config), max_workers=world.num_workers, **plain)  # type: ignore[arg-type]
        self.run = Run(options, policy, "simulated")
        self.tally = Tally()
        self._clock, self._observe, self._progressed = clock, observe, progressed
        self._counts, self._base = Counts(), Base()  # of the newest contribution; most are alike
        self._server = Server(world, policy, self._arrived, self._delivered)
        self._agenda = self._server.agenda
        self._kind = policy.kind
        # a contribution is based on the average that it contains, or on the newest weights that a relay has merged
        self._is_of_newest = world.trains_on or not policy.kind.may_lose
        self._rest_cause = "own link" if world.recorded else "its link"
        compute = Recorded if world.recorded else Compute
        self.workers = [Worker(rank, compute(world, rank)) for rank in range(world.num_workers)]
        self._batch_size, self._trains_on = config.run.batch_size, policy.num_in_flight or world.trains_on
        self._own_s = world.sizes.up / world.up + world.latency_s  # of an exchange, without weights
        self._own_down_s = world.sizes.down / world.down
        self._sampled_at = 1  # training steps of all
        self._chance = random.Random(world.seed + 0.25)
        self._needs_ticks = any(
            name.endswith("_s") and value is not None for name, value in policy.options.model_dump().items()
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            effects.Fold: lambda fold: self._server.fold(self.workers[fold.id.rank]),
            effects.Commit: self._commit,
            effects.SendReply: self._reply,
            effects.ContributionTaken: self._taken,
            effects.TellDone: self._end,
            effects.End: self._end,
            effects.Seated: self._seated,
            effects.NotSeated: self._end,
            effects.Refuse: self._refused,
        }

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._agenda.now

    def go(self) -> None:
        """Simulate to the end. Raises UsageError if the run would never end."""
        self._start()
        never, num_idle, agenda = math.inf, 0, self._agenda
        tick_at = TICK_S if self._needs_ticks else never
        while not agenda.is_stopped:
            agenda.go_on(tick_at)
            if agenda.is_stopped:
                break
            if tick_at == never:
                tick_at = agenda.now + TICK_S
            if agenda.is_empty:
                num_idle += 1
                if num_idle > _MOST_IDLE_TICKS:
                    why = self.policy.waiting_reason(agenda.now)
                    raise UsageError(f"the run is stuck after {agenda.now:,.1f} s: {why or 'there are no workers'}")
            agenda.now, tick_at = tick_at, tick_at + TICK_S if self._needs_ticks else never
            self._happens(events.Ticked())
        if self.learner is not None:
            self.learner.measure(self.now, self.tally.num_steps)

    # ---- joins and failures ------------------------------------------------------------

    def _start(self) -> None:
        late = self.world.joins_at
        num_first = len(self.workers) - len(late)
        for worker in self.workers[:num_first]:
            self._join(worker, None)
        for worker, at in zip(self.workers[num_first:], late, strict=True):
            self._agenda.push(at, self._join, worker)
        if not self.run.has_weights:
            self._happens(events.Brought(0, self.workers[0].incarnation))

    def _join(self, worker: Worker, _: object) -> None:
        self._happens(events.Joined(worker.rank, worker.rank))
        self._happens(events.Offered(worker.rank, worker.incarnation, model="model", optimizer="optimizer"))
        if not math.isinf(self.world.mtbf_s):
            self._agenda.push(self.now + self._chance.expovariate(1 / self.world.mtbf_s), self._fail, worker)

    def _seated(self, seated: effects.Seated) -> None:
        self.workers[seated.rank].incarnation = seated.incarnation

    def _fail(self, worker: Worker, _: object) -> None:
        """The process dies, and a new one joins later."""
        if worker.is_finished:
            return
        self.tally.num_failures += 1
        worker.life, worker.next_steps = worker.life + 1, 0
        worker.is_computing = worker.is_ready = worker.is_in_flight = False
        self._server.release(worker)
        self._happens(events.Disconnected(worker.rank, worker.incarnation))
        self._agenda.push(self.now + self.world.back_s, self._join, worker)

    # ---- a worker ----------------------------------------------------------------------------

    def _compute(self, worker: Worker, num_steps: int) -> None:
        worker.is_computing, worker.steps, worker.base = True, num_steps, worker.version
        worker.computed_s = worker.compute.take(num_steps)
        if self.learner is not None:
            self.learner.compute(worker.rank, num_steps, worker.done_steps)
        self._agenda.push(self._agenda.now + worker.computed_s, self._computed, worker)

    def _computed(self, worker: Worker, _: object) -> None:
        self.tally.seconds["compute"] += worker.computed_s
        worker.is_computing = False
        if worker.is_in_flight:
            worker.is_ready = True
        else:
            self._hand_over(worker)

    def _hand_over(self, worker: Worker) -> None:
        """Send the contribution. With delayed updates the next one is computed meanwhile."""
        number, pull_every = worker.counted + 1, self.policy.pull_every
        num_samples, training = self._batch_size * worker.steps, _SILENT
        if self.learner is not None:
            num_samples, training = self.learner.send(worker.rank)
        wants_weights = pull_every == 1 or number % pull_every == 0
        if self._counts.num_samples != num_samples or self._counts.num_steps != worker.steps:
            self._counts = Counts(num_samples, worker.steps, worker.steps)
        version = worker.version if self._is_of_newest else worker.base
        if self._base.version != version:
            self._base = Base(version)
        contribution = Contribution(
            ContributionId(worker.rank, worker.incarnation, number),
            self._kind,
            self._counts,
            self._base,
            Timing(worker.computed_s, worker.transfer_s),
            training=training if wants_weights else replace(training, wants_weights=False),
        )
        worker.event = events.Contributed(contribution)
        worker.is_ready, worker.is_in_flight, worker.sent_at = False, True, self._agenda.now
        worker.done_steps += worker.steps
        self._server.take(worker)
        total = self.policy.training_steps
        left = worker.next_steps if total is None else min(worker.next_steps, total - worker.done_steps)
        if self._trains_on and left > 0:
            self._compute(worker, left)

    def _delivered(self, worker: Worker, reply: effects.SendReply) -> None:
        """The reply has arrived at the worker, with its weights."""
        result, work = reply.reply.result, reply.reply.next_work
        worker.counted, worker.done_steps, worker.next_steps = result.seq, work.training_steps, work.local_steps
        if reply.has_weights:
            worker.version = result.version
        if self.learner is not None:
            self.learner.received(reply)
        if worker.is_in_flight:
            worker.is_in_flight = False
            self._account(worker, reply)
        if not work.local_steps:
            worker.life += 1  # cancels what it still computes
            worker.is_finished = True
            self._happens(events.Finished(worker.rank, worker.incarnation, worker.transfer_s))
        elif worker.is_ready:
            self._hand_over(worker)
        elif not worker.is_computing:
            self._compute(worker, work.local_steps)

    def _account(self, worker: Worker, reply: effects.SendReply) -> None:
        """Count the time of this exchange by cause."""
        seconds, gate_wait_s = self.tally.seconds, reply.reply.result.gate_wait_s
        transfer_s = self._agenda.now - worker.sent_at - gate_wait_s
        worker.transfer_s = transfer_s if transfer_s > 0.0 else 0.0
        own_s = self._own_s + self._own_down_s if reply.has_weights else self._own_s
        server_s, staged_s = worker.left_at - worker.decided_at, worker.begun_at - worker.sent_at
        seconds["mode"] += gate_wait_s
        seconds["own link"] += own_s
        seconds["server"] += server_s
        seconds["staging"] += staged_s
        rest_s = worker.transfer_s - own_s - server_s - staged_s
        if rest_s > 0.0:
            seconds[self._rest_cause] += rest_s

    def _arrived(self, worker: Worker, _: object) -> None:
        """The contribution has arrived: the run decides."""
        event = worker.event
        assert event is not None
        if self.learner is not None:
            self.learner.arrived(event)
        if self._observe is not None:
            event.traffic = round(worker.num_sent), round(worker.num_received)
        event.at = now = self._agenda.now
        begun_s = self._clock()
        found = self.run.apply(event)
        self.tally.decision_s.append(self._clock() - begun_s)
        self._carry_out(found, now)

    # ---- what the run decides ----------------------------------------------------------------

    def _happens(self, event: events.Event) -> None:
        event.at = now = self._agenda.now
        self._carry_out(self.run.apply(event), now)

    def _carry_out(self, found: list[effects.Effect], now: float) -> None:
        handlers, learner, observe = self._handlers, self.learner, self._observe
        for effect in found:
            if learner is not None:
                learner.carry_out(effect, now, self.tally.num_steps)
            if observe is not None and isinstance(effect, effects.Fact):
                observe(now, effect)
            if (handler := handlers.get(type(effect))) is not None:
                handler(effect)
        self._server.begin_queued()  # folds have moved them up
        if len(self.tally.lines) >= FLUSHED:
            self.tally.flush()

    def _commit(self, commit: effects.Commit) -> None:
        self._server.commit()
        self.tally.note((self._agenda.now, commit.version))

    def _reply(self, reply: effects.SendReply) -> None:
        tally, result = self.tally, reply.reply.result
        if result.outcome is Outcome.APPLIED:
            tally.staleness[result.staleness] += 1
        tally.note((self._agenda.now, _NAMES[result.outcome], reply.rank, result.seq, result.version))
        self._server.reply(self.workers[reply.rank], reply)

    def _taken(self, taken: effects.ContributionTaken) -> None:
        rank, _, number = taken.contribution.id
        tally = self.tally
        if not taken.is_kept:
            self._server.release(self.workers[rank])
        if taken.outcome == "accepted":
            tally.num_steps += taken.contribution.counts.num_steps
            if tally.num_steps >= self._sampled_at:
                # Note how far apart the workers' versions are, and where their time went until now.
                versions = [worker.version for worker in self.workers if worker.next_steps]
                skew = max(versions) - min(versions) if versions else 0
                tally.samples.append(Sample(self._agenda.now, skew, dict(tally.seconds)))
                total = self.world.num_workers * (self.policy.training_steps or 1)
                self._sampled_at = tally.num_steps + max(1, total // NUM_SAMPLES)
                self._progressed(min(1.0, tally.num_steps / total))
        tally.note((self._agenda.now, taken.outcome, rank, number, taken.contribution.base.version))

    def _end(self, end: effects.End | effects.NotSeated | effects.TellDone) -> None:
        self._agenda.is_stopped = True
        if not isinstance(end, effects.TellDone) and end.error is not None:
            raise end.error

    def _refused(self, refused: effects.Refuse) -> None:
        if self.workers[refused.rank].incarnation == refused.incarnation:
            raise refused.error


# ---- server --------------------------------------------------------------------------------------
# The time that a simulated server takes: staging of uploads, links, and tensor work.


class Server:
    """The server of one run. `arrived` gets each contribution at the server, `delivered` each reply at its worker."""

    def __init__(self, world: World, policy: Policy, arrived: Handler, delivered: Handler) -> None:
        self._world, self._policy = world, policy
        self._arrived, self._delivered = arrived, delivered
        self.agenda = Agenda(world)
        self._busy_until = 0.0  # with tensor work
        self._num_staged = self._num_folds = self._num_asked = 0
        self._waiting: list[tuple[int, int, Worker, int]] = []  # for staging memory
        self._has_order = type(policy).upload_position is not Policy.upload_position
        self._is_inline = world.sizes.up <= INLINE_BYTES  # smaller payloads are not staged
        self._own_up_s = world.sizes.up / world.up
        self._is_up_shared = bool(world.sizes.up) and not math.isinf(world.server_up)
        self._is_down_shared = not math.isinf(world.server_down)

    # ---- up ------------------------------------------------------------------------------------

    def take(self, worker: Worker) -> None:
        """Begin to upload the worker's contribution, or queue it."""
        if self._is_inline:
            self._upload(worker)
            return
        self._num_asked += 1
        position = self._policy.upload_position(worker.rank) if self._has_order else 0
        heapq.heappush(self._waiting, (position + self._num_folds, self._num_asked, worker, worker.life))
        self.begin_queued()

    def begin_queued(self) -> None:
        """Begin queued uploads in fold order, as `ps/tensors/staging.py` does, without those folded much later."""
        waiting, most = self._waiting, self._world.max_staged
        while waiting and self._num_staged < most:
            _, _, worker, life = waiting[0]
            is_alive = worker.life == life
            if is_alive and self._has_order and self._policy.upload_position(worker.rank) >= most:
                return
            heapq.heappop(waiting)
            if is_alive:
                self._num_staged += 1
                worker.is_staged = True
                self._upload(worker)

    def release(self, worker: Worker, _: object = None) -> None:
        """Free the staging memory of the worker's contribution."""
        if worker.is_staged:
            worker.is_staged = False
            self._num_staged -= 1
            self.begin_queued()

    def _upload(self, worker: Worker) -> None:
        world, agenda = self._world, self.agenda
        worker.begun_at = now = agenda.now
        if self._is_up_shared:
            agenda.up.begin(now, (worker, worker.life, self._here, None), world.sizes.up, world.up)
        else:
            own_s = self._own_up_s + agenda.trip_s + worker.compute.exchange_s
            agenda.push_behind(agenda.trips, now + own_s, self._here, worker)

    def _here(self, worker: Worker, _: object) -> None:
        event, framing = worker.event, self._world.framing
        assert event is not None
        worker.num_sent += self._world.sizes.up if framing is None else framing.up(event.contribution)
        self._arrived(worker, None)

    # ---- tensor work --------------------------------------------------------

    def fold(self, worker: Worker) -> None:
        """Fold the worker's contribution."""
        self._num_folds += 1
        now = self.agenda.now
        self._busy_until = (now if now > self._busy_until else self._busy_until) + self._world.fold_s
        if worker.is_staged:
            self.agenda.push_behind(self.agenda.works, self._busy_until, self.release, worker)

    def commit(self) -> None:
        """Make a version."""
        self._busy_until = max(self.agenda.now, self._busy_until) + self._world.step_s

    # ---- down ----------------------------------------------------------------------------------

    def reply(self, worker: Worker, reply: effects.SendReply) -> None:
        """Send a reply once the tensor work before it is done."""
        agenda = self.agenda
        worker.decided_at = agenda.now
        if self._busy_until > agenda.now:
            agenda.push_behind(agenda.works, self._busy_until, self._leaves, worker, reply)
        else:
            self._leaves(worker, reply)

    def _leaves(self, worker: Worker, reply: effects.SendReply) -> None:
        world, agenda = self._world, self.agenda
        worker.left_at = now = agenda.now
        num_bytes = 0
        if reply.has_weights:
            num_bytes = world.sizes.start if reply.is_start else world.sizes.down
        worker.num_received += num_bytes if world.framing is None else world.framing.down(reply)
        if num_bytes and self._is_down_shared:
            agenda.down.begin(now, (worker, worker.life, self._delivered, reply), num_bytes, world.down)
        else:
            at = now + num_bytes / world.down + agenda.trip_s
            agenda.push_behind(agenda.trips, at, self._delivered, worker, reply)
