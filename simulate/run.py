"""The run itself, `ps/core`, under a virtual clock: workers, links and the server's tensor work say when things happen.

    compute -> (a place among max_staged) -> upload -> Run.apply(Contributed) -> fold, step -> download -> compute

Everything that decides is the real run's: nothing here knows a mode, only what any worker knows of it (what it sends,
how many local steps, how often it fetches weights). The same world and configuration give the same events, and `digest`
says so.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..common.config.schema import Config
from ..common.errors import UsageError
from ..ps.core import effects, events
from ..ps.core.run import Run
from ..ps.engine.modes import make_policy, options_of
from .links import Link
from .world import Compute, Recorded, World

if TYPE_CHECKING:
    from .learning import Learner

TICK_S = 0.2  # as in a server
_MOST_IDLE_TICKS = 100_000
INLINE_BYTES = 64 << 10  # as in common/wire/frames.py: a smaller body needs no place among those staged
CAUSES = ("compute", "mode", "staging", "server", "its link", "own link")


@dataclass(eq=False, slots=True)
class Worker:
    """One rank. Versions are of weights that it holds, times virtual seconds."""

    rank: int
    compute: Compute
    incarnation: int = 0
    life: int = 0  # what was begun in an older one is of nobody
    counted: int = 0
    version: int = 0  # received last
    base: int = 0  # that it computes on
    told_steps: int = 0  # local steps of its contributions
    steps: int = 0  # in the one that is computed or on its way
    done_steps: int = 0  # as if all that it sent counted
    computed_s: float = 0.0
    is_computing: bool = False
    is_ready: bool = False  # computed, and the exchange before is not over
    is_in_flight: bool = False
    is_staged: bool = False
    is_finished: bool = False
    event: events.Contributed | None = None  # that it has sent
    sent_steps: int = 0  # in it
    sent_at: float = 0.0
    begun_at: float = 0.0  # the upload: it has a place
    decided_at: float = 0.0
    left_at: float = 0.0  # the answer, from the server
    transfer_s: float = 0.0  # of the last exchange
    num_sent: int = 0  # bytes of bodies
    num_received: int = 0


# A worker, in which of its lives, and the answer that it gets; None where it sends.
Transfers = Link[tuple[Worker, int, effects.Answer | None]]


class Simulation:
    """One run of one mode; `go`, then look at it. `tell` is told facts as a server's observers are; `clock` measures
    what the run's decisions cost; a `learner` trains."""

    def __init__(
        self,
        config: Config,
        world: World,
        clock: Callable[[], float] = lambda: 0.0,
        tell: Callable[[float, effects.Fact], None] | None = None,
        learner: Learner | None = None,
    ) -> None:
        self.config, self.world, self.now, self.learner = config, world, 0.0, learner
        policy = make_policy(config)
        plain = {"keeps_snapshots": False, "epochs": None, "stop_when": None, "patience": None}
        options = replace(options_of(config), max_workers=world.num_workers, **plain)  # type: ignore[arg-type]
        if policy.contribution == "report":
            told = f"mode {config.run.mode}: its workers average among themselves, and links between them are not told"
            raise UsageError(told, fix="take a mode whose workers exchange with the server")
        self.run = Run(options, policy, "simulated")
        self.policy = policy
        self.seconds = dict.fromkeys(CAUSES, 0.0)  # of all workers, by what they were spent on
        self.staleness: Counter[int] = Counter()  # of contributions that count
        self.num_steps = 0  # training steps in them
        self.decision_s: list[float] = []  # that each contribution cost the run
        self.num_failures = 0
        self.is_over = False
        self._clock, self._tell = clock, tell
        self._heap: list[tuple[float, int, Callable[..., None], Worker, int, Any]] = []
        self._num_pushed = 0
        self._up: Transfers = Link(world.server_up)
        self._down: Transfers = Link(world.server_down)
        self._busy_until = 0.0  # the server, with tensor work
        self._num_staged = self._num_folds = 0
        self._waiting: list[tuple[int, int, Worker, int]] = []  # for a place among those staged
        compute = Recorded if world.recorded else Compute
        self.workers = [Worker(rank, compute(world, rank)) for rank in range(world.num_workers)]
        self._chance = random.Random(world.seed + 0.25)
        self._hash = hashlib.sha256()
        self._lines: list[str] = []
        self._looks_at_time = any(
            name.endswith("_s") and value is not None for name, value in policy.options.model_dump().items()
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            effects.Fold: self._fold,
            effects.Discard: self._discard,
            effects.Commit: self._commit,
            effects.Answer: self._answer,
            effects.ContributionTaken: self._taken,
            effects.TellDone: self._done,
            effects.End: self._end,
            effects.Seated: self._seated,
            effects.NotSeated: self._end,
            effects.Refuse: self._refused,
        }

    @property
    def digest(self) -> str:
        """Of everything that happened, in order, with its time."""
        self._flush()
        return self._hash.hexdigest()[:16]

    def go(self) -> None:
        """To the end. UsageError where it would never come."""
        self._start()
        self._go_on()
        if self.learner is not None:
            self.learner.measure(self.now, self.num_steps)

    def _go_on(self) -> None:
        never, num_idle = math.inf, 0
        tick_at = TICK_S if self._looks_at_time else never
        heap, up, down = self._heap, self._up, self._down
        while not self.is_over:
            at = heap[0][0] if heap else never
            link = up if up.next_end < down.next_end else down
            ends = link.next_end
            if at == never == ends:
                tick_at, num_idle = self.now + TICK_S, num_idle + 1
                if num_idle > _MOST_IDLE_TICKS:
                    why = self.policy.waiting_reason(self.now)
                    raise UsageError(f"nothing happens any more after {self.now:,.1f} s: {why or 'nobody is here'}")
            if tick_at <= at and tick_at <= ends:
                self.now, tick_at = tick_at, tick_at + TICK_S if self._looks_at_time else never
                self._happens(events.Ticked())
            elif ends <= at:
                self.now = ends
                self._transferred(link)
            else:
                self.now, _, handler, worker, life, told = heapq.heappop(heap)
                if worker.life == life:
                    handler(worker, told)

    # ---- how it begins, who fails ------------------------------------------------------------

    def _start(self) -> None:
        policy, run = self.policy, self.run
        if self._tell is not None:
            self._tell(
                0.0,
                effects.RunStarted(
                    run.name, run.incarnation, self.config.run.mode, 0, {}, self.world.num_workers,
                    policy.staleness_bound, None, (), policy.options.model_dump(mode="json"), asdict(policy.common),
                ),
            )  # fmt: skip
        for worker in self.workers:
            self._join(worker, None)
        if not run.has_weights:
            self._happens(events.Brought(0, self.workers[0].incarnation))

    def _join(self, worker: Worker, _: object) -> None:
        self._happens(events.Joined(worker.rank, worker.rank))
        self._happens(events.Offered(worker.rank, worker.incarnation, model="model", optimizer="optimizer"))
        if not math.isinf(self.world.mtbf_s):
            self._push(self.now + self._chance.expovariate(1 / self.world.mtbf_s), self._fail, worker)

    def _seated(self, seated: effects.Seated) -> None:
        self.workers[seated.rank].incarnation = seated.incarnation

    def _fail(self, worker: Worker, _: object) -> None:
        """The process dies, and another one takes its place."""
        if worker.is_finished:
            return
        self.num_failures += 1
        worker.life += 1
        worker.is_computing = worker.is_ready = worker.is_in_flight = False
        self._release(worker)
        self._happens(events.Disconnected(worker.rank, worker.incarnation))
        self._push(self.now + self.world.back_s, self._join, worker)

    # ---- a worker ----------------------------------------------------------------------------

    def _compute(self, worker: Worker, num_steps: int) -> None:
        worker.is_computing, worker.steps, worker.base = True, num_steps, worker.version
        worker.computed_s = worker.compute.take(num_steps)
        if self.learner is not None:
            self.learner.compute(worker.rank, num_steps, worker.done_steps)
        self._push(self.now + worker.computed_s, self._computed, worker)

    def _computed(self, worker: Worker, _: object) -> None:
        self.seconds["compute"] += worker.computed_s
        worker.is_computing = False
        if worker.is_in_flight:
            worker.is_ready = True
        else:
            self._hand_over(worker)

    def _hand_over(self, worker: Worker) -> None:
        """The contribution leaves; who is pipelined goes on with the next, unless it was the last."""
        is_mean = self.policy.contribution == "weights"  # stands on the average that it contains
        number = worker.counted + 1
        worker.event = events.Contributed(
            worker.rank, worker.incarnation, number, worker.version if is_mean else worker.base,
            num_samples=self.config.run.batch_size * worker.steps, wants_weights=number % self.policy.pull_every == 0,
            compute_s=worker.computed_s, transfer_s=worker.transfer_s,
        )  # fmt: skip
        if self.learner is not None:
            self.learner.send(worker.event)
        worker.sent_steps = worker.steps
        worker.is_ready, worker.is_in_flight, worker.sent_at = False, True, self.now
        worker.done_steps += worker.steps
        if self.world.up_bytes > INLINE_BYTES:
            self._num_pushed += 1
            place = self.policy.upload_position(worker.rank) + self._num_folds
            heapq.heappush(self._waiting, (place, self._num_pushed, worker, worker.life))
            self._look_again()
        else:
            self._upload(worker)
        if self.config.policy.pipelined and (left := self._steps_left(worker)) > 0:
            self._compute(worker, min(worker.told_steps, left))

    def _steps_left(self, worker: Worker) -> int:
        total = self.policy.training_steps
        return worker.told_steps if total is None else total - worker.done_steps

    def _delivered(self, worker: Worker, answer: effects.Answer) -> None:
        """The worker has its answer, and the weights in it."""
        worker.counted, worker.done_steps = answer.number, answer.training_steps
        worker.told_steps = answer.next_local_steps
        if answer.has_weights:
            worker.version = answer.version
        if self.learner is not None:
            self.learner.received(answer)
        if worker.is_in_flight:
            worker.is_in_flight = False
            self._account(worker, answer)
        if not answer.next_local_steps:
            worker.life += 1  # what it still computes is nobody's
            worker.is_finished = True
            self._happens(events.Finished(worker.rank, worker.incarnation, worker.transfer_s))
        elif worker.is_ready:
            self._hand_over(worker)
        elif not worker.is_computing:
            self._compute(worker, answer.next_local_steps)

    def _account(self, worker: Worker, answer: effects.Answer) -> None:
        """Where the time of this exchange went."""
        world, seconds = self.world, self.seconds
        worker.transfer_s = max(0.0, self.now - worker.sent_at - answer.held_s)
        own_s = world.up_bytes / world.up + world.latency_s
        if answer.has_weights:
            own_s += world.down_bytes / world.down
        server_s = worker.left_at - worker.decided_at
        seconds["mode"] += answer.held_s
        seconds["own link"] += own_s
        seconds["server"] += server_s
        seconds["staging"] += (staged_s := worker.begun_at - worker.sent_at)
        rest_s = max(0.0, worker.transfer_s - own_s - server_s - staged_s)
        seconds["own link" if world.recorded else "its link"] += rest_s

    # ---- what is on its way ------------------------------------------------------------------

    def _look_again(self) -> None:
        """As `ps/tensors/staging.py`: the next to be folded first, and nobody whose turn is too far away."""
        waiting, most = self._waiting, self.world.max_staged
        while waiting and self._num_staged < most:
            _, _, worker, life = waiting[0]
            if worker.life == life:
                if self.policy.upload_position(worker.rank) >= most:
                    return
                self._num_staged += 1
                worker.is_staged = True
                heapq.heappop(waiting)
                self._upload(worker)
            else:
                heapq.heappop(waiting)

    def _release(self, worker: Worker, _: object = None) -> None:
        if worker.is_staged:
            worker.is_staged = False
            self._num_staged -= 1
            self._look_again()

    def _upload(self, worker: Worker) -> None:
        worker.begun_at = self.now
        if self._up.is_free(self.world.up) or not self.world.up_bytes:
            self._uploaded(worker, worker.life)
        else:
            self._up.begin(self.now, (worker, worker.life, None), self.world.up_bytes, self.world.up)

    def _uploaded(self, worker: Worker, life: int) -> None:
        worker.num_sent += self.world.up_bytes
        if worker.life == life:
            self._push(self.now + self.world.latency_s / 2 + worker.compute.exchange_s(), self._arrived, worker)

    def _arrived(self, worker: Worker, _: object) -> None:
        """Its contribution is here, whole: the run decides."""
        assert worker.event is not None
        if self.learner is not None:
            self.learner.arrived(worker.event)
        self._happens(worker.event)

    def _leaves(self, worker: Worker, answer: effects.Answer) -> None:
        """What the answer waits for in the server is done."""
        worker.left_at = self.now
        num_bytes = self.world.start_bytes if answer.outcome == "START" else self.world.down_bytes
        if not answer.has_weights or not num_bytes or self._down.is_free(self.world.down):
            worker.num_received += num_bytes if answer.has_weights else 0
            self._push(self.now + self.world.latency_s / 2, self._delivered, worker, answer)
        else:
            self._down.begin(self.now, (worker, worker.life, answer), num_bytes, self.world.down)

    def _transferred(self, link: Transfers) -> None:
        worker, life, answer = link.end()
        if answer is None:
            self._uploaded(worker, life)
            return
        worker.num_received += self.world.start_bytes if answer.outcome == "START" else self.world.down_bytes
        if worker.life == life:
            self._push(self.now + self.world.latency_s / 2, self._delivered, worker, answer)

    # ---- what the run decides ----------------------------------------------------------------

    def _happens(self, event: events.Event) -> None:
        event.at = self.now
        begun_s = self._clock()
        found = self.run.apply(event)
        if isinstance(event, events.Contributed):
            self.decision_s.append(self._clock() - begun_s)
        for effect in found:
            if self.learner is not None:
                self.learner.carry_out(effect, self.now, self.num_steps)
            if self._tell is not None and isinstance(effect, effects.Fact):
                self._tell(self.now, effect)
            if (handler := self._handlers.get(type(effect))) is not None:
                handler(effect)
        if self._waiting:
            self._look_again()

    def _fold(self, fold: effects.Fold) -> None:
        self._num_folds += 1
        worker = self.workers[fold.identity.rank]
        self._busy_until = max(self._busy_until, self.now) + self.world.fold_s
        if worker.is_staged:
            self._push(self._busy_until, self._release, worker)

    def _discard(self, discard: effects.Discard) -> None:
        self._release(self.workers[discard.identity.rank])

    def _commit(self, commit: effects.Commit) -> None:
        self._busy_until = max(self._busy_until, self.now) + self.world.step_s
        self._note(f"v{commit.version}")

    def _answer(self, answer: effects.Answer) -> None:
        worker = self.workers[answer.rank]
        worker.decided_at = self.now
        if answer.outcome == "APPLIED":
            self.staleness[answer.staleness] += 1
        self._note(f"{answer.outcome} {answer.rank} {answer.number} v{answer.version}")
        self._push(max(self.now, self._busy_until), self._leaves, worker, answer)

    def _taken(self, taken: effects.ContributionTaken) -> None:
        rank, _, number = taken.identity
        if taken.outcome == "accepted":
            self.num_steps += self.workers[rank].sent_steps
        self._note(f"{taken.outcome} {rank} {number} on v{taken.base_version}")

    def _done(self, done: effects.TellDone) -> None:
        self.is_over = True

    def _end(self, end: effects.End | effects.NotSeated) -> None:
        self.is_over = True
        if end.error is not None:
            raise end.error

    def _refused(self, refused: effects.Refuse) -> None:
        if self.workers[refused.rank].incarnation == refused.incarnation:
            raise refused.error

    # ---- time, and what is written down of it -------------------------------------------------

    def _push(self, at: float, handler: Callable[..., None], worker: Worker, told: Any = None) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at, self._num_pushed, handler, worker, worker.life, told))

    def _note(self, what: str) -> None:
        self._lines.append(f"{self.now!r} {what}\n")
        if len(self._lines) > 4096:
            self._flush()

    def _flush(self) -> None:
        self._hash.update("".join(self._lines).encode())
        self._lines.clear()
