"""The filter of `ps-runs list`: words, and terms such as mode=ssp, loss<0.3, tags=baseline, lr!=0.1. As on the page."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.errors import UsageError
from ..common.runstore.reading import StoredRun

_TERM = re.compile(r"([A-Za-z_][\w.]*)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
_ALIASES = {"run": "name", "task": "work", "script": "work", "tag": "tags", "workers": "num_workers"}


def fitting(
    runs: Sequence[StoredRun], settings: Mapping[int, Mapping[str, Any]], terms: Sequence[str]
) -> list[StoredRun]:
    """Returns the runs that fit all terms. `settings`: by a run's key. Raises UsageError for an unknown name."""
    known = [_values(run, settings.get(run.key, {})) for run in runs]
    found = list(zip(runs, known, strict=True))
    for term in terms:
        if (parsed := _TERM.fullmatch(term)) is None:
            word = term.lower()
            found = [item for item in found if any(word in text for text in _words(item[0]))]
            continue
        name, sign, wanted = _ALIASES.get(parsed[1], parsed[1]), parsed[2], parsed[3]
        if runs and not any(_find(values, name) for values in known):
            fix = "e.g. mode=ssp, lr<0.1, config.width=64, tags=baseline"
            raise UsageError(f"{term}: no run has '{name}'", fix=fix)
        found = [item for item in found if _fits(_find(item[1], name), sign, wanted)]
    return [run for run, _ in found]


def _words(run: StoredRun) -> list[str]:
    return [text.lower() for text in (run.id, run.label, run.mode, run.work, run.state, run.note, *run.tags)]


def _values(run: StoredRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all values of a run by name; the first of a name counts."""
    fields = run.model_dump(exclude={"metrics", "recorded"}) | {"name": run.label}
    return {**settings, **run.recorded, **run.metrics, **fields}


def _find(values: Mapping[str, Any], name: str) -> list[Any]:
    """Returns the values of a name, or of settings that end in it; empty: there is none."""
    if name in values:
        return values[name] if isinstance(values[name], list) else [values[name]]
    return [value for key, value in values.items() if key.endswith(f".{name}")]


def _fits(values: list[Any], sign: str, wanted: str) -> bool:
    if sign == "!=":
        return not _fits(values, "=", wanted)
    right = _number(wanted)
    for value in values:
        left, text = _number(value), "none" if value is None else str(value).lower()
        if left is not None and right is not None:
            if _ORDERS[sign](left, right):
                return True
        elif sign == "=" and fnmatch.fnmatchcase(text, wanted.lower()):
            return True
    return False


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
