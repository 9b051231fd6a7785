"""Measures the cost of decisions: the run and a mode's policy, without network, tensors or observers.

Workers join, contribute in turns, and finish; only `Run.apply` is timed, not the making of events. Means over all
events of a kind: where a round closes, one event replies everybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

from ....common.wire.records import Base, Contribution, ContributionId
from ....ps.core import effects, events
from ....ps.core.run import Run
from ....ps.core.state import Options
from ....ps.engine.modes import policy_of
from ...output.report import Report
from ...output.tables import number_table, page

_NUM_TICKS = 20


@dataclass(frozen=True)
class PolicyOptions:
    modes: list[str]
    workers: list[int]
    contributions: int  # at least, of all workers together


class Alone:
    """A run of one mode whose workers are played here. `settings`: of the policy and of the run."""

    def __init__(self, mode: str, num_workers: int, **settings: object) -> None:
        arguments = {"training_steps": None, "max_workers": num_workers, "mode": mode, **settings}
        known = {name: arguments[name] for name in Options.__dataclass_fields__ if name in arguments}
        self.run = Run(Options(**known), policy_of(mode, arguments), "run")  # type: ignore[arg-type]
        self.num_workers = num_workers
        self.now = 0.0
        self.versions: dict[int, int] = {}  # of the weights that each worker was given last
        self.numbers = dict.fromkeys(range(num_workers), 0)  # of its newest contribution
        self.incarnations = dict.fromkeys(range(num_workers), 0)

    def play(self, found_events: Iterable[events.Event]) -> list[float]:
        """Returns the seconds in `apply` of each event."""
        clock, spent = time.thread_time, []  # of this thread: the machine may be busy
        for event in found_events:
            self.now += 1e-6
            event.at = self.now
            begun = clock()
            found = self.run.apply(event)
            spent.append(clock() - begun)
            for effect in found:
                if isinstance(effect, effects.SendReply):
                    self.versions[effect.rank] = effect.reply.result.version
        return spent

    def joining(self, rank: int) -> list[events.Event]:
        """Returns the events of a new process of this rank, until its admission."""
        self.incarnations[rank] += 1
        incarnation = self.incarnations[rank]
        process = f"process {rank}.{incarnation}"
        asked: list[events.Event] = [events.Joined(rank, rank, process=process), events.HeartbeatBegan(process)]
        asked += [events.Heartbeat(rank, process), events.Offered(rank, incarnation, "model", "sgd")]
        return asked if self.run.has_weights else [*asked, events.Brought(rank, incarnation)]

    def left(self, rank: int) -> events.Event:
        return events.Left(rank, self.incarnations[rank], "goodbye")

    def join(self) -> list[float]:
        """Admit all workers, the first with the weights."""
        return [sum(self.play(self.joining(rank))) for rank in range(self.num_workers)]

    def contribute(self, rank: int) -> float:
        self.numbers[rank] += 1
        id = ContributionId(rank, self.incarnations[rank], self.numbers[rank])
        (spent,) = self.play([events.Contributed(Contribution(id, base=Base(self.versions[rank])))])
        return spent

    def round(self) -> list[float]:
        """Let each worker contribute once."""
        return [self.contribute(rank) for rank in range(self.num_workers)]

    def tick(self) -> list[float]:
        return self.play(events.Ticked() for _ in range(_NUM_TICKS))

    def finish(self) -> list[float]:
        return self.play(events.Finished(rank, self.incarnations[rank]) for rank in range(self.num_workers))


def measure_policies(options: PolicyOptions) -> Report:
    """Measure the mean cost of each kind of event, by mode and number of workers."""
    results = {
        mode: {str(workers): _measure(mode, workers, options.contributions) for workers in options.workers}
        for mode in options.modes
    }
    rows = [
        [f"{mode}, {int(workers):,}", *(f"{us:,.1f}" for us in item.values())]
        for mode, found in results.items()
        for workers, item in found.items()
    ]
    columns = ["mode, workers", "a join", "contribution", "tick", "finish"]
    title = "microseconds an event, run and policy alone"
    return Report("policies", vars(options), results, page(title, number_table(columns, rows)))


def _measure(mode: str, num_workers: int, contributions: int) -> dict[str, float]:
    """Returns microseconds per event, by kind."""
    alone = Alone(mode, num_workers)
    joins = alone.join()
    alone.round()
    rounds = [us for _ in range(-(-contributions // num_workers)) for us in alone.round()]
    kinds = {"join": joins, "contribution": rounds, "tick": alone.tick(), "finish": alone.finish()}
    return {name: mean(seconds) * 1e6 for name, seconds in kinds.items()}
