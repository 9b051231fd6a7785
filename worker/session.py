"""What a worker knows about its place in the run, and when it tries again to reach the server. Pure.

    joining --welcomed--> joined --replied(START)--> computing --took_step--> exchanging
       ^                                                  ^                        |
       |                                                  +------- replied -------+
       +----------------------------- lost --------------------------------------- (any)

When the connection is lost with a contribution in flight, the welcome of the new join says how many
count. If the worker is still a member (`resumed`), it sends the contribution again, or, if that
counts already, only asks for its reply again. If it is not, because its lease ended or the server
went back to a snapshot, it begins on the weights, the number and the place in the data it is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.errors import UnreachableError
from ..common.wire.records import Position, RateInfo, Reply, StartInfo

# Back-off between attempts to reach the server: doubles from the first to the last.
_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 0.25


@dataclass
class Progress:
    """One worker's place in the run. `version` is that of the weights it holds."""

    run: str = ""
    process: str = ""  # random: tells its joins from those of another process
    rank: int | None = None
    incarnation: int = 0
    num_counted: int = 0  # contributions that count: the next one's number is one more
    version: int = 0
    steps_left: int = 0  # local steps before the next contribution
    local_steps: int = 0  # in the next contribution
    is_cut_short: bool = False  # it has fewer than the server expects
    num_workers: int = 1
    worker_index: int = 0
    training_steps: int = 0  # of this rank that count
    has_evaluator: bool = False  # a process that does not train evaluates
    total_steps: int | None = None  # of each worker in the run; None: its loop decides, or it is not known yet
    batches: int = 0  # of this rank's data that were behind it when it was told where to start
    in_step: int = 0  # contributions of the training step it begins with there that count already
    is_done: bool = False
    pull_every: int = 1
    server_incarnation: int = 0  # of the server whose weights it holds; 0: none that it could go on with
    num_starts: int = 0  # replies that told it where to start
    # Learning rates of this rank's contributions, by group, as the newest of these told them (Rates in the proto).
    first_rates: list[float] = field(default_factory=list)
    last_rates: list[float] = field(default_factory=list)
    num_rate_changes: int = 0
    # While the last contribution that counts is computed once more: training steps, local steps and end to go on from.
    after_replay: tuple[int, int, bool] | None = None

    def welcomed(self, run: str, rank: int, incarnation: int) -> None:
        """The server has seated this process."""
        self.run, self.rank, self.incarnation = run, rank, incarnation

    def replied(self, reply: Reply) -> None:
        """The server lets the worker go on. Without weights it still holds those of its old version."""
        work = reply.next_work
        self.num_counted = reply.result.seq
        if reply.has_new_weights:
            self.version = reply.result.version
        self.steps_left = self.local_steps = work.local_steps
        self.is_cut_short = False
        self.is_done = work.local_steps == 0
        self.after_replay = None
        self.total_steps = work.run_steps or self.total_steps
        self.has_evaluator = work.has_evaluator
        self.num_workers, self.worker_index = work.num_workers, work.worker_index
        self.training_steps = work.training_steps

    def started(self, reply: Reply) -> None:
        """The first reply of a stream, after `replied`: where this process begins."""
        start = reply.start or StartInfo()
        self.num_starts += 1
        self.batches = self.training_steps if start.num_batches is None else start.num_batches
        self.in_step = start.in_step
        rates = start.rates or RateInfo((), (), 0)
        self.first_rates, self.last_rates = list(rates.first), list(rates.last)
        self.num_rate_changes = rates.num_changes

    def cut_short(self) -> bool:
        """No more training steps are to come: the next contribution is of those that were taken. False when there are
        none."""
        if self.is_done or self.steps_left == self.local_steps:
            return False
        self.local_steps, self.steps_left, self.is_cut_short = self.local_steps - self.steps_left, 0, True
        return True

    def limit(self, total_steps: int) -> None:
        """The run has so many training steps, as has been found out while one is taken."""
        self.total_steps = total_steps
        beyond = self.steps_left - max(0, total_steps - self.position)
        if beyond > 0:
            self.steps_left, self.local_steps = self.steps_left - beyond, self.local_steps - beyond
            self.is_cut_short = True

    def took_step(self) -> bool:
        """A training step is done; True when it is time to contribute."""
        self.steps_left -= 1
        return self.steps_left <= 0

    def replay(self, position: Position) -> None:
        """Compute the last contribution that counts once more, from where it began; it is not sent."""
        self.after_replay = (self.training_steps, self.local_steps, self.is_done)
        self.training_steps, self.is_done = position.step, False
        self.local_steps = self.steps_left = position.local_steps

    def replayed(self) -> int:
        """Go on from where the server said; returns training steps that the run has taken meanwhile without it."""
        assert self.after_replay is not None
        replayed = self.training_steps + self.local_steps
        self.training_steps, self.local_steps, self.is_done = self.after_replay
        self.steps_left, self.after_replay = self.local_steps, None
        if self.total_steps is not None:
            self.limit(self.total_steps)
            self.is_done |= not self.local_steps
        return max(0, self.training_steps - replayed)

    @property
    def is_replaying(self) -> bool:
        return self.after_replay is not None

    @property
    def is_last(self) -> bool:
        """No other training step begins after this one."""
        return self.is_done if self.after_replay is None else self.after_replay[2]

    def become(self, other: Progress) -> None:
        """Take over everything another one says; whoever holds this one sees it."""
        vars(self).update(vars(other))

    def assume_counted(self, next_local_steps: int | None = None) -> bool:
        """A contribution is handed over and not replied: go on as if it counted. True when it is the last one.

        The next one covers `next_local_steps`, else as many local steps as this one; the last one may be shorter.
        """
        self.num_counted += 1
        self.training_steps += self.local_steps
        self.local_steps, self.is_cut_short = self.local_steps if next_local_steps is None else next_local_steps, False
        if self.total_steps is not None:
            self.local_steps = max(0, min(self.local_steps, self.total_steps - self.training_steps))
        self.steps_left = self.local_steps
        return self.steps_left == 0

    @property
    def position(self) -> int:
        """Training steps of this rank that are behind it: those that count and those of its next contribution."""
        return self.training_steps + self.local_steps - self.steps_left

    @property
    def next_number(self) -> int:
        """Of the next contribution."""
        return self.num_counted + 1

    @property
    def wants_weights(self) -> bool:
        """Whether the next contribution also fetches weights (policy.pull_every)."""
        return self.next_number % self.pull_every == 0


@dataclass
class Length:
    """What says how many training steps there are, where the run was given no number of them."""

    epochs: int | None = None  # of the run: the data set, which the workers know, divided among them
    default: int | None = None  # of a task
    own_epochs: int | None = None  # that the script's loop goes through the data by itself
    own_steps: int | None = None  # or the steps that it takes

    @property
    def is_open(self) -> bool:
        """The script's loop alone decides."""
        return self.epochs is None and self.default is None

    def of_run(self, epoch_batches: int, per_step: int) -> int | None:
        """Of the run, with so many batches of a rank in an epoch and in a step."""
        return self.default if self.epochs is None else max(1, self.epochs * epoch_batches // per_step)

    def of_loop(self, epoch_batches: int, per_step: int) -> int | None:
        """That the script's own loop takes; None where it has not said so."""
        return self.own_steps if self.own_epochs is None else self.own_epochs * epoch_batches // per_step


@dataclass
class Retry:
    """Attempts to reach a server: when to try again, and when to give up. Seconds, monotonic."""

    address: str
    give_up_s: float
    rank: int | None = None
    num_failures: int = 0  # since the server was reached last
    _since: float = 0.0  # when the first of them was

    def reached(self) -> None:
        """The server has replied: the next trouble starts afresh."""
        self.num_failures = 0

    def failed(self, now: float, cause: str) -> float:
        """An attempt failed: seconds until the next one. UnreachableError past the give-up time."""
        if self.num_failures == 0:
            self._since = now
        waited_s = now - self._since
        if waited_s >= self.give_up_s:
            raise UnreachableError(
                f"no server at {self.address} for {waited_s:.0f} s (worker.give_up_s is {self.give_up_s:g}): {cause}",
                fix="start it (ps-server --listen HOST:PORT), or give the right address (--server HOST:PORT)",
            )
        delay_s = min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** min(self.num_failures, 10))
        self.num_failures += 1
        # Workers that lost one server together come back one after another: ranks are spread evenly.
        spread = ((self.rank or 0) * 0.618034) % 1.0
        return min(delay_s * (0.5 + spread), max(0.0, self._since + self.give_up_s - now))
