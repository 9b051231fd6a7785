"""The sink for the dashboard of a run (`paramserver/web`), and the controls that the dashboard sends to the run.

The dashboard runs on its own thread. Its packages are an extra, and are loaded only with `server.web`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count
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

_CONTROL_S = 10.0  # time limit for every shard to carry out a control


class DashboardSink(Sink):
    """Shows the run on the dashboard. Raises UsageError if the dashboard's packages are not installed."""

    name = "dashboard"
    kinds = (RunStarted, ControlTaken, TickTaken)

    def __init__(self, config: Config) -> None:
        try:
            from ...web.serve import Dashboard
        except ModuleNotFoundError as error:
            problem = f"the dashboard needs the package {error.name}, which is not installed"
            raise UsageError(problem, fix="pip install 'paramserver[web]'; or leave --web out") from None
        self._is_shown = config.log.format == "text"
        self._dashboard: Dashboard = Dashboard(config)
        self._about: About | None = None
        self._requests: dict[int, asyncio.Future[str]] = {}  # controls without an outcome, by number
        self._numbers = count(1)  # of controls

    def begin(self, engine: Engine) -> None:
        """Start the dashboard. Raises BindError for an unavailable address, and AuthError for an unsafe one."""
        super().begin(engine)
        self._loop = asyncio.get_running_loop()
        self._dashboard.start()
        engine.dashboard = self._dashboard.address
        if self._is_shown:
            print(f"the dashboard: {self._dashboard.url}", file=sys.stderr)

    def take(self, at: float, fact: Fact) -> None:
        match fact:
            case TickTaken(tick):
                self._look_again()  # the first contribution says what runs
                self._dashboard.push(tick)
            case RunStarted():
                self._about = self._about_run(time.time())
                points = [reports.with_bytes(self._engine, point) for point in self._run.curve.points]
                evaluations = [EvaluatedPoint(**point.model_dump()) for point in points]
                self._dashboard.begin(View(about=self._about, evaluations=evaluations), self._control, fact.version)
            case ControlTaken():
                self._look_again()
                outcome = self._requests.get(fact.event.number)
                if outcome is not None and not outcome.done():
                    if fact.is_done:
                        outcome.set_result(fact.result)
                    else:
                        outcome.set_exception(ValueError(fact.result))

    def _look_again(self) -> None:
        if (before := self._about) is not None:
            self._about = self._about_run(before.started)
            if self._about != before:
                self._dashboard.retell(self._about)

    def close(self) -> None:
        self._dashboard.close()

    def _about_run(self, started: float) -> About:
        """Return a description of the run: mode, settings and controls. `started` is in Unix seconds."""
        run, ran = self._run, reports.ran(self._engine)
        options = type(run.policy).summary(run.policy.options)
        return About(
            label=f"{run.mode} ({options})" if options else run.mode, lr_scale=run.contributions.lr_scale,
            run=run.name, mode=run.mode, task=ran.work, started=started, settings=ran.settings,
            server_incarnation=run.incarnation, version=PROGRAM_VERSION, controls=controls.offered(run),
        )  # fmt: skip

    # ---- controls --------------------------------------------------------------------------

    async def _control(self, fields: dict[str, Any]) -> str:
        """On the dashboard's thread: carry out a control, and return the outcome as a sentence.

        Raises ValueError if the control was not carried out.
        """
        known = ("do", "rank", "name", "value")
        if unknown := [name for name in fields if name not in known]:
            raise ValueError(f"unknown field '{unknown[0][:40]}'; known: {', '.join(known)}")
        do, rank, name, value = fields.get("do"), fields.get("rank"), fields.get("name", ""), fields.get("value")
        if not isinstance(do, str) or not isinstance(name, str):
            raise ValueError("do and name are text")
        if rank is not None and type(rank) is not int:
            raise ValueError(f"rank is a whole number, got {rank!r:.40}")
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError("value is a number, text, true, false or null")
        request = asyncio.run_coroutine_threadsafe(self._request(Controlled(do, rank, name, value)), self._loop)
        return await asyncio.wrap_future(request)

    async def _request(self, event: Controlled) -> str:
        event.number = number = next(self._numbers)
        self._requests[number] = outcome = asyncio.get_running_loop().create_future()
        self._engine.offer(event)
        try:
            return await asyncio.wait_for(outcome, _CONTROL_S)
        except TimeoutError:
            raise ValueError(f"not every shard has received it within {_CONTROL_S:g} s; see the events") from None
        finally:
            del self._requests[number]
