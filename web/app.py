"""The routes: a page, and the same for programs (`/api/openapi.json` describes them)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..common.reporting.metrics import Display, Metric, shown_of_run, shown_of_workers
from ..common.runstore.reading import StoredRun
from ..common.version import PROGRAM_VERSION
from ..common.wire.json_text import finite, read_json
from .feed import Feed, Message
from .guard import told
from .openapi import Done, Health, Session, description
from .stored import Store

_STATIC = Path(__file__).parent / "static"
_STYLE = "style.css"
MOST_VIEWERS = 32
_KEEP_ALIVE_S = 15.0
_LIST = TypeAdapter(list[StoredRun])


class Runs:
    """The runs that can be looked at, by name: of this process, and on record."""

    def __init__(self, store: Store | None = None) -> None:
        self.live: dict[str, Feed] = {}
        self.store = store
        self.most_viewers = MOST_VIEWERS
        self.num_viewers = 0
        self.stopped = asyncio.Event()

    def begin(self, feed: Feed, version: int) -> None:
        """A run of this process, from `version` on. What was before it is on record, where runs are kept."""
        about = feed.view.about
        before = self.store.view(about.run) if self.store is not None and about.server_incarnation > 1 else None
        if before is not None:
            feed.view.continue_from(before, version)
        self.live[about.run] = feed

    def feed(self, name: str) -> Feed:
        """`live` is the newest one that goes on. HTTPException 404 names those there are."""
        if name == "live" and self.live:
            return next(reversed(self.live.values()))
        if name in self.live:
            return self.live[name]
        view = self.store.view(name) if self.store is not None else None
        if view is None:
            known = [*self.live, *(stored_run.id for stored_run in self.listed()[:20])]
            raise HTTPException(404, f"no run {name[:80]}; there are: {', '.join(dict.fromkeys(known)) or 'none'}")
        return Feed.of(view)

    def listed(self) -> list[StoredRun]:
        """All runs, the newest first."""
        stored = self.store.runs() if self.store is not None else []
        return [
            *map(_listed, reversed(self.live.values())),
            *(stored_run for stored_run in stored if stored_run.id not in self.live),
        ]

    def again(self, feed: Feed) -> Callable[[], Feed | None] | None:
        """How a run that another process writes is read again; None for what is told by itself."""
        if feed in self.live.values() or feed.is_over:
            return None
        return lambda: self.feed(feed.view.about.run)

    def check_room(self) -> None:
        """HTTPException 503 where as many look as may."""
        if self.num_viewers >= self.most_viewers:
            raise HTTPException(503, f"{self.most_viewers} viewers look already, which is as many as may")

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[None]:
        self.check_room()
        self.num_viewers += 1
        try:
            yield
        finally:
            self.num_viewers -= 1


def make_app(runs: Runs) -> Starlette:
    """To be wrapped in a `Guard`."""

    def of_run(answer: Callable[[Feed], Any]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            return JSONResponse(finite(answer(runs.feed(request.path_params["run"]))))

        return handle

    async def listed(request: Request) -> Response:
        return Response(_LIST.dump_json(runs.listed()), media_type="application/json")

    async def whole(request: Request) -> Response:
        return Response(runs.feed(request.path_params["run"]).whole().data, media_type="application/json")

    async def events(request: Request) -> Response:
        feed = runs.feed(request.query_params.get("run", "live"))
        runs.check_room()  # while there is still a status to refuse with
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_sse(runs, feed), media_type="text/event-stream", headers=headers)

    async def socket(websocket: WebSocket) -> None:
        await _websocket(runs, websocket)

    async def control(request: Request) -> Response:
        return await _control(runs.feed(request.path_params["run"]), request)

    async def session(request: Request) -> Response:
        return JSONResponse(Session(may_control=request.state.may_control, program=PROGRAM_VERSION).model_dump())

    async def health(request: Request) -> Response:
        return JSONResponse(Health(runs=len(runs.live), viewers=runs.num_viewers).model_dump())

    async def metrics(request: Request) -> Response:
        found = {"run": shown_of_run(Display.PAGE), "worker": shown_of_workers(Display.PAGE)}
        return JSONResponse({scope: [_described(metric) for metric in shown] for scope, shown in found.items()})

    async def described(request: Request) -> Response:
        return JSONResponse(description())

    files = _files()

    def file(name: str) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            return _file(files, name or request.path_params["name"], request)

        return handle

    def newest(feed: Feed) -> Any:
        tick = feed.view.newest
        return tick.model_dump(mode="json") if tick is not None else None

    return Starlette(
        routes=[
            Route("/", file("index.html")),
            Route("/runs", file("runs.html")),
            Route("/favicon.ico", file("icon.svg")),
            Route("/static/{name:path}", file("")),
            Route("/api/openapi.json", described),
            Route("/api/health", health),
            Route("/api/session", session),
            Route("/api/metrics", metrics),
            Route("/api/runs", listed),
            Route("/api/runs/{run}", whole),
            Route("/api/runs/{run}/status", of_run(newest)),
            Route("/api/runs/{run}/workers", of_run(_workers)),
            Route("/api/runs/{run}/metrics", of_run(lambda feed: feed.view.series)),
            Route("/api/runs/{run}/events", of_run(lambda feed: [event.model_dump() for event in feed.view.events])),
            Route(
                "/api/runs/{run}/snapshots",
                of_run(lambda feed: [snapshot.model_dump() for snapshot in feed.view.snapshots]),
            ),
            Route("/api/runs/{run}/controls", control, methods=["POST"]),
            Route("/api/events", events),
            WebSocketRoute("/ws/events", socket),
        ],
        exception_handlers={HTTPException: _refused},
    )


def _files() -> dict[str, tuple[bytes, str]]:
    """What a browser may ask for, by name, with its ETag: read once, for it asks for a dozen at once. Its own style is
    in each page, which then has something to show as soon as it is there."""
    found = {path.relative_to(_STATIC).as_posix(): path.read_bytes() for path in _STATIC.rglob("*") if path.is_file()}
    link = f'<link rel="stylesheet" href="/static/{_STYLE}">'.encode()
    style = b"<style>\n" + found[_STYLE] + b"</style>"
    whole = {name: body.replace(link, style) if name.endswith(".html") else body for name, body in found.items()}
    return {name: (body, f'"{sha256(body).hexdigest()[:16]}"') for name, body in whole.items()}


def _file(files: dict[str, tuple[bytes, str]], name: str, request: Request) -> Response:
    if name not in files:
        raise HTTPException(404, f"no file {name[:80]}")
    body, tag = files[name]
    headers = {"Cache-Control": "no-cache", "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=guess_type(name)[0], headers=headers)


def _listed(feed: Feed) -> StoredRun:
    """A run of this process, as the run store would have it."""
    about, tick = feed.view.about, feed.view.newest
    state = "over" if feed.is_over else "live"
    known: dict[str, Any] = {
        "id": about.run, "mode": about.mode, "work": about.task, "started_at": about.started, "state": state,
    }  # fmt: skip
    if tick is None:
        return StoredRun(**known)
    status = tick.status
    metrics = tick.final or (status.evaluated.metrics if status.evaluated else {})
    known |= {"waiting": status.waiting_reason(), "metrics": metrics, **status.row()}
    return StoredRun(**known | ({"num_workers": status.num_ranks} if feed.is_over else {}))


def _described(metric: Metric) -> dict[str, str]:
    return {"name": metric.name, "label": metric.label, "help": metric.help, "unit": metric.unit.value}


def _workers(feed: Feed) -> list[dict[str, Any]]:
    """All workers: what each does now, and its metrics."""
    tick = feed.view.newest
    return [worker.model_dump() for worker in tick.status.workers] if tick is not None else []


async def _control(feed: Feed, request: Request) -> Response:
    try:
        asked = _command(await request.body())
    except (ValueError, ClientDisconnect) as error:
        return told(
            400, "the body is not a JSON object", f'{error or "it did not come whole"}; e.g. {{"do": "snapshot"}}'
        )
    if feed.control is None or feed.is_over:
        return told(409, "this run takes no orders: it is over, or kept for reading only")
    try:
        return JSONResponse(Done(done=await feed.control(asked)).model_dump())
    except ValueError as error:
        return told(422, str(error))


def _command(body: bytes) -> dict[str, Any]:
    """A flat object of JSON. ValueError for anything else."""
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
    gone: asyncio.Future[None] | None = None
    try:
        feed = runs.feed(websocket.query_params.get("run", "live"))
        async with runs.viewer():
            await websocket.accept()
            gone = asyncio.ensure_future(_disconnected(websocket))
            async for message in _until(runs, feed, gone):
                if message is not None:
                    head = f'{{"event":"{message.kind}","number":{message.number},"data":'
                    await websocket.send_text(f"{head}{message.data}}}")
            if not gone.done():
                await websocket.close()
    except HTTPException as error:
        await websocket.close(1008 if error.status_code == 404 else 1013, error.detail)
    except WebSocketDisconnect:
        pass
    finally:
        if gone is not None:
            gone.cancel()


async def _disconnected(websocket: WebSocket) -> None:
    """Returns when the viewer is gone. What a viewer sends means nothing here."""
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass


async def _until(runs: Runs, feed: Feed, gone: asyncio.Future[None] | None = None) -> AsyncIterator[Message | None]:
    """A feed's messages until it or the page ends, or the viewer is gone; None now and then, where nothing comes."""
    messages = feed.messages(runs.again(feed))
    stopped: asyncio.Future[object] = asyncio.ensure_future(runs.stopped.wait())
    ends: set[asyncio.Future[Any]] = {stopped} if gone is None else {stopped, gone}
    coming: asyncio.Future[Message | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(_next(messages))
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


async def _next(messages: AsyncIterator[Message]) -> Message | None:
    """None at the end: what raises StopAsyncIteration cannot be a task."""
    return await anext(messages, None)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return told(error.status_code, error.detail)
