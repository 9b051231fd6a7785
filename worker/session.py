"""A worker's progress in the run, and its attempts to reach the server again. Pure.

    joining --welcomed--> joined --replied(START)--> computing --took_step--> exchanging
       ^                                                  ^                        |
       |                                                  +------- replied -------+
       +----------------------------- lost --------------------------------------- (any)

If the connection is lost while a contribution is pending, the Welcome of the new join says how many contributions
count. A worker that is still a member (`resumed`) sends the contribution again. If that counts already, it only asks
for its reply again. A worker that is no longer a member starts from the weights, the sequence number and the position
that the server sends. This happens when its lease ended or the server went back to a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.errors import UnreachableError
from ..common.wire.records import NO_ROW, Outcome, Position, RateInfo, Reply, Row, StartInfo

NO_RATES = RateInfo((), (), 0)
# Back-off between attempts to reach the server; it doubles from the first value to the last.
_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 0.25


@dataclass
class Progress:
    """One worker's progress in the run. `version` is that of its weights."""

    run: str = ""
    process: str = ""  # random; distinguishes the joins of this process from those of others
    rank: int | None = None
    incarnation: int = 0
    row: Row = NO_ROW  # as the newest reply says; batches and part: as the newest START
    version: int = 0
    num_received: int = 0  # times that weights arrived; two arrivals of one version may differ (a lossy reply codec)
    steps_left: int = 0  # local steps before the next contribution
    local_steps: int = 0  # training steps in the next contribution
    num_workers: int = 1
    worker_index: int = 0
    is_asked: bool = False  # this worker evaluates, if the script does
    total_steps: int | None = None  # of each worker; None: its loop decides, or it is not known yet
    is_done: bool = False
    outcome: Outcome = Outcome.START  # of the newest reply
    pull_every: int = 1  # contributions from one with weights in its reply to the next (policy.pull_every)
    server_incarnation: int = 0  # of the server that sent the weights; 0: no server from which it could continue
    num_starts: int = 0  # replies that said where to start
    rates: RateInfo = NO_RATES  # learning rates of this rank's contributions, from the newest START
    # During a replay: training steps, local steps and `is_done` to restore afterwards.
    after_replay: tuple[int, int, bool] | None = None

    def welcomed(self, run: str, rank: int, incarnation: int) -> None:
        """The server has accepted this process."""
        self.run, self.rank, self.incarnation = run, rank, incarnation

    def received(self, version: int) -> None:
        """Weights of this version have arrived."""
        self.version, self.num_received = version, self.num_received + 1

    def replied(self, reply: Reply) -> None:
        """The server lets the worker continue. A reply without weights leaves the version as it is."""
        work = reply.next_work
        self.row = self.row._replace(seq=reply.result.seq, steps=work.training_steps)
        self.outcome = reply.result.outcome
        if reply.weights is not None or reply.group is not None:  # `Reply.has_new_weights`, without a call
            self.received(reply.result.version)
        self.steps_left = self.local_steps = work.local_steps
        self.is_done = work.local_steps == 0
        self.after_replay = None
        self.total_steps = work.run_steps or self.total_steps
        self.is_asked = work.is_asked
        self.num_workers, self.worker_index = work.num_workers, work.worker_index

    def started(self, reply: Reply) -> None:
        """The first reply of a stream, handled after `replied`: it says where this process starts."""
        start = reply.start or StartInfo()
        self.num_starts += 1
        self.row = self.row._replace(batches=start.num_batches, part=start.in_step)
        self.rates = start.rates or NO_RATES

    def cut_short(self) -> bool:
        """No training step follows: contribute the steps taken so far. Returns False if there are none."""
        if self.is_done or self.steps_left == self.local_steps:
            return False
        self.local_steps, self.steps_left = self.local_steps - self.steps_left, 0
        return True

    def limit(self, total_steps: int) -> None:
        """Limit the run to `total_steps`, which became known during a training step."""
        self.total_steps = total_steps
        beyond = self.steps_left - max(0, total_steps - self.position)
        if beyond > 0:
            self.steps_left, self.local_steps = self.steps_left - beyond, self.local_steps - beyond

    def took_step(self) -> bool:
        """Count a training step. Returns whether a contribution is due."""
        self.steps_left -= 1
        return self.steps_left <= 0

    def replay(self, position: Position) -> None:
        """Begin to compute the last counted contribution again, without sending it."""
        self.after_replay = (self.row.steps, self.local_steps, self.is_done)
        self.row, self.is_done = self.row._replace(steps=position.step), False
        self.local_steps = self.steps_left = position.local_steps

    def replayed(self) -> int:
        """End the replay. Returns the training steps that the run took meanwhile without this worker."""
        assert self.after_replay is not None
        replayed = self.row.steps + self.local_steps
        steps, self.local_steps, self.is_done = self.after_replay
        self.row = self.row._replace(steps=steps)
        self.steps_left, self.after_replay = self.local_steps, None
        if self.total_steps is not None:
            self.limit(self.total_steps)
            self.is_done |= not self.local_steps
        return max(0, steps - replayed)

    @property
    def is_replaying(self) -> bool:
        return self.after_replay is not None

    @property
    def is_last(self) -> bool:
        """Whether no other training step begins after this one."""
        return self.is_done if self.after_replay is None else self.after_replay[2]

    def become(self, other: Progress) -> None:
        """Copy all fields of another Progress into this object, which others refer to."""
        vars(self).update(vars(other))

    def assume_counted(self, next_local_steps: int | None = None) -> bool:
        """Continue as if a contribution without a reply counted. Returns whether it is the last one.

        The next contribution has `next_local_steps`, or as many local steps as this one. The last one may be shorter.
        """
        self.row = self.row._replace(seq=self.row.seq + 1, steps=self.row.steps + self.local_steps)
        self.local_steps = self.local_steps if next_local_steps is None else next_local_steps
        if self.total_steps is not None:
            self.local_steps = max(0, min(self.local_steps, self.total_steps - self.row.steps))
        self.steps_left = self.local_steps
        return self.steps_left == 0

    @property
    def position(self) -> int:
        """Training steps of this rank: those that count, and those of its next contribution."""
        return self.row.steps + self.local_steps - self.steps_left

    @property
    def next_number(self) -> int:
        """The sequence number of the next contribution."""
        return self.row.seq + 1


@dataclass
class Length:
    """The sources of a run's length, if the run has no number of steps."""

    epochs: int | None = None  # of the run: passes over the data, which is divided among the workers
    default: int | None = None  # steps of a task
    own_epochs: int | None = None  # passes over the data that the script's loop makes
    own_steps: int | None = None  # steps that the script's loop takes

    def of_run(self, epoch_batches: int, per_step: int, num_passes: int | None = 1) -> int | None:
        """Training steps of the run, with this many batches of a rank per epoch and per step.

        The last step of a loop, which has `num_passes` epochs, may have fewer batches.
        """
        if self.epochs is None:
            return self.default
        num_loops, rest = divmod(self.epochs, num_passes or self.epochs)
        each = epoch_batches * (num_passes or self.epochs)
        return num_loops * -(-each // per_step) - (-rest * epoch_batches // per_step)

    def of_loop(self, epoch_batches: int, per_step: int) -> int | None:
        """Training steps of the script's own loop; None: the script has not given them."""
        return self.own_steps if self.own_epochs is None else -(-self.own_epochs * epoch_batches // per_step)


@dataclass
class Retry:
    """Attempts to reach a server: when to try again, and when to give up. Times are monotonic seconds."""

    address: str
    give_up_s: float
    rank: int | None = None
    num_failures: int = 0  # since the newest success
    _since: float = 0.0  # when the first of them was

    def reached(self) -> None:
        """The server has replied, so the next failure is the first one again."""
        self.num_failures = 0

    def failed(self, now: float, cause: str) -> float:
        """An attempt failed. Returns the seconds until the next one. Raises UnreachableError after the give-up time."""
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
        # Spreads ranks evenly, so that workers that lost a server together do not return at the same moment.
        spread = ((self.rank or 0) * 0.618034) % 1.0
        return min(delay_s * (0.5 + spread), max(0.0, self._since + self.give_up_s - now))
