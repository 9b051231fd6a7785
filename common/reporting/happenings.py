"""Writes events of a run as sentences, from their kind and fields in the history (docs/robustness.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .pictures.words import short_number
from .view import Event

_GONE = {"finished": "finished", "failed": "failed", "closed": "is gone", "lease": "is gone",
         "replaced": "is gone: a newer process has its rank"}  # fmt: skip


def event(at: float, kind: str, rank: int | None, fields: Mapping[str, Any]) -> Event:
    """Returns the event with its sentence; `at` is in Unix seconds.

    The sentence of an unknown kind (from a newer version), or of an event that lacks a field, is the kind's name.
    """
    try:
        text = _sentence(kind, rank, fields)
    except (KeyError, TypeError, ValueError):
        text = kind
    return Event(at=at, kind=kind, text=text, rank=rank, fields=fields)


def _sentence(kind: str, rank: int | None, fields: Mapping[str, Any]) -> str:
    match kind:
        case "start":
            return f"continues from {fields['source']}" if fields["source"] else f"{fields['mode']}, from the beginning"
        case "join":
            again = "joined" if fields["incarnation"] == 1 else "joined again"
            return f"worker {rank} {'came back where it was' if fields['resumed'] else again}"
        case "leave":
            how = fields["how"]
            if how == "goodbye":
                return f"worker {rank} {'finished' if fields.get('finished') else 'left'}"
            why = f": {fields['reason']}" if fields.get("reason") else ""
            return f"worker {rank} {_GONE.get(how, how)}{why}"
        case "snapshot":
            return f"snapshot of version {fields['version']} in {fields['path']}"
        case "evaluated":
            metrics = ", ".join(f"{name} {short_number(value)}" for name, value in fields["metrics"].items())
            return f"step {fields['step']}: {metrics}{', the best so far' if fields.get('best') else ''}"
        case "control":
            return str(fields["result"]) if fields["done"] else f"{fields['do']} was refused: {fields['result']}"
        case "end":
            return str(fields.get("reason") or f"the run is over, at version {fields['version']}")
    return kind
