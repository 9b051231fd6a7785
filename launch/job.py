"""Runs a plan: the backend starts processes, the supervisor decides, the screen shows.

Everything happens in callbacks on one event loop, and none of them blocks. `Job.run` waits for the supervisor's Finish.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.config.option import LAUNCHER
from ..common.errors import EXIT_BUG, EXIT_DRAINED, EXIT_INTERRUPTED, OutputError, ParamServerError
from ..common.reporting.curve import Point, add_trained
from ..common.reporting.summary import Status, Summary
from .backends.base import Backend, Site
from .hosts.connection import watched
from .plan.hosts import SERVE, SERVER, Child
from .plan.runs import Plan
from .supervise.restarts import Blame, Raised, describe_exit
from .supervise.supervisor import Decision, Finish, Kill, Restart, Start, Supervisor, Terminate
from .view import Event, JsonScreen, LiveScreen, Screen, Series, WorkerLogs, parse_event

_TICK_S = 0.1
_SIGNALLED = 128  # exit codes above it are signals'


class Job:
    """One run of one plan."""

    def __init__(
        self, plan: Plan, make_backend: Callable[..., Backend], site: Site, dashboard: str = "",
        series: Series = Series(), is_enough: Callable[[Status], bool] | None = None,
    ) -> None:  # fmt: skip
        """`dashboard`: the address of the previous run's dashboard, which browsers still have open.

        `series`: the position among several runs. `is_enough`: whether the run may end at this status.
        """
        log = plan.config.log
        # Children log each worker's normal life for programs. At this level people do not see it.
        self._shown_level = "debug" if (log.format, log.level) == ("json", "info") else log.level
        self._plan, self._make_backend, self._site = plan, make_backend, site
        self._series, self._is_enough = series, is_enough
        self._addresses: dict[Child, str] = {}  # where servers listen
        self._reached: dict[Child, str] = {}  # where others reach them
        self._checking: asyncio.Future[None] | None = None
        self._has_snapshot: set[Child] = set()  # servers that took one in this run
        self.interrupted_by = 0  # the last signal
        self.dashboard = dashboard
        self._is_cut_short = False  # by `is_enough`: its results do not matter
        self._trained: list[Point] = []
        self._blame, self._logs = Blame(), WorkerLogs()
        self._num_killed: Counter[Child] = Counter()  # of each worker's processes
        self._supervisor = Supervisor(
            num_workers=plan.num_workers,
            num_shards=plan.num_shards if plan.server is not None else 0,
            workers_of=plan.workers_of,
            has_serve=bool(plan.serves_at),
            is_script=plan.is_script,
            keeps_snapshots=plan.checkpoint_dir is not None,
            grace_s=plan.config.launch.grace_s,
            max_restarts=plan.config.launch.max_restarts,
            backoff_s=plan.config.launch.backoff_s,
        )
        self._screen: Screen
        self._backend: Backend
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Finish] = self._loop.create_future()

    async def run(self) -> Finish:
        """Start everything, and return when nothing of it is left."""
        self._loop.set_exception_handler(self._on_bug)
        config = self._plan.config
        kind = JsonScreen if config.log.format == "json" else LiveScreen if sys.stderr.isatty() else Screen
        self._screen = kind(self._plan.hosts(), self._on_output_lost, config.launch.status_interval_s, self._series)
        try:
            position = self._series.text()
            self._screen.note("starting", (f"{position}: " if position else "") + self._plan.headline())
            for event, text in self._plan.notes(self._site.hosts):
                self._screen.note(event, text)
            self._backend = self._make_backend(self._on_line, self._on_exit, self._site)
            try:
                if await self._is_prepared():
                    self._carry_out(self._supervisor.begin(self._now))
                    self._tick()
                finish = await self._finished
            finally:
                if self._checking is not None:
                    self._checking.cancel()
                await self._backend.close()
            finish = self._with_results(finish)
            if finish.culprit is not None:
                self._screen.failure(finish)
            elif finish.exit_code:
                command = shlex.join((LAUNCHER, *sys.argv[1:]))
                again = f"; to continue: {command}" if self._plan.checkpoint_dir is not None else ""
                self._screen.note("ended", f"{finish.reason}; every process has ended{again}", "warning")
        finally:
            self._screen.close()
        return finish

    def interrupt(self, number: int) -> None:
        """End the job because of a signal, or because nobody reads the output."""
        self.interrupted_by = number
        if not self._finished.done():
            self._carry_out(self._supervisor.interrupt(number, self._now))

    @property
    def _now(self) -> float:
        return self._loop.time()

    async def _is_prepared(self) -> bool:
        """Returns whether everything may start; False after an interrupt. Raises the backend's errors."""
        preparing = asyncio.ensure_future(self._backend.prepare(self._plan.processes()))
        both: set[asyncio.Future[Any]] = {preparing, self._finished}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if preparing.cancel():  # it was not done
            return False
        preparing.result()
        return not self._finished.done()

    def _tick(self) -> None:
        self._screen.tick()
        self._decide()
        if not self._finished.done():
            self._loop.call_later(_TICK_S, self._tick)

    def _decide(self) -> None:
        if not self._finished.done():
            self._carry_out(self._supervisor.tick(self._now))

    def _on_line(self, child: Child, line: str) -> None:
        event = parse_event(line)
        self._logs.add(child, line, event)
        if event is None:
            for shown in self._blame.read(child, line):
                self._screen.line(child, shown, None)
            return
        if event.name == "uncaught":
            self._blame.uncaught(child)
        else:
            self._blame.connected(child)
        if child == self._plan.reporter and (status := event.status) is not None:
            add_trained(self._trained, status)
            self._screen.status(line, status, self._now)
            if self._is_enough is not None and self._is_enough(status):
                self._is_enough, self._is_cut_short = None, True
                self._carry_out(self._supervisor.abort(0, "its metrics agree, or its time is over", self._now))
            return
        if event.is_at_least(self._shown_level) and not (child in self._plan.workers_of and event.name == "status"):
            self._screen.line(child, line, event)
        if child.role == SERVER.role:
            self._on_server_event(child, event)
        elif child == SERVE and event.name == "serve":
            self._screen.page(f"the page to type into: {event.get('url')}")

    def _with_results(self, finish: Finish) -> Finish:
        """Returns the end with the run's results. A run that went well and left none has failed."""
        reporter = self._plan.reporter
        data = self._backend.results.get(reporter, b"")
        if (summary := Summary.read(data)) is not None:
            own_mode = summary.label if self._plan.workers_of else ""  # that of the run above the regions
            changes = {"mode": self._plan.mode, "above": own_mode, "trained": self._trained}
            return replace(finish, summary=summary.model_copy(update=changes))
        if not finish.exit_code and not self._is_cut_short:
            left = f"only {len(data):,} bytes of its results, which are incomplete" if data else "no results of the run"
            reason = f"the {reporter} ended well and left {left}: there is no table, summary or report"
            return Finish(OutputError.exit_code, reason, reporter)
        return finish

    def _on_server_event(self, child: Child, event: Event) -> None:
        supervisor = self._supervisor
        match event.name:
            case "snapshot":
                self._has_snapshot.add(child)
            case "admitted":
                supervisor.admitted(self._plan.worker_of(child, event.get("rank")))
            case "evicted":
                supervisor.evicted(self._plan.worker_of(child, event.get("rank")))
            case "dashboard":
                self.dashboard = str(event.get("address"))
                self._screen.page(f"the dashboard: {event.get('url')}")
            case "already_done":
                weights, fix = event.get("weights"), event.get("fix")
                reason = f"the run is already done, all {event.get('steps')} steps: weights in {weights}; {fix}"
                self._carry_out(supervisor.already_done(reason, self._now))
            case "run_failed":
                code, reason = event.get("exit_code", EXIT_BUG), str(event.get("reason"))
                rank = event.get("rank", None)  # None: no worker failed
                culprit = child if rank is None else self._plan.worker_of(child, rank)
                self._carry_out(supervisor.run_failed(culprit, code, reason, self._now))
            case "listening":
                self._addresses[child] = str(event.get("address"))
                self._reached[child] = self._backend.reach(child, self._addresses[child])
                self._carry_out(supervisor.listening(child, self._now))
                if supervisor.all_listen and self._checking is None:
                    self._checking = watched(self._let_workers_start())

    async def _let_workers_start(self) -> None:
        workers, several = self._plan.workers(self._reached[SERVER]), self._plan.workers_of
        reached = [{server: self._reached[server]} for server in several] or [self._reached]
        try:
            for servers in reached:
                theirs = [spec for spec in workers if self._plan.server_of(spec.child) in servers]
                await self._backend.check_reach(servers, theirs)
        except ParamServerError as error:
            self._screen.note("unreachable", error.message, "error")
            reason = "; ".join(filter(None, [error.message.splitlines()[0], error.fix]))
            self._carry_out(self._supervisor.abort(error.exit_code, reason, self._now))
        else:
            self._carry_out(self._supervisor.may_train(self._now))

    def _on_exit(self, child: Child, code: int) -> None:
        for shown in self._blame.rest(child):
            self._screen.line(child, shown, None)
        if child == self._plan.reporter:
            self._screen.is_down(child)
        raised, script = self._blame.last.get(child) if code == EXIT_BUG else None, self._plan.config.launch.script
        if raised is not None and script is not None and (hint := _hidden_modules(script, raised)):
            raised = raised._replace(text=f"{raised.text}; {hint}")
        if code > _SIGNALLED and code not in (EXIT_INTERRUPTED, EXIT_DRAINED):
            self._num_killed[child] += 1
        decisions = self._supervisor.exited(child, code, self._now, raised)
        if child == SERVE and not decisions and not self._supervisor.is_ending:
            self._screen.note("serve_ended", f"{child} failed: {describe_exit(code)}; the run goes on", "warning")
        self._carry_out(decisions)

    def _on_output_lost(self) -> None:
        # Later, because a callback finds this out in the middle of its work.
        self._loop.call_soon(self.interrupt, signal.SIGPIPE)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the job with the exception of a callback, instead of waiting for ever."""
        if not self._finished.done():
            self._finished.set_exception(context.get("exception") or RuntimeError(context["message"]))

    def _carry_out(self, decisions: list[Decision]) -> None:
        """Do what was decided, with one note for all processes that end for the same reason."""
        for kind, event, verb in ((Terminate, "draining", "asked to end"), (Kill, "killing", "killed")):
            chosen = [found for found in decisions if isinstance(found, kind) and found.child != SERVE]
            if chosen:
                who = ", ".join(str(decision.child) for decision in chosen[:4])
                more = f" and {len(chosen) - 4} more" if len(chosen) > 4 else ""
                self._screen.note(event, f"{chosen[0].reason}; {verb}: {who}{more}", "warning")
        for decision in decisions:
            match decision:
                case Restart(child, reason, in_s, number, of):
                    self._screen.note(
                        "restarting", reason, "warning", role=child.role, rank=child.rank,
                        in_s=in_s, restart=number, of=of,
                    )  # fmt: skip
                case Start(child):
                    self._blame.started(child)
                    spec = self._plan.process(
                        child,
                        self._reached.get(self._plan.server_of(child)),
                        num_lost=self._num_killed[child],
                        listen=self._addresses.get(child, ""),
                        has_snapshot=child in self._has_snapshot,
                        dashboard=self.dashboard if child == SERVER else "",
                    )
                    self._backend.start(spec)
                case Terminate(child):
                    self._backend.terminate(child)
                case Kill(child):
                    self._backend.kill(child)
                case Finish():
                    self._finished.set_result(decision)
        deadline = self._supervisor.deadline
        if deadline is not None and deadline < self._now + _TICK_S:
            self._loop.call_at(deadline, self._decide)


async def run_all(
    plans: list[Plan], make_backend: Callable[..., Backend], site: Site,
    is_enough: Callable[[Plan], Callable[[Status], bool]] | None = None,
) -> list[Finish]:  # fmt: skip
    """Run the plans one after another, up to the first that does not end with 0.

    `is_enough(plan)` returns a function of the status that says whether the run may end.
    """
    loop = asyncio.get_running_loop()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signals.append(signal.SIGHUP)
    ends: list[Finish] = []
    took_s: list[float] = []
    dashboard = ""
    for number, plan in enumerate(plans, 1):
        series = Series(number, len(plans), tuple(took_s))
        job = Job(plan, make_backend, site, dashboard, series, is_enough and is_enough(plan))
        began = loop.time()
        for name in signals:
            loop.add_signal_handler(name, job.interrupt, name)
        end = await job.run()
        took_s.append(loop.time() - began)
        dashboard = job.dashboard
        if job.interrupted_by and not end.exit_code and number < len(plans):  # later runs do not start
            end = replace(end, exit_code=128 + job.interrupted_by, reason="interrupted while a run ended")
        ends.append(end)
        if end.exit_code:
            break
    return ends


def _hidden_modules(script: str, raised: Raised) -> str:
    """Returns a phrase that names files beside the script which Python has imported in place of a module."""
    if raised.kind[0] not in ("ImportError", "ModuleNotFoundError", "AttributeError"):
        return ""
    known = sys.stdlib_module_names | {"grpc", "numpy", "paramserver", "torch"}
    named = known.intersection(re.findall(r"'([\w.]+)'", raised.text))
    files = [str(path) for path in sorted(Path(script).absolute().parent.glob("*.py")) if path.stem in named]
    return f"{', '.join(files)} hides the module of that name: rename the file" if files else ""
