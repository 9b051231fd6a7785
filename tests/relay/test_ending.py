"""The end of a region whose model is large, so that tensor work takes its time on a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import torch

from paramserver.common.config.schema import Config
from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import Outcome
from paramserver.ps.engine.engine import Engine
from paramserver.relay.link import Link
from paramserver.relay.region import Region


class LaterTensors:
    """A tensor thread that has done nothing yet. `done` has what the loop is to call after the work."""

    is_paused = False

    def __init__(self) -> None:
        self.done: list[Callable[[Any], object]] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], object] = lambda _: None, **_: Any) -> None:
        self.done.append(done)


class JobsOfLink:
    """The link, with the jobs that were asked of it."""

    settings = SimpleNamespace(kind=ContributionKind.WEIGHTS)
    progress = SimpleNamespace(local_steps=4, is_done=False, num_workers=2, worker_index=0)
    num_workers, table, model = 1, None, "a model"

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        self.jobs.append(job)
        return Future()

    def finish(self, can_evaluate: bool) -> None:
        raise AssertionError("it is a job of the link's thread")


def test_a_region_finishes_once_when_its_last_reply_is_being_merged() -> None:
    """The run above would refuse a second Finish."""
    worker = SimpleNamespace(can_evaluate=False)
    roster = SimpleNamespace(num_finished=1, workers={0: worker})
    run = SimpleNamespace(
        policy=SimpleNamespace(version=4, min_steps_done=4), roster=roster, is_closed=False, ended_by=""
    )
    link, tensors = JobsOfLink(), LaterTensors()
    loop = SimpleNamespace(get_loop=lambda: None)
    engine = SimpleNamespace(run=run, model=None, tensors=tensors, offer=lambda event: None, finished=loop)
    region = Region(Config(upstream={"server": "h:1"}), cast(Engine, engine), cast(Link, link), lambda: None)
    region.pace.contribute(4)
    region._sent = torch.zeros(0)
    region._replied(Outcome.APPLIED)
    region.take({}, lambda version: None, {})
    assert not link.jobs, "the reply is not in the region's weights yet"
    for done in tensors.done:
        done(None)
    assert len(link.jobs) == 1
