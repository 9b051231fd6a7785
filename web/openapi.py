"""What programs may ask, as OpenAPI 3.1: the schemas are those of the types that are sent."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from ..common.reporting.status import Status
from ..common.reporting.watched import Happened, Tick, Watched
from ..common.version import PROGRAM_VERSION

_RUN = {"name": "run", "in": "path", "required": True, "schema": {"type": "string"},
        "description": "its name, or `live`: the newest that goes on"}  # fmt: skip


@cache
def description() -> dict[str, Any]:
    """The document at /api/openapi.json."""
    kinds = [(kind, "serialization") for kind in (Status, Tick, Watched, Happened)]
    _, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "paramserver", "version": PROGRAM_VERSION},
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/api/health": _get("whether the page is there", {"type": "object"}),
            "/api/session": _get("what the caller may do", {"type": "object"}),
            "/api/runs": _get("all runs, a line each", {"type": "array", "items": {"type": "object"}}),
            "/api/runs/{run}": _get("all that the page shows of one", _ref("Watched"), _RUN),
            "/api/runs/{run}/status": _get("where it stands", _ref("Tick"), _RUN),
            "/api/runs/{run}/workers": _get("its workers", {"type": "array", "items": {"type": "object"}}, _RUN),
            "/api/runs/{run}/metrics": _get("figures over time, in columns", {"type": "object"}, _RUN),
            "/api/runs/{run}/events": _get("what happened", {"type": "array", "items": _ref("Happened")}, _RUN),
            "/api/runs/{run}/controls": {"post": _control()},
            "/api/events": _get("live, as server-sent events: whole, tick, ..., over", _ref("Tick"), _QUERY,
                                media="text/event-stream"),
            "/ws/events": _get("the same over a WebSocket: {event, number, data}", _ref("Tick"), _QUERY),
        },
    }  # fmt: skip


_QUERY = {**_RUN, "in": "query", "required": False}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _get(what: str, schema: dict[str, Any], *parameters: dict[str, Any], media: str = "application/json") -> Any:
    answer = {"description": what, "content": {media: {"schema": schema}}}
    missing = {"404": {"description": "no such run"}} if parameters else {}
    return {"get": {"summary": what, "parameters": list(parameters), "responses": {"200": answer, **missing}}}


def _control() -> dict[str, Any]:
    properties = {
        "do": {"type": "string", "description": "one of `about.controls`"},
        "rank": {"type": "integer", "description": "of the worker that it is about"},
        "name": {"type": "string", "description": "with `set`: which setting"},
        "value": {"description": "with `set`: its new value"},
    }
    body = {"schema": {"type": "object", "required": ["do"], "properties": properties}}
    refusals = {"401": "no token", "403": "another page's", "409": "the run is over", "422": "cannot be done, and why"}
    return {
        "summary": "ask the run for something, at its next commit",
        "parameters": [_RUN],
        "security": [{"token": []}],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": {"description": "done"}, **{code: {"description": why} for code, why in refusals.items()}},
    }
