"""Events of a run as sentences, from their kind and fields in the history (docs/robustness.md): the page's, live or on
record. Pure."""

from __future__ import annotations

from typing import Any

from ..reporting.report import figure
from ..reporting.watched import Happened

_KINDS = {"start": "started", "join": "joined", "leave": "left", "end": "ended"}  # as the page says them


def happened(at: float, kind: str, rank: int | None, fields: dict[str, Any]) -> Happened:
    """`at` in Unix seconds. A kind that is not known, as of a newer version, is shown by its name alone; so is one
    that lacks a field."""
    try:
        text = _sentence(kind, rank, fields)
    except (KeyError, TypeError, ValueError):
        text = kind
    return Happened(at=at, kind=_KINDS.get(kind, kind), text=text, rank=rank)


def _sentence(kind: str, rank: int | None, fields: dict[str, Any]) -> str:
    match kind:
        case "start":
            return f"goes on from {fields['source']}" if fields["source"] else f"{fields['mode']}, from the beginning"
        case "join":
            again = "joined" if fields["incarnation"] == 1 else "joined again"
            return f"worker {rank} {'came back where it was' if fields['resumed'] else again}"
        case "leave":
            why = f": {fields['reason']}" if fields.get("reason") else ""
            return f"worker {rank} is gone ({fields['how']}){why}"
        case "snapshot":
            return f"snapshot of version {fields['version']} in {fields['path']}"
        case "evaluated":
            figures = ", ".join(f"{name} {figure(value)}" for name, value in fields["figures"].items())
            return f"step {fields['step']}: {figures}{', the best so far' if fields.get('best') else ''}"
        case "control":
            return fields["told"] if fields["done"] else f"{fields['do']} was asked for and not done: {fields['told']}"
        case "end":
            return fields.get("reason") or f"the run is over, at version {fields['version']}"
    return kind
