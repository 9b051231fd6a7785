"""The end of a region whose model is large, so that tensor work takes its time on a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import torch

from paramserver.common.config.schema import Config
from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import Contribution, Outcome
from paramserver.ps.core.effects import Commit
from paramserver.ps.engine.engine import Engine
from paramserver.ps.tensors.replies import Publication
from paramserver.relay.region import Link, Region, RegionContribution
from paramserver.worker.training.readings import Readings


class LaterTensors:
    """A tensor thread that has done nothing yet. `done` has what the loop calls after the work."""

    is_paused = False

    def __init__(self) -> None:
        self.done: list[Callable[[Any], object]] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], object] = lambda _: None, **_: Any) -> None:
        self.done.append(done)


class JobsOfLink:
    """The link, with the results of the jobs that were asked of it."""

    settings = SimpleNamespace(kind=ContributionKind.WEIGHTS)
    progress = SimpleNamespace(local_steps=4, is_done=False, num_workers=2, worker_index=0)
    joins_as, has_model, readings = {"num_workers": 1}, True, Readings()
    send = staticmethod(print)
    finish = staticmethod(print)

    def __init__(self) -> None:
        self.jobs: list[Future[Any]] = []
        self.thread = self

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        self.jobs.append(Future())
        return self.jobs[-1]


def region_of(link: JobsOfLink, tensors: LaterTensors) -> Region:
    """A region whose only worker has taken all 4 steps."""
    policy = SimpleNamespace(version=4, min_steps_done=4, rows={}, has_newest_weights=True, members=())
    roster = SimpleNamespace(num_finished=1, workers={0: SimpleNamespace(stays=False)}, stats={})
    options = SimpleNamespace(num_workers=1)
    run = SimpleNamespace(
        policy=policy, roster=roster, options=options, is_closed=False, ended_by="", saved=lambda at: {}
    )
    loop = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=lambda call, *arguments: call(*arguments))
    engine = SimpleNamespace(
        run=run, model=SimpleNamespace(staging=SimpleNamespace(reclaim=len)), tensors=tensors, traffic={},
        finished=SimpleNamespace(get_loop=lambda: loop), now=lambda: 0.0, complete=lambda saved: (saved, {}),
        offer=lambda event: None, end_with=print, broke=print,
    )  # fmt: skip
    return Region(Config(upstream={"server": "h:1"}), cast(Engine, engine), cast(Link, link), lambda: None)


def test_a_region_finishes_once_while_its_last_reply_is_being_merged() -> None:
    """The run above would refuse a second Finish."""
    link, tensors = JobsOfLink(), LaterTensors()
    region = region_of(link, tensors)
    commit = Commit(4, (), (), None, 1.0, "", 1, 0.0, 4)
    region.commit(commit, list, cast(Publication, None), frozenset())
    tensors.done.pop()(([], RegionContribution(torch.zeros(0), Contribution(), b"")))  # the version's weights
    (sent,) = link.jobs
    sent.set_result(Outcome.APPLIED)
    region.take({}, lambda version: None, {})
    assert link.jobs == [sent], "the reply is not in the region's weights yet"
    for done in tensors.done:
        done(None)
    assert len(link.jobs) == 2
