"""Describes the API as OpenAPI 3.1, with the schemas of the types that it sends."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..common.reporting.comparison import Results
from ..common.reporting.summary import Event, Snapshot, Status, Tick, View, series_columns
from ..common.runstore.reading import StoredRun
from ..common.version import PROGRAM_VERSION
from .stored import Curves

Json = dict[str, Any]


class Session(BaseModel):
    """The caller's rights."""

    may_control: bool
    program: str  # its version
    store_problem: str = ""  # why the run store cannot be read


class Health(BaseModel):
    """The dashboard is up."""

    status: Literal["ok"] = "ok"
    runs: int  # of this process
    viewers: int


class Done(BaseModel):
    """The result of a control."""

    done: str


class WorkerLog(BaseModel):
    """The newest lines of a worker's output, the oldest first."""

    lines: list[str]


class Refusal(BaseModel):
    """The reason of a refusal, and the fix."""

    error: str
    fix: str


_KINDS = (Status, Tick, View, Event, Snapshot, StoredRun, Curves, Results, Session, Health, Done, WorkerLog, Refusal)
_RUN = {"name": "run", "in": "path", "required": True, "schema": {"type": "string"},
        "description": "its name, or `live`: the newest in progress"}  # fmt: skip


_RANK = {**_RUN, "name": "rank", "schema": {"type": "integer"}, "description": "of the worker"}
_QUERY = {**_RUN, "in": "query", "required": False}
_GROUPS = {"name": "runs", "in": "query", "required": True, "schema": {"type": "string"},
           "description": "`A,B;C`: ids, those that differ only in their seed in one group"}  # fmt: skip
_REFUSALS = {
    "401": "the token is missing: changes need it, and at an open address every request",
    "403": "the request comes from another page (Origin), or the token in the address is wrong",
    "421": "the server has another name (Host)",
}
_SETTINGS = {"type": "object", "additionalProperties": {"type": "object"}}  # for each run, values by dotted key
_TAGS = {"tags": {"type": "string", "description": "all tags of the run, separated by spaces"}}
_CONTROL = {
    "do": {"type": "string", "description": "one of `about.controls`"},
    "rank": {"type": "integer", "description": "rank of the worker to control"},
    "name": {"type": "string", "description": "with `set`: the key of the setting"},
    "value": {"description": "with `set`: its new value"},
}


@cache
def description() -> Json:
    """Returns the document at /api/openapi.json."""
    kinds = [(kind, "serialization") for kind in _KINDS]
    _, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "paramserver", "version": PROGRAM_VERSION},
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Series": _series(), "Message": _message()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/api/health": _get("whether the dashboard is up", _ref("Health")),
            "/api/session": _get("the caller's rights", _ref("Session")),
            "/api/metrics": _get("names, labels, units and help of the metrics of a run and of a worker", _metrics()),
            "/api/runs": _get("all runs", _many("StoredRun")),
            "/api/settings": _get("for each run, the settings whose values differ between runs", _SETTINGS),
            "/api/runs/{run}/curves": _get("its recorded metrics over time, for a comparison", _ref("Curves"), _RUN),
            "/api/runs/{run}/tags": _post(
                "set the tags of a run", "the tags", "tags", _TAGS,
                {"404": "no such run in the run store", "409": "the run store cannot be written"},
            ),
            "/api/runs/{run}": _get("the complete view of one run", _ref("View"), _RUN),
            "/api/runs/{run}/status": _get("its newest status; null before its first status",
                                           {"anyOf": [_ref("Tick"), {"type": "null"}]}, _RUN),
            "/api/compare": _get("the results of groups of runs, side by side", _ref("Results"), _GROUPS),
            "/api/runs/{run}/workers": _get("its workers", _many("WorkerStatus"), _RUN),
            "/api/runs/{run}/workers/{rank}/log": _get("its newest lines; needs the token", _ref("WorkerLog"), _RUN,
                                                       _RANK),
            "/api/runs/{run}/metrics": _get("metrics over time, in columns", _ref("Series"), _RUN),
            "/api/runs/{run}/events": _get("its events", _many("Event"), _RUN),
            "/api/runs/{run}/snapshots": _get("its retained snapshots", _many("Snapshot"), _RUN),
            "/api/runs/{run}/controls": _post(
                "send a control; the run applies it at its next commit", "the result of the control", "do", _CONTROL,
                {"404": "no such run", "409": "the run is over, or can only be read",
                 "422": "the control cannot be applied, with the reason"},
            ),
            "/api/events": _get("live updates as server-sent events; `number` is the id", _ref("Message"), _QUERY,
                                media="text/event-stream"),
            "/ws/events": _get("live updates over a WebSocket, one message each", _ref("Message"), _QUERY),
        },
    }  # fmt: skip


def _series() -> Json:
    """Columns of one length."""
    return _object({key: {"type": "array", "items": {"type": ["number", "null"]}} for key in series_columns()})


def _metrics() -> Json:
    """The metrics of a run and the metrics of a worker."""
    texts = {key: {"type": "string"} for key in ("name", "label", "help", "unit")}
    metrics = {"type": "array", "items": _object({**texts, "is_rare": {"type": "boolean"}})}
    is_up = {"type": "object", "additionalProperties": {"type": "boolean"}, "description": "whether higher is better"}
    return _object({**dict.fromkeys(("run", "worker", "curves", "recorded"), metrics), "is_up": is_up})


def _message() -> Json:
    """The first message is whole, then ticks follow. A slow viewer gets whole again. The last message is over."""
    kinds = {"whole": _ref("View"), "tick": _ref("Tick"), "over": {"type": "object"}}
    return {"oneOf": [_object({"event": {"const": kind}, "number": {"type": "integer"}, "data": data})
                      for kind, data in kinds.items()]}  # fmt: skip


def _object(properties: Json, *required: str) -> Json:
    """An object with these properties, all of which are required if none is named."""
    return {"type": "object", "required": list(required or properties), "properties": properties}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _many(name: str) -> Json:
    return {"type": "array", "items": _ref(name)}


def _responses(description: str, schema: Json, media: str, refusals: dict[str, str]) -> Json:
    why = {"application/json": {"schema": _ref("Refusal")}}
    refused = {code: {"description": text, "content": why} for code, text in (_REFUSALS | refusals).items()}
    return {"200": {"description": description, "content": {media: {"schema": schema}}}, **refused}


def _get(summary: str, schema: Json, *parameters: Json, media: str = "application/json") -> Json:
    refusals = {"404": "no such run"} if parameters else {}
    if _QUERY in parameters:
        refusals["503"] = "the maximum of viewers is reached"
    responses = _responses(summary, schema, media, refusals)
    return {"get": {"summary": summary, "parameters": list(parameters), "security": [{}, {"token": []}],
                    "responses": responses}}  # fmt: skip


def _post(summary: str, result: str, needed: str, properties: Json, refusals: dict[str, str]) -> Json:
    body = {"required": True, "content": {"application/json": {"schema": _object(properties, needed)}}}
    refusals = {"400": "the body is not a JSON object", "413": "the body is too long", **refusals}
    responses = _responses(result, _ref("Done"), "application/json", refusals)
    return {"post": {"summary": summary, "parameters": [_RUN], "security": [{"token": []}], "requestBody": body,
                     "responses": responses}}  # fmt: skip
