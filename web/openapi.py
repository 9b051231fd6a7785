"""Describes the API as OpenAPI 3.1, with the schemas of the types that it sends."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..common.reporting.comparison import Results
from ..common.reporting.status import Status
from ..common.reporting.view import Event, Snapshot, Tick, View, series_columns
from ..common.runstore.reading import StoredRun
from ..common.version import PROGRAM_VERSION
from .compared import Curves


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


_RANK = {"name": "rank", "in": "path", "required": True, "schema": {"type": "integer"},
         "description": "of the worker"}  # fmt: skip
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
def description() -> dict[str, Any]:
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


def _series() -> dict[str, Any]:
    """Columns of one length."""
    column = {"type": "array", "items": {"type": ["number", "null"]}}
    return {"type": "object", "required": series_columns(), "properties": dict.fromkeys(series_columns(), column)}


def _metrics() -> dict[str, Any]:
    """The metrics of a run and the metrics of a worker."""
    names = ["name", "label", "help", "unit"]
    properties = {**{name: {"type": "string"} for name in names}, "is_rare": {"type": "boolean"}}
    item = {"type": "object", "required": [*properties], "properties": properties}
    metrics = {"type": "array", "items": item}
    directions = {"type": "object", "additionalProperties": {"type": "boolean"},
                  "description": "whether higher is better"}  # fmt: skip
    scopes = {"run": metrics, "worker": metrics, "curves": metrics, "recorded": metrics, "is_up": directions}
    return {"type": "object", "required": [*scopes], "properties": scopes}


def _message() -> dict[str, Any]:
    """The first message is whole, then ticks follow. A slow viewer gets whole again. The last message is over."""

    def of(kind: str, data: dict[str, Any]) -> dict[str, Any]:
        properties = {"event": {"const": kind}, "number": {"type": "integer"}, "data": data}
        return {"type": "object", "required": [*properties], "properties": properties}

    return {"oneOf": [of("whole", _ref("View")), of("tick", _ref("Tick")), of("over", {"type": "object"})]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _many(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(name)}


def _responses(description: str, schema: dict[str, Any], media: str, refusals: dict[str, str]) -> dict[str, Any]:
    why = {"application/json": {"schema": _ref("Refusal")}}
    refused = {code: {"description": text, "content": why} for code, text in (_REFUSALS | refusals).items()}
    return {"200": {"description": description, "content": {media: {"schema": schema}}}, **refused}


def _get(summary: str, schema: dict[str, Any], *parameters: dict[str, Any], media: str = "application/json") -> Any:
    refusals = {"404": "no such run"} if parameters else {}
    if _QUERY in parameters:
        refusals["503"] = "the maximum of viewers is reached"
    responses = _responses(summary, schema, media, refusals)
    return {"get": {"summary": summary, "parameters": list(parameters), "security": [{}, {"token": []}],
                    "responses": responses}}  # fmt: skip


def _post(
    summary: str, result: str, needed: str, properties: dict[str, Any], refusals: dict[str, str]
) -> dict[str, Any]:
    body = {"schema": {"type": "object", "required": [needed], "properties": properties}}
    refusals = {"400": "the body is not a JSON object", "413": "the body is too long", **refusals}
    return {
        "post": {
            "summary": summary, "parameters": [_RUN], "security": [{"token": []}],
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": _responses(result, _ref("Done"), "application/json", refusals),
        }
    }  # fmt: skip
