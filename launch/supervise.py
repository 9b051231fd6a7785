"""What the launcher does when something happens to its processes. Pure; time comes in as `now`.

    STARTING ──listening──> RUNNING ──every worker ended with 0──> ENDING ──server ended──> OVER
        │                      │                                      │
        └──────────────────────┴── a failure or an interrupt ──> DRAINING ──nothing left──> OVER

Events go in (`begin`, `listening`, `exited`, `interrupt`, `tick`), decisions come out, each with
its reason as a sentence. The first process that fails is the root cause: its exit code becomes
the launcher's, the others are drained and, after the grace time, killed. What they then exit
with says nothing new and is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .exits import describe_exit, shell_code, signal_name
from .plan import SERVER, Child

# A server whose workers are all done has nothing left to do but to write its results. It is told
# to end soon (a script may leave without a goodbye), and killed late: large weights take a while.
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
    STOPPING = "stopping"  # told to end
    ENDED = "ended"


@dataclass(frozen=True)
class Start:
    child: Child
    reason: str


@dataclass(frozen=True)
class Terminate:
    """Ask the process to end in good order (SIGTERM)."""

    child: Child
    reason: str


@dataclass(frozen=True)
class Kill:
    """End the process and everything it started, now."""

    child: Child
    reason: str


@dataclass(frozen=True)
class Finish:
    """The job is over and nothing of it is left."""

    exit_code: int
    reason: str
    culprit: Child | None = None  # whose failure it was
    culprit_code: int = 0  # its own exit code; negative for a signal


Decision = Start | Terminate | Kill | Finish


class Supervisor:
    """The state of one job. `deadline` is when `tick` has something to decide, None for never."""

    def __init__(
        self, *, num_workers: int, with_server: bool = True, grace_s: float = 10.0, is_script: bool = False
    ) -> None:
        self.phase = Phase.STARTING
        self.deadline: float | None = None
        self._grace_s = grace_s
        self._is_script = is_script
        self._workers = [Child("worker", rank) for rank in range(num_workers)]
        children = [SERVER, *self._workers] if with_server else self._workers
        self._states = dict.fromkeys(children, State.PLANNED)
        self._outcome = Finish(0, "every process ended with exit code 0")

    def begin(self) -> list[Decision]:
        """The first processes to start."""
        if SERVER in self._states:
            return [self._start(SERVER, "the workers need its address")]
        self.phase = Phase.RUNNING
        return [self._start(child, "there is no server to wait for") for child in self._workers]

    def listening(self) -> list[Decision]:
        """The server answers on its address."""
        if self.phase is not Phase.STARTING:
            return []
        self.phase = Phase.RUNNING
        return [self._start(child, "the server is listening") for child in self._workers]

    def exited(self, child: Child, code: int, now: float) -> list[Decision]:
        """A process has ended; `code` is negative for a signal."""
        was, self._states[child] = self._states[child], State.ENDED
        if self.phase is Phase.DRAINING:
            return self._finish_when_empty()
        if was is State.STOPPING and code in (0, 143, -15):
            code = 0  # told to end after its workers, and it did
        if code != 0:
            return self._failed(child, code, now)
        if child == SERVER and self.phase is Phase.STARTING:
            return self._failed(child, 1, now, "ended before it was listening")
        if all(self._states[worker] is State.ENDED for worker in self._workers):
            self.phase, self.deadline = Phase.ENDING, now + _SERVER_END_S
        return self._finish_when_empty()

    def interrupt(self, signal_number: int, now: float) -> list[Decision]:
        """SIGINT, SIGTERM or the like reached the launcher: the first drains, the next one kills."""
        name = signal_name(signal_number)
        if self.phase is Phase.DRAINING:
            self.deadline = None
            return [Kill(child, f"{name} while ending") for child in self._alive()]
        self._outcome = Finish(128 + signal_number, f"interrupted by {name}")
        return self._drain(f"{name}: the job ends", now)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed; does nothing before `deadline`."""
        if self.deadline is None or now < self.deadline:
            return []
        self.deadline = None
        if self.phase is Phase.ENDING:
            return self._server_is_late(now)
        return [Kill(child, f"still there after {self._grace_s:g} s") for child in self._alive()]

    def _server_is_late(self, now: float) -> list[Decision]:
        patience_s = _SERVER_WRITE_GRACES * self._grace_s
        if self._states[SERVER] is State.RUNNING:
            self._states[SERVER] = State.STOPPING
            self.deadline = now + patience_s
            return [Terminate(SERVER, "every worker is done")]
        self.phase = Phase.DRAINING
        reason = f"the server was told to end and was still there after {patience_s:g} s"
        self._outcome = Finish(1, reason, SERVER, -9)
        return [Kill(SERVER, reason)]

    def _failed(self, child: Child, code: int, now: float, what: str = "") -> list[Decision]:
        # A restart with back-off belongs here: while the budget lasts, answer with a later Start
        # of this worker instead of the end of the job.
        is_script = self._is_script and child.role == "worker"
        what = what or f"failed: {describe_exit(code, is_script=is_script)}"
        self._outcome = Finish(shell_code(code), f"{child} {what}", child, code)
        return self._drain(f"{child} {what}", now)

    def _drain(self, reason: str, now: float) -> list[Decision]:
        self.phase, self.deadline = Phase.DRAINING, now + self._grace_s
        decisions: list[Decision] = []
        for child in self._alive():
            if self._states[child] is State.RUNNING:
                self._states[child] = State.STOPPING
                decisions.append(Terminate(child, reason))
        return decisions + self._finish_when_empty()

    def _finish_when_empty(self) -> list[Decision]:
        """Finish once nothing runs and nothing will."""
        if self._alive() or self.phase in (Phase.STARTING, Phase.RUNNING):
            return []
        self.phase, self.deadline = Phase.OVER, None
        return [self._outcome]

    def _start(self, child: Child, reason: str) -> Start:
        self._states[child] = State.RUNNING
        return Start(child, reason)

    def _alive(self) -> list[Child]:
        return [child for child, state in self._states.items() if state in (State.RUNNING, State.STOPPING)]
