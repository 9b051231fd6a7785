"""The routes of the dashboard: the page for people, and the API for programs (`/api/openapi.json`)."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..common.config.schema import Config
from ..common.errors import ParamServerError
from ..common.reporting.comparison import IS_UP, compare
from ..common.reporting.log import get_logger
from ..common.reporting.metrics import Display, shown_of_run, shown_of_workers
from ..common.reporting.summary import About, Status, Tick, View
from ..common.reporting.worker_logs import last_lines
from ..common.runstore.reading import RunStore, StoredRun, relevant_settings
from ..common.runstore.schema import FILE
from ..common.version import PROGRAM_VERSION
from ..common.wire.json_text import finite, read_json
from .feed import Control, Feed, Message
from .files import static_routes
from .guard import Rules, refusal
from .http import HttpServer
from .openapi import Done, Health, Session, WorkerLog, description
from .stored import MAX_COMPARED, Store, curves_of, described, differing, summary_of, tags_of

MAX_VIEWERS = 32
_KEEP_ALIVE_S = 15.0
_LIST = TypeAdapter(list[StoredRun])


class Runs:
    """All runs by name: those of this process and those of the run store."""

    def __init__(self, store: Store, is_list: bool = False) -> None:
        """`is_list`: these are of a run store, without a run of this process."""
        self.live: dict[str, Feed] = {}
        self.store, self.is_list = store, is_list
        self.max_viewers = MAX_VIEWERS
        self.num_viewers = 0
        self.stopped = asyncio.Event()

    def begin(self, feed: Feed, version: int) -> None:
        """Add a run of this process, which begins at `version`. The run store may have its earlier part."""
        about = feed.view.about
        if about.server_incarnation > 1 and (before := self.store.view(about.run)) is not None:
            feed.view.continue_from(before, version)
        self.live[about.run] = feed

    def feed(self, name: str) -> Feed:
        """Returns the feed of a run; `live`: the newest run of this process. Raises HTTPException 404."""
        if name == "live" and self.live:
            return next(reversed(self.live.values()))
        if name in self.live:
            return self.live[name]
        if (view := self.store.view(name)) is None:
            known = [*self.live, *(stored_run.id for stored_run in self.listed()[:20])]
            raise HTTPException(404, f"no run {name[:80]}; there are: {', '.join(dict.fromkeys(known)) or 'none'}")
        return Feed(view, is_over=view.newest is None or view.newest.is_over)

    def listed(self) -> list[StoredRun]:
        """Returns all runs, the newest first."""
        stored = self.store.runs()
        known = {run.id: run for run in stored}
        live = []
        for name, feed in reversed(self.live.items()):
            names = known[name].model_dump(include={"key", "name", "note", "tags"}) if name in known else {}
            live.append(_listed(feed).model_copy(update=names))
        return [*live, *(run for run in stored if run.id not in self.live)]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns, for each run, the settings whose values differ between runs."""
        live = {name: relevant_settings(feed.view.about.settings) for name, feed in self.live.items()}
        return differing({**self.store.settings(), **live})

    def curves(self, name: str) -> dict[str, Any]:
        """Returns a run with its metrics over time. Raises HTTPException 404 as `feed` does."""
        feed = self.feed(name)
        listed = {run.id: run for run in self.listed()}
        return curves_of(listed.get(feed.view.about.run) or _listed(feed), feed.view, self.store)

    def compared(self, text: str) -> dict[str, Any]:
        """Returns the results of groups of runs, `a,b;c`, whose rows have the groups' first runs as labels.

        Raises HTTPException 400, and 404 as `feed` does.
        """
        groups = [[name for name in part.split(",") if name] for part in text.split(";")]
        if not all(groups) or sum(map(len, groups)) > MAX_COMPARED:
            raise HTTPException(400, f"runs=A,B;C names 1 to {MAX_COMPARED} runs in groups")
        listed = {run.id: run for run in self.listed()}
        runs, works = [], set()
        for names in groups:
            for name in names:
                feed = self.feed(name)
                run = listed.get(feed.view.about.run) or _listed(feed)
                stored = self.store.summary(run) if name not in self.live else None
                runs.append((names[0], stored or summary_of(run, feed.view)))
                works.add(run.work)
        return compare(runs, same_task=len(works) < 2).model_dump()

    def again(self, feed: Feed) -> Callable[[], Feed | None] | None:
        """Returns a function that reads an active run of another process again; None for all other runs."""
        if feed in self.live.values() or feed.is_over:
            return None
        return lambda: self.feed(feed.view.about.run)

    def check_room(self) -> None:
        """Raise HTTPException 503 at the maximum of viewers."""
        if self.num_viewers >= self.max_viewers:
            raise HTTPException(503, f"the maximum of {self.max_viewers} viewers is reached")

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[None]:
        self.check_room()
        self.num_viewers += 1
        try:
            yield
        finally:
            self.num_viewers -= 1


def make_app(runs: Runs) -> Starlette:
    """Returns the application, to be wrapped in a `Guard`."""

    def reply(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A route for these values, or for this JSON."""

        async def handle(request: Request) -> Response:
            found = answer(request)
            is_json = isinstance(found, str | bytes)
            return Response(found, media_type="application/json") if is_json else JSONResponse(finite(found))

        return handle

    def of_run(answer: Callable[[Feed], Any]) -> Callable[[Request], Any]:
        return reply(lambda request: answer(runs.feed(request.path_params["run"])))

    async def events(request: Request) -> Response:
        feed = runs.feed(request.query_params.get("run", "live"))
        runs.check_room()  # while a status can still refuse
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_sse(runs, feed), media_type="text/event-stream", headers=headers)

    def session(request: Request) -> str:
        may_control, problem = request.state.may_control, runs.store.problem()
        return Session(may_control=may_control, program=PROGRAM_VERSION, store_problem=problem).model_dump_json()

    def metrics(request: Request) -> Any:
        found = {
            "run": shown_of_run(Display.DASHBOARD), "worker": shown_of_workers(Display.DASHBOARD),
            "curves": shown_of_run(Display.DASHBOARD | Display.CURVES),
            "recorded": Status.declared_metrics(),
        }  # fmt: skip
        return {**{scope: [described(metric) for metric in shown] for scope, shown in found.items()}, "is_up": IS_UP}

    def newest(feed: Feed) -> Any:
        return feed.view.newest.model_dump(mode="json") if feed.view.newest is not None else None

    def workers(feed: Feed) -> list[dict[str, Any]]:
        tick = feed.view.newest
        return [worker.model_dump() for worker in tick.status.workers] if tick is not None else []

    page_of_a_run, *static = static_routes({"/": "index.html", "/runs": "runs.html"})

    async def first_page(request: Request) -> Response:
        if runs.is_list and "run" not in request.query_params:
            return RedirectResponse("/runs")
        found: Response = await page_of_a_run.endpoint(request)
        return found

    run = "/api/runs/{run}"
    return Starlette(
        routes=[
            Route("/", first_page),
            *static,
            Route("/api/openapi.json", reply(lambda _: description())),
            Route("/api/health", reply(lambda _: Health(runs=len(runs.live), viewers=runs.num_viewers).model_dump())),
            Route("/api/session", reply(session)),
            Route("/api/metrics", reply(metrics)),
            Route("/api/runs", reply(lambda _: _LIST.dump_json(runs.listed()))),
            Route("/api/settings", reply(lambda _: runs.settings())),
            Route("/api/compare", reply(lambda request: runs.compared(request.query_params.get("runs", "")))),
            Route(run, of_run(lambda feed: feed.whole().data)),
            Route(f"{run}/status", of_run(newest)),
            Route(f"{run}/workers", of_run(workers)),
            Route(f"{run}/workers/{{rank:int}}/log", partial(_worker_log, runs)),
            Route(f"{run}/metrics", of_run(lambda feed: feed.view.series)),
            Route(f"{run}/events", of_run(lambda feed: [event.model_dump() for event in feed.view.events])),
            Route(f"{run}/snapshots", of_run(lambda feed: [item.model_dump() for item in feed.view.snapshots])),
            Route(f"{run}/curves", reply(lambda request: runs.curves(request.path_params["run"]))),
            Route(f"{run}/tags", partial(_tag, runs), methods=["POST"]),
            Route(f"{run}/controls", partial(_control, runs), methods=["POST"]),
            Route("/api/events", events),
            WebSocketRoute("/ws/events", partial(_websocket, runs)),
        ],
        exception_handlers={HTTPException: _refused},
    )


def _listed(feed: Feed) -> StoredRun:
    """Returns a run of this process in the form of the run store."""
    about, tick = feed.view.about, feed.view.newest
    state = "over" if feed.is_over else "live"
    known: dict[str, Any] = {
        "id": about.run, "mode": about.mode, "work": about.task, "started_at": about.started, "state": state,
    }  # fmt: skip
    if tick is None:
        return StoredRun(**known)
    status = tick.status
    metrics = tick.final or (status.evaluated.metrics if status.evaluated else {})
    known |= {"waiting": status.waiting_reason(), "metrics": metrics, "recorded": status.recorded, **status.row()}
    return StoredRun(**known | ({"num_workers": status.num_ranks} if feed.is_over else {}))


async def _worker_log(runs: Runs, request: Request) -> Response:
    """Returns the last lines of a worker. The user's output may be private, so this needs the token."""
    if not request.state.may_control:
        return refusal(401, "the log of a worker needs the token", "open the address with ?token=... that was printed")
    is_here = runs.feed(request.path_params["run"]) in runs.live.values()
    lines = last_lines(request.path_params["rank"]) if is_here else None
    if lines is None:
        why = "ps-launch keeps the last lines of the workers it started, on the server's host, until it ends"
        return refusal(404, "the log of this worker is not available here", why)
    return JSONResponse(WorkerLog(lines=lines).model_dump())


async def _tag(runs: Runs, request: Request) -> Response:
    name = request.path_params["run"]
    try:
        tags = tags_of(_command(await request.body()).get("tags"))
    except (ValueError, ClientDisconnect) as error:
        return refusal(400, str(error) or "the body is incomplete", 'e.g. {"tags": "baseline quick"}')
    try:
        is_known = await asyncio.to_thread(runs.store.set_tags, name, tags)
    except (ParamServerError, sqlite3.Error) as error:
        return refusal(409, f"the tags cannot be written: {error}")
    if not is_known:
        return refusal(404, f"no run {name[:80]} in the run store", "a run is recorded once its first worker joins")
    return JSONResponse(Done(done=f"tags: {' '.join(tags)}" if tags else "no tags").model_dump())


async def _control(runs: Runs, request: Request) -> Response:
    feed = runs.feed(request.path_params["run"])
    try:
        command = _command(await request.body())
    except (ValueError, ClientDisconnect) as error:
        fix = f'{error or "it is incomplete"}; e.g. {{"do": "snapshot"}}'
        return refusal(400, "the body is not a JSON object", fix)
    if feed.control is None or feed.is_over:
        return refusal(409, "this run accepts no controls: it is over or read-only")
    try:
        return JSONResponse(Done(done=await feed.control(command)).model_dump())
    except ValueError as error:
        return refusal(422, str(error))


def _command(body: bytes) -> dict[str, Any]:
    """Returns a flat JSON object. Raises ValueError for any other text."""
    found = read_json(body)
    if not isinstance(found, dict):
        raise ValueError("it is another kind of JSON")
    for name, value in found.items():
        if isinstance(value, dict | list):
            raise ValueError(f"{name[:40]!r} is a list or an object")
    return found


async def _sse(runs: Runs, feed: Feed) -> AsyncIterator[str]:
    async with runs.viewer():
        async for message in _until(runs, feed):
            if message is None:
                yield ": still here\n\n"
            else:
                yield f"event: {message.kind}\nid: {message.number}\ndata: {message.data}\n\n"


async def _websocket(runs: Runs, websocket: WebSocket) -> None:
    disconnected: asyncio.Future[None] | None = None
    try:
        feed = runs.feed(websocket.query_params.get("run", "live"))
        async with runs.viewer():
            await websocket.accept()
            disconnected = asyncio.ensure_future(_disconnected(websocket))
            async for message in _until(runs, feed, disconnected):
                if message is not None:
                    head = f'{{"event":"{message.kind}","number":{message.number},"data":'
                    await websocket.send_text(f"{head}{message.data}}}")
            if not disconnected.done():
                await websocket.close()
    except HTTPException as error:
        await websocket.close(1008 if error.status_code == 404 else 1013, error.detail)
    except WebSocketDisconnect:
        pass
    finally:
        if disconnected is not None:
            disconnected.cancel()


async def _disconnected(websocket: WebSocket) -> None:
    """Wait until the viewer is gone. Its messages are ignored."""
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass


async def _until(runs: Runs, feed: Feed, closed: asyncio.Future[None] | None = None) -> AsyncIterator[Message | None]:
    """Yields a feed's messages until it or the dashboard ends, or the viewer is gone; None as a keep-alive."""
    messages = feed.messages(runs.again(feed))
    stopped: asyncio.Future[object] = asyncio.ensure_future(runs.stopped.wait())
    ends: set[asyncio.Future[Any]] = {stopped} if closed is None else {stopped, closed}
    coming: asyncio.Future[Message | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(messages, None))  # a task cannot raise StopAsyncIteration
            await asyncio.wait({coming, *ends}, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                if (message := coming.result()) is None:
                    return
                yield message
                coming = None
            elif any(end.done() for end in ends):
                return
            else:
                yield None
    finally:
        stopped.cancel()
        if coming is not None:
            coming.cancel()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail)


# ---- serve ----------------------------------------------------------------------------------------
# Serves the dashboard of a process, or of a run store without a server (`ps-runs ui FILE`).


log = get_logger()

_LAST_S = 0.2  # time for viewers to receive the newest messages


class Dashboard:
    """The dashboard of a process that has one run at a time, at the address `server.web`."""

    def __init__(self, config: Config, store: Path | None = None, opens: str = "/") -> None:
        """`store`: the run store's file, None: the configured one; `opens`: the path of the printed URL.

        Raises AuthError if other machines can reach the address and TLS or the token is missing.
        """
        assert config.server.web is not None
        self._http = HttpServer(config.server.web, config, Rules(), name="the dashboard", flag="--web")
        self._store = store or Path(config.output.track_dir) / FILE
        self._opens = opens
        self._feed: Feed | None = None

    def start(self) -> None:
        """Listen. Raises BindError."""
        self._runs = Runs(Store(self._store), is_list=self._opens != "/")
        door = self._http.start(make_app(self._runs))
        self._runs.max_viewers = min(MAX_VIEWERS, door.max // 2)
        self.address, self.url = self._http.address, self._http.url_with_token(self._opens)
        readers = "anyone with the token" if self._http.is_open else "this machine"
        log.info("dashboard", url=self._http.url(self._opens), address=self.address, readable_by=readers)

    # ---- from the run's thread ------------------------------------------------------------------

    def begin(self, view: View, control: Control | None = None, version: int = 0) -> None:
        """Show a run. `version`: where it continues; the run store has the part before."""
        self._feed = feed = Feed(view, control)
        self._http.loop.call_soon_threadsafe(self._runs.begin, feed, version)

    def retell(self, about: About) -> None:
        """Show changed settings of the run."""
        if self._feed is not None:
            self._http.loop.call_soon_threadsafe(self._feed.retell, about)

    def push(self, tick: Tick) -> None:
        """Show the next tick."""
        if self._feed is not None:
            self._http.loop.call_soon_threadsafe(self._feed.push, tick)

    def close(self) -> None:
        """Stop serving, after viewers have got the newest messages."""
        self._http.close(self._end, _LAST_S)

    def _end(self) -> None:
        if self._feed is not None:
            self._feed.end()
        self._http.loop.call_later(_LAST_S, self._runs.stopped.set)


def serve_dashboard(path: Path, address: str) -> None:
    """Serve until it is interrupted. Raises StoreError for the file, BindError and AuthError for the address."""
    RunStore(path).close()
    dashboard = Dashboard(Config.model_validate({"server": {"web": address}}), path, "/runs")
    dashboard.start()
    print(f"runs of {path}: {dashboard.url}", flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        stop.wait()
    except KeyboardInterrupt:
        pass
    finally:
        dashboard.close()
