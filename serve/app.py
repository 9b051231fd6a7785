"""The routes of `ps-serve`: OpenAI's API, the Open Inference Protocol, health, metrics, and a page to type into."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..common.config.schema import ServeConfig
from ..common.reporting.log import get_logger
from ..common.wire.json_text import read_json, to_json
from ..web.files import static_routes
from ..web.guard import Rules
from . import openai
from .engine import End, Engine, Job, Piece
from .errors import Refused
from .infer import described_inputs, read_inputs, write_outputs
from .source import Follower

log = get_logger()

_MORE_CONNECTIONS = 64  # beside the requests that are computed or wait: health, metrics, pages, idle ones
_SSE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def rules(settings: ServeConfig) -> Rules:
    """Return the limits and rights of clients."""
    most = settings.slots + settings.queue + _MORE_CONNECTIONS
    return Rules(
        settings.max_body_bytes, ("/", "/chat"), writes_need_token=False, refusal=openai.refused_by_guard,
        max_connections=most, share_of_descriptors=2,
    )  # fmt: skip


class Meters:
    """The metrics of one process, for /metrics."""

    def __init__(self, engine: Engine, follower: Follower) -> None:
        self.registry = CollectorRegistry()
        self.replies = Counter("paramserver_serve_replies", "Replies by status.", ["status"], registry=self.registry)
        self.tokens = Counter("paramserver_serve_tokens", "Tokens written.", registry=self.registry)
        self.prompts = Counter("paramserver_serve_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.first_s = Histogram("paramserver_serve_first_token_seconds", "Seconds to the first token.",
                                 registry=self.registry)  # fmt: skip
        for name, text, read in (
            ("active", "Requests that are decoded.", lambda: engine.num_active),
            ("waiting", "Requests that wait.", lambda: engine.num_waiting),
            ("version", "Newest version.", lambda: max((v.number for v in engine.versions()), default=0)),
            ("age_seconds", "Seconds since the newest version was fetched.", lambda: follower.age_s),
        ):
            Gauge(f"paramserver_serve_{name}", text, registry=self.registry).set_function(read)


class Service:
    """Handles the requests to one process. `name` is the task's name."""

    def __init__(self, name: str, engine: Engine, follower: Follower) -> None:
        self._name, self._engine, self._source = name, engine, follower.source
        self._meters = Meters(engine, follower)
        self._names = {"live", name}
        self._requests: openai.Requests | None = None
        if engine.kind is not None:
            self._requests = openai.Requests(engine.task, self._names, engine.kind, engine.options.max_tokens)
        self._inputs: list[dict[str, Any]] | None = None

    def app(self) -> Starlette:
        """Return the application. Wrap it in a guard."""
        routes = [
            Route("/v1/completions", self._catching(partial(self._reply, is_chat=False)), methods=["POST"]),
            Route("/v1/chat/completions", self._catching(partial(self._reply, is_chat=True)), methods=["POST"]),
            Route("/v1/models", self._catching(self.list_models)),
            Route("/v2/models/{model}/infer", self._catching(self.infer), methods=["POST"]),
            Route("/v2/models/{model}", self._catching(self.described)),
            Route("/v2/health/ready", self._catching(self.ready)),
            Route("/v2/health/live", self._catching(self.health)),
            Route("/health", self._catching(self.health)),
            Route("/metrics", self._catching(self.metrics)),
            *static_routes({"/": "chat.html", "/chat": "chat.html"}),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _unknown})

    def _catching(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def catches(request: Request) -> Response:
            try:
                response = await handle(request)
            except Refused as refused:
                response = openai.error_response(refused.status, refused.message, refused.code, refused.param)
            except ClientDisconnect:
                response = openai.error_response(400, "the body is not whole")
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                log.error("serve_failed", path=request.url.path[:80], error=reason)
                response = openai.error_response(500, f"ps-serve failed: {reason}", "internal_error")
            if request.method == "POST":
                self._meters.replies.labels(str(response.status_code)).inc()
            return response

        return catches

    # ---- text ---------------------------------------------------------------------------------

    async def _reply(self, request: Request, is_chat: bool) -> Response:
        if self._requests is None:
            message = f"task {self._name} writes no text"
            raise Refused(404, f"{message}; ask /v2/models/{self._name}/infer", "model_not_found")
        client = self._requests.read(await _json(request), is_chat)
        stream = Stream(self._engine, client, self._meters)
        replies = openai.Replies(client, self._name, self._engine.task.decode)
        async with _watched(request, stream):
            found = await stream.next()
            while isinstance(found, Piece) and not client.is_streamed:
                replies.add(found)
                found = await stream.next()
        if isinstance(found, Refused):  # a stream that has not begun still has a status
            raise found
        version = found.version if isinstance(found, End) else stream.job.version
        assert version is not None
        headers = {"ps-version": version.name}
        if isinstance(found, Piece) or client.is_streamed:
            body = _sse(stream, found, replies)
            return StreamingResponse(body, media_type="text/event-stream", headers=_SSE | headers)
        return openai.JsonResponse(replies.whole(found), headers=headers)

    async def list_models(self, _: Request) -> Response:
        return openai.JsonResponse(openai.models(sorted(self._names), self._engine.versions()))

    # ---- tensors ------------------------------------------------------------------------------

    def _check_model(self, request: Request) -> None:
        model = request.path_params["model"]
        if model not in self._names:
            known = ", ".join(sorted(self._names))
            raise Refused(404, f"no model {model[:80]} is here; there are: {known}", "model_not_found")

    async def infer(self, request: Request) -> Response:
        self._check_model(request)
        body = await _json(request)
        inputs = await asyncio.to_thread(read_inputs, body)
        computed: asyncio.Future[Any] = asyncio.wrap_future(self._engine.infer(inputs))
        gone: asyncio.Future[Any] = asyncio.create_task(_gone(request))
        try:
            limit_s = self._engine.options.reply_s
            await asyncio.wait({computed, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not computed.done():
                raise ClientDisconnect if gone.done() else self._engine.late()
            outputs, version = computed.result()
        finally:
            gone.cancel()
            computed.cancel()
        reply: dict[str, Any] = {"model_name": self._name, "model_version": version.name}
        if isinstance(body.get("id"), str):
            reply["id"] = body["id"]
        reply["outputs"] = await asyncio.to_thread(write_outputs, outputs)
        return openai.JsonResponse(reply, headers={"ps-version": version.name})

    async def described(self, request: Request) -> Response:
        self._check_model(request)
        if self._inputs is None:
            self._inputs = await asyncio.to_thread(described_inputs, self._engine.task)
        versions = [version.name for version in self._engine.versions()]
        is_text = self._requests is not None
        return openai.JsonResponse(
            {"name": self._name, "versions": versions, "platform": f"torch-{torch.__version__}",
             "inputs": [] if is_text else self._inputs, "outputs": [], "is_text": is_text}
        )  # fmt: skip

    # ---- the process --------------------------------------------------------------------------

    async def ready(self, _: Request) -> Response:
        if not self._engine.versions():
            raise Refused(503, "no weights have arrived yet", "not_ready")
        if pause := self._engine.pause:
            raise Refused(503, f"replies pause: {pause}", "not_ready")
        return openai.JsonResponse({"ready": True})

    async def health(self, _: Request) -> Response:
        versions, pause = self._engine.versions(), self._engine.pause
        state = "starting" if not versions else "paused" if pause else "stale" if self._source.is_stale else "ok"
        found: dict[str, Any] = {"status": state, "active": self._engine.num_active}
        if pause:
            found["reason"] = pause
        if versions:
            found |= openai.described_version(versions[0])
        return openai.JsonResponse(found)

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._meters.registry), media_type="text/plain; version=0.0.4")


class Stream:
    """Carries the output of the engine's thread for one request into this event loop.

    Raises Refused if the engine does not accept the request.
    """

    def __init__(self, engine: Engine, client: openai.ClientRequest, meters: Meters) -> None:
        self._engine, self._meters, self._client = engine, meters, client
        self._loop = asyncio.get_running_loop()
        self._found: asyncio.Queue[Piece | End | Refused] = asyncio.Queue()
        self._began_at = self._loop.time()
        self._num_pieces = 0
        self._is_over = False
        self.job: Job = engine.submit(client.request, self._emit)
        meters.prompts.inc(len(client.request.prompt))

    def _emit(self, found: Piece | End | Refused) -> None:
        try:
            self._loop.call_soon_threadsafe(self._found.put_nowait, found)
        except RuntimeError:  # the loop has ended
            self.job.is_cancelled = True

    async def next(self) -> Piece | End | Refused:
        found: Piece | End | Refused
        try:
            async with asyncio.timeout(self._engine.options.reply_s):
                found = await self._found.get()
        except TimeoutError:
            found = self._engine.late()
            self.close()
        if isinstance(found, Piece):
            if not self._num_pieces:
                self._meters.first_s.observe(self._loop.time() - self._began_at)
            self._num_pieces += 1
            self._meters.tokens.inc()
        else:
            self._is_over = True
            if isinstance(found, End):
                log.debug("reply", id=self._client.id, reason=found.reason, tokens=found.num_tokens,
                          prompt_tokens=len(self._client.request.prompt), version=found.version.number)  # fmt: skip
        return found

    def close(self) -> None:
        """End the request if it is not over, because its client is gone."""
        if not self._is_over:
            self._engine.cancel(self.job)


async def _sse(stream: Stream, first: Piece | End | Refused, replies: openai.Replies) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a reply. Starlette closes this generator when the client is gone."""
    found = first
    try:
        while isinstance(found, Piece):
            assert stream.job.version is not None
            if found.text or found.chosen.logprob is not None:
                yield _event(replies.chunk(found, stream.job.version))
            found = await stream.next()
        if isinstance(found, Refused):
            yield _event({"error": {"message": found.message, "type": "server_error", "code": found.code}})
        else:
            for chunk in replies.last_chunks(found):
                yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the task's decode(), of log probabilities
        log.error("serve_failed", error=f"{type(error).__name__}: {error}")
        message = f"ps-serve failed: {type(error).__name__}: {error}"
        yield _event({"error": {"message": message, "type": "server_error", "code": "internal_error"}})
    finally:
        stream.close()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value, ensure_ascii=False).encode(errors="replace") + b"\n\n"


@asynccontextmanager
async def _watched(request: Request, stream: Stream) -> AsyncIterator[None]:
    """End the request of a client that leaves before the reply begins, or before a reply without a stream is whole."""

    async def watch() -> None:
        await _gone(request)
        stream.close()

    watching = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        stream.close()
        raise
    finally:
        watching.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json(request: Request) -> Any:
    try:
        return read_json(await request.body())
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}", "invalid_json") from None


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return openai.error_response(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
