"""Feeds the dashboard of the run (`paramserver/web`) with ticks (`ticks.py`), and applies its controls.

The dashboard runs on a thread of its own. Its packages are an extra, imported only with `server.web`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.reporting.view import About, EvaluatedPoint, View
from ...common.version import PROGRAM_VERSION
from ..core import controls
from ..core.effects import ControlTaken, Fact, RunStarted
from ..core.events import Controlled
from ..engine.engine import Engine
from . import reports
from .bus import Sink
from .ticks import TickTaken

if TYPE_CHECKING:
    from ...web.serve import Dashboard

_CONTROL_S = 10.0  # within which every shard has done what was asked


class DashboardSink(Sink):
    """Feeds the dashboard of one server process. Raises UsageError where its packages are missing."""

    name = "dashboard"
    kinds = (RunStarted, ControlTaken, TickTaken)

    def __init__(self, config: Config) -> None:
        try:
            from ...web.serve import Dashboard
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the dashboard needs the package {error.name}, which is not installed",
                fix="pip install 'paramserver[web]'; or leave --web out",
            ) from None
        self._config = config
        self._dashboard: Dashboard = Dashboard(config)
        self._started: RunStarted | None = None
        self._began_at = 0.0  # Unix seconds
        self._told: About | None = None
        self._asked: dict[int, asyncio.Future[str]] = {}  # by number
        self._num_asked = 0

    def begin(self, engine: Engine) -> None:
        """Also listen. Raises BindError and AuthError."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._dashboard.start()
        engine.dashboard = self._dashboard.address
        if self._config.log.format == "text":
            print(f"the dashboard: {self._dashboard.url}", file=sys.stderr)
        if self._started is not None:
            self._show(self._started)

    def take(self, at: float, fact: Fact) -> None:
        match fact:
            case TickTaken(tick):
                self._dashboard.push(tick)
            case ControlTaken():
                if self._started is not None and (about := self._about(self._started)) != self._told:
                    self._told = about
                    self._dashboard.retell(about)
                self._controlled(fact)
            case RunStarted():
                self._began_at = time.time()
                self._started = fact  # of one process before `begin`, of several shards after it
                if self._dashboard.address:
                    self._show(fact)

    def close(self) -> None:
        self._dashboard.close()

    def _show(self, fact: RunStarted) -> None:
        self._told = about = self._about(fact)
        points = [reports.with_bytes(self._engine, point) for point in self._engine.run.curve.points]
        evaluations = [EvaluatedPoint(**point.model_dump()) for point in points]
        self._dashboard.begin(View(about=about, evaluations=evaluations), self._control, fact.version)

    def _about(self, fact: RunStarted) -> About:
        """With the mode and the settings of now, and what may be asked of it."""
        config, run = self._config, self._engine.run
        settings = config.model_dump(mode="json", exclude={"security"})
        settings["run"]["mode"] = run.mode
        settings["policy"] |= {name: value for name, (_, value) in run.changed.items()}
        options = type(run.policy).summary(run.policy.options)
        return About(
            label=f"{run.mode} ({options})" if options else run.mode, lr_scale=run.contributions.lr_scale,
            run=fact.run, mode=run.mode, task=config.task.name or "", started=self._began_at, settings=settings,
            server_incarnation=fact.server_incarnation, version=PROGRAM_VERSION, controls=controls.offered(run),
        )  # fmt: skip

    # ---- controls --------------------------------------------------------------------------

    async def _control(self, asked: dict[str, Any]) -> str:
        """Apply a control, in the dashboard's thread, and return its result. Raises ValueError."""
        event = read_control(asked)
        reply = asyncio.run_coroutine_threadsafe(self._ask(event), self._loop)
        return await asyncio.wrap_future(reply)

    async def _ask(self, event: Controlled) -> str:
        self._num_asked += 1
        event.number = number = self._num_asked
        self._asked[number] = told = asyncio.get_running_loop().create_future()
        self._engine.offer(event)
        try:
            return await asyncio.wait_for(told, _CONTROL_S)
        except TimeoutError:
            raise ValueError(f"not every shard has heard of it within {_CONTROL_S:g} s; see the events") from None
        finally:
            del self._asked[number]

    def _controlled(self, fact: ControlTaken) -> None:
        waiting = self._asked.get(fact.number)
        if waiting is not None and not waiting.done():
            if fact.is_done:
                waiting.set_result(fact.told)
            else:
                waiting.set_exception(ValueError(fact.told))


def read_control(asked: dict[str, Any]) -> Controlled:
    """ValueError for what cannot be meant."""
    known = ("do", "rank", "name", "value")
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"'{unknown[0][:40]}' means nothing here; known: {', '.join(known)}")
    do, rank, name, value = asked.get("do"), asked.get("rank"), asked.get("name", ""), asked.get("value")
    if not isinstance(do, str) or not isinstance(name, str):
        raise ValueError("do and name are text")
    if rank is not None and type(rank) is not int:
        raise ValueError(f"rank is a whole number, got {rank!r:.40}")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError("value is a number, text, true, false or null")
    return Controlled(do, rank, name, value)
