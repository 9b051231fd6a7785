"""Decides what the launcher does when something happens to its processes. Pure; time is the argument `now`.

    STARTING ──may train──> RUNNING ──every worker ended with 0──> ENDING ──servers ended─> OVER
      │  ^ │                 ^ │ │                                    │
      │  └─┴─── restarts ────┴─┘ │                                    │
      └──────────────────────────┴─ a final failure, an interrupt ────┴> DRAINING ──nothing left──> OVER

One process, while the job is STARTING or RUNNING:

    PLANNED ──> RUNNING ──ended with 0──> ENDED
                 ^   └──failed, and a restart may mend it──> WAITING ──the back-off is over──┐
                 └───────────────────────────────────────────────────────────────────────────┘

Events go in (`begin`, `listening`, `may_train`, `exited`, `abort`, `interrupt`, `tick`), decisions come out, each with
its reason as a sentence. The coordinator starts first. The other shards start when it listens. The workers start when
all shards listen and the caller has called `may_train`, and ps-serve with them. The end of ps-serve ends no job.

A failed process is started again if that may help (`restarts.py`): a worker as long as there is a server to join, a
server (each shard alike) only when it keeps snapshots to continue from, and a relay always: the server above keeps its
state. Any other failure is final. Its exit code becomes the launcher's, or 17 if the budget of restarts is spent. The
others are drained and, after the grace time, killed; processes that write results (the servers, or workers without one)
have ten times as long. Their exit codes are then ignored. No process starts once the job is ENDING or DRAINING, or the
coordinator has ended with 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ...common.reporting.summary import Summary
from ..plan.hosts import SERVE, SERVER, Child
from .restarts import BUDGET_SPENT, UNREACHABLE, USAGE, Failure, Raised, Restarts, can_mend, describe_exit, signal_name

# A server whose workers are done only writes its results. It is asked to end soon, because a script may exit without
# leaving, and killed late, because large weights take a while.
_SERVER_END_S = 2.0
_SERVER_WRITE_GRACES = 10  # times the grace time


class Phase(StrEnum):
    STARTING = "starting"  # without a server this phase is skipped
    RUNNING = "running"
    ENDING = "ending"  # all workers are done, the server writes its results
    DRAINING = "draining"
    OVER = "over"


class State(StrEnum):
    """One process. Only RUNNING and STOPPING ones exist."""

    PLANNED = "planned"
    RUNNING = "running"
    STOPPING = "stopping"  # asked to end
    WAITING = "waiting"  # for its restart
    ENDED = "ended"


@dataclass(frozen=True)
class _Step:
    child: Child
    reason: str


class Start(_Step):
    """Start the process."""


@dataclass(frozen=True)
class Restart(_Step):
    """A Start of the process follows in `in_s` seconds; nothing to do yet."""

    in_s: float
    number: int  # of this restart, from 1
    max_restarts: int


class Terminate(_Step):
    """Ask the process to end in good order (SIGTERM)."""


class Kill(_Step):
    """End the process and everything it started, now."""


@dataclass(frozen=True)
class Finish:
    """The job is over, and none of its processes is left."""

    exit_code: int
    reason: str
    culprit: Child | None = None  # whose failure ended it
    summary: Summary | None = None  # the results that the run has reported, added by the caller


Decision = Start | Restart | Terminate | Kill | Finish

_NEVER_JOINED = (
    "the script ended and never joined the run: it called no paramserver.connect(), or used nothing of the session; "
    "three lines make a script a worker (README)"
)
_IS_NO_GROUP = (
    "is not set: a worker of ps-launch is not a rank of a process group. Leave init_process_group and DDP out and "
    "change three lines (README), or start the script with torchrun"
)
_COMPLETE = Finish(0, "the server ended with exit code 0: the run is complete")


@dataclass(kw_only=True, eq=False)
class Supervisor:
    """The state of one job, with its processes, and the limits of its restarts and of its end.

    `deadline`: when `tick` has something to decide, None for never.
    """

    num_workers: int
    num_shards: int = 1  # server processes; 0: workers without a server
    # Of servers that serve a part of the workers each and keep no state (relays); server 0 is then above them.
    workers_of: Mapping[Child, range] = field(default_factory=dict)
    has_serve: bool = False  # ps-serve runs beside the job
    is_script: bool = False  # workers run the user's script
    keeps_snapshots: bool = False
    grace_s: float = 10.0  # from the request to end until a process is killed
    max_restarts: int = 3  # of each process
    backoff_s: float = 0.5  # before a first restart

    def __post_init__(self) -> None:
        self.phase = Phase.STARTING
        self._workers = [Child("worker", rank) for rank in range(self.num_workers)]
        self._servers = [*(Child("server", shard) for shard in range(self.num_shards)), *self.workers_of]
        self._listening: set[Child] = set()  # servers that have listened
        self._serve = [SERVE] if self.has_serve else []
        self._states = dict.fromkeys([*self._servers, *self._workers, *self._serve], State.PLANNED)
        self._restarts = Restarts(self.max_restarts, self.backoff_s)
        self._pending: dict[Child, tuple[float, Finish]] = {}  # when it restarts, and the job's end if it never does
        self._evicted: set[Child] = set()
        self._has_joined = False  # any worker, ever
        self._is_out: dict[Child, Finish] = {}  # failed and not admitted again, with the job's end if that stays so
        self._patience: float | None = None  # when processes that should end are late
        self._write_until = 0.0  # when processes that write results are late
        self._outcome = Finish(0, "every process ended with exit code 0")

    @property
    def deadline(self) -> float | None:
        if self._patience is not None:
            return self._patience
        return min((due for due, _ in self._pending.values()), default=None)

    def begin(self, now: float) -> list[Decision]:
        """Start the first processes."""
        if SERVER in self._states:
            return [self._start(SERVER, "the workers need its address", now)]
        self.phase = Phase.RUNNING
        return [self._start(child, "there is no server to wait for", now) for child in self._workers]

    def listening(self, child: Child, now: float) -> list[Decision]:
        """A server listens on its address, for the first time or again."""
        self._listening.add(child)
        self._is_out.pop(child, None)
        if self.phase is not Phase.STARTING or child != SERVER:
            return []
        missing = [shard for shard in self._servers if self._states[shard] is State.PLANNED]
        return [self._start(shard, "the coordinator is listening", now) for shard in missing]

    @property
    def is_ending(self) -> bool:
        return self.phase not in (Phase.STARTING, Phase.RUNNING)

    @property
    def all_listen(self) -> bool:
        """Whether every server has listened, and only `may_train` is missing."""
        return self.phase is Phase.STARTING and self._listening.issuperset(self._servers)

    def may_train(self, now: float) -> list[Decision]:
        """Every server can be reached: start the workers."""
        if not self.all_listen:
            return []
        self.phase = Phase.RUNNING
        servers = "every relay is" if self.workers_of else "every shard of the server is"
        subject = "the server is" if len(self._servers) == 1 else servers
        return [self._start(child, f"{subject} listening", now) for child in (*self._workers, *self._serve)]

    def admitted(self, worker: Child) -> None:
        """The server has admitted a worker: its earlier failure is over."""
        self._has_joined = True
        self._is_out.pop(worker, None)

    def evicted(self, worker: Child) -> None:
        """Somebody has evicted a worker: its end is no failure, and it is not started again."""
        self._evicted.add(worker)

    def already_done(self, reason: str, now: float) -> list[Decision]:
        """The server has resumed a snapshot of the run's end: only its results are needed."""
        if self.is_ending:
            return []
        self._states |= {worker: State.ENDED for worker in self._workers if self._states[worker] is State.PLANNED}
        self.phase, self._patience = Phase.ENDING, now + _SERVER_WRITE_GRACES * self.grace_s
        self._outcome, self._has_joined = Finish(0, reason), True
        self._pending.pop(SERVE, None)
        return list(self._ask_to_end([*self._states], reason))

    def abort(self, exit_code: int, reason: str, now: float) -> list[Decision]:
        """End the job for a reason that is no process's failure."""
        return [] if self.phase is Phase.DRAINING else self._drain(Finish(exit_code, reason), now)

    def run_failed(self, culprit: Child, exit_code: int, reason: str, now: float) -> list[Decision]:
        """A worker has failed after the last training step: all end by themselves, and their exit codes are ignored."""
        if self.phase is Phase.DRAINING:
            return []
        self._give_up_restarts()
        self._outcome = Finish(exit_code, reason, culprit)
        self.phase, self._patience = Phase.DRAINING, now + _SERVER_WRITE_GRACES * self.grace_s
        return self._finish_when_empty()

    def exited(self, child: Child, code: int, now: float, raised: Raised | None = None) -> list[Decision]:
        """A process has ended. `code`: negative for a signal; `raised`: the exception in its output."""
        was, self._states[child] = self._states[child], State.ENDED
        if self.phase is Phase.DRAINING:
            return self._finish_when_empty()
        if child == SERVE:
            return self._serve_ended(code, now)
        if was is State.STOPPING and (code in (0, 143, -15) or child in self.workers_of):
            code = 0  # asked to end after its workers, and it did
        if child in self._evicted:
            code = 0
        was_late = child in self._servers or self._restarts.num_restarts[child] > 0
        if code == UNREACHABLE and child != SERVER and self._states.get(SERVER) is State.ENDED and was_late:
            code = 0  # it came back too late, and the others finished
            self._outcome = self._outcome if self._outcome.exit_code else _COMPLETE
        if code != 0:
            return self._failed(child, code, now, raised=raised)
        if child in self._servers and child not in self._listening and was is not State.STOPPING:
            return self._failed(child, 1, now, "exit code 0 before it was listening")
        self._restarts.ended_well(child)
        ending = self._complete() if child == SERVER and self._is_out else []
        if all(self._states[worker] is State.ENDED for worker in self._workers):
            shards = [server for server in self._servers if server not in self.workers_of]
            down = next((server for server in shards if server in self._pending), None)
            if down is not None:  # it would have no worker to serve
                return self._drain(self._pending[down][1], now)
            self._give_up_restarts()
            self.phase, self._patience = Phase.ENDING, now + _SERVER_END_S
        return [*ending, *self._finish_when_empty()]

    def _serve_ended(self, code: int, now: float) -> list[Decision]:
        """Start ps-serve again if that may help. The job goes on in any case."""
        failure = Failure(SERVE, describe_exit(code))
        self._restarts.failed(failure, now)
        may_restart = self.phase is Phase.RUNNING and can_mend(SERVE, code, has_listened=False)
        in_s = self._restarts.next(SERVE) if may_restart else None
        if in_s is None:
            return self._finish_when_empty()
        return [self._restart(failure, in_s, _COMPLETE, now)]

    def interrupt(self, signal_number: int, now: float) -> list[Decision]:
        """The launcher got SIGINT, SIGTERM or the like: the first one drains, the next one kills."""
        name = signal_name(signal_number)
        if self.phase is Phase.DRAINING:
            self._patience = None
            return [Kill(child, f"{name} while ending") for child in self._alive()]
        return self._drain(Finish(128 + signal_number, f"interrupted by {name}"), now, f"{name}: the job ends")

    def tick(self, now: float) -> list[Decision]:
        """Time has passed; does nothing before `deadline`."""
        decisions: list[Decision] = []
        for child, (due, _) in list(self._pending.items()):
            if now >= due:
                del self._pending[child]
                number = self._restarts.num_restarts[child]
                decisions.append(self._start(child, f"restart {number} of {self.max_restarts}", now))
        if self._patience is None or now < self._patience:
            return decisions
        self._patience, after_s = None, self.grace_s
        write_s = _SERVER_WRITE_GRACES * self.grace_s
        if self.phase is Phase.ENDING:
            if ending := self._ask_to_end(self._servers, "every worker is done"):
                self._patience = now + write_s
                return [*ending]
            late = self._alive()
            reason = f"the {late[0]} did not end within {write_s:g} s"
            self.phase, self._outcome = Phase.DRAINING, Finish(1, reason, late[0])
            return [Kill(child, reason) for child in late]
        writers = self._servers or self._workers
        if now < self._write_until:
            self._patience = self._write_until
        else:
            writers, after_s = [], write_s
        return [Kill(child, f"still there after {after_s:g} s") for child in self._alive() if child not in writers]

    def _complete(self) -> list[Decision]:
        """The run is complete without the failed workers. The job still ends with their exit code, unless it was a kill
        or a lost connection."""
        failures = [end for end in self._is_out.values() if end.exit_code < 128 and end.exit_code != UNREACHABLE]
        is_missing = any(self._states[child] is not State.ENDED for child in self._is_out)
        self._outcome = (*failures, _COMPLETE if is_missing else self._outcome)[0]
        self._give_up_restarts()
        lost = [server for server in self.workers_of if server in self._is_out]
        killed = [Kill(server, _COMPLETE.reason) for server in lost if self._states[server] is State.RUNNING]
        self._states |= {kill.child: State.STOPPING for kill in killed}  # it writes nothing
        theirs = [Child("worker", rank) for server in lost for rank in self.workers_of[server]]
        return [*killed, *self._ask_to_end([*self._is_out, *theirs], _COMPLETE.reason)]

    def _failed(
        self, child: Child, code: int, now: float, how: str = "", raised: Raised | None = None
    ) -> list[Decision]:
        """Restart the process after a back-off, or end the job."""
        is_script = self.is_script and child.role == "worker"
        failure = Failure(child, how or str(raised or describe_exit(code, is_script=is_script)))
        is_again = self._restarts.failed(failure, now, raised)
        exit_code = code if code >= 0 else 128 - code  # of a death by signal, as in a shell
        final = self._final(exit_code, failure)
        there_is_a_server = child == SERVER or self._states.get(SERVER) in (State.RUNNING, State.WAITING)
        may_restart = there_is_a_server and can_mend(
            child, code, has_listened=child in self._listening, keeps_workers=child in self.workers_of
        )
        if how or self.is_ending or not self.max_restarts or not may_restart:  # a budget of 0: no restarts are wanted
            return self._drain(final, now)
        if is_script and raised is not None and raised.variable:
            return self._drain(Finish(code, f"{failure}; {raised.variable} {_IS_NO_GROUP}", child), now)
        if is_again:
            same = "; the same had ended it before it was started again"
            return self._drain(self._final(exit_code, failure, same), now)
        if raised is not None and raised.is_mistake:
            others = [worker for worker in self._workers if worker != child]
            failed_too = [other in self._is_out and self._restarts.ended_by(other, raised) for other in others]
            if others and all(failed_too):  # and none of them has been admitted again
                return self._drain(Finish(code, f"every worker failed: {raised}", child), now)
        if child in self._servers and child not in self.workers_of and not self.keeps_snapshots:
            is_up = self.phase is Phase.RUNNING
            hint = "; with --checkpoint-dir DIR it would have been started again" if is_up else ""
            return self._drain(self._final(exit_code, failure, hint), now)
        in_s = self._restarts.next(child)
        if in_s is None:
            times = "once" if self.max_restarts == 1 else f"{self.max_restarts} times"
            spent = f"; it had been started again {times}, as often as launch.max_restarts allows"
            return self._drain(self._final(BUDGET_SPENT, failure, spent), now)
        if child != SERVER:
            self._is_out[child] = final
        return [self._restart(failure, in_s, final, now)]

    def _restart(self, failure: Failure, in_s: float, otherwise: Finish, now: float) -> Restart:
        """Start the process again later. `otherwise`: the job's end if that never happens."""
        child, number = failure.child, self._restarts.num_restarts[failure.child]
        self._states[child] = State.WAITING
        self._pending[child] = now + in_s, otherwise
        reason = f"{failure}; started again in {in_s:g} s (restart {number} of {self.max_restarts})"
        return Restart(child, reason, in_s, number, self.max_restarts)

    def _final(self, exit_code: int, failure: Failure, more: str = "") -> Finish:
        """Returns the end of the job by this failure; it names the job's first failure too."""
        first = self._restarts.first
        if first.child != failure.child:
            more += f"; the first to fail was {first.child}: {first.how}"
        return Finish(exit_code, f"{failure}{more}", failure.child)

    def _drain(self, outcome: Finish, now: float, reason: str = "") -> list[Decision]:
        """End the job with `outcome`. `reason`: the sentence for running processes, if it differs."""
        self._give_up_restarts()
        self._outcome = outcome
        self.phase, self._patience = Phase.DRAINING, now + self.grace_s
        self._write_until = now + _SERVER_WRITE_GRACES * self.grace_s
        ending = self._ask_to_end([*self._states], reason or outcome.reason)
        return [*ending, *self._finish_when_empty()]

    def _ask_to_end(self, children: list[Child], reason: str) -> list[Terminate]:
        running = [child for child in children if self._states[child] is State.RUNNING]
        self._states |= dict.fromkeys(running, State.STOPPING)
        return [Terminate(child, reason) for child in running]

    def _give_up_restarts(self) -> None:
        for child in self._pending:
            self._states[child] = State.ENDED
        self._pending.clear()

    def _finish_when_empty(self) -> list[Decision]:
        """Finish once no process runs and none will start. ps-serve is ended last: it writes nothing."""
        alive = self._alive()
        if not self.is_ending or (alive and alive != [SERVE]):
            return []
        self._patience = None
        if alive:
            return [Kill(SERVE, self._outcome.reason)]
        self.phase = Phase.OVER
        if self._outcome.exit_code == 0 and self.is_script and self._servers and not self._has_joined:
            return [Finish(USAGE, _NEVER_JOINED, self._workers[0])]  # known now: the server's lines have all come
        return [self._outcome]

    def _start(self, child: Child, reason: str, now: float) -> Start:
        self._states[child] = State.RUNNING
        self._restarts.started(child, now)
        return Start(child, reason)

    def _alive(self) -> list[Child]:
        return [child for child, state in self._states.items() if state in (State.RUNNING, State.STOPPING)]
