"""Fields of events are known by name on two sides: what a reader uses, each sender sends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.drills.chaos.job import _SHOWN
from paramserver.launch.view import READ

ROOT = Path(__file__).parents[2]
_LEVELS = {"debug", "routine", "info", "warning", "error", "note"}
USED = [(name, fields) for name, fields in READ.items()]
USED += [(name, (field,)) for name, field in _SHOWN.items()]


def sent() -> Iterator[tuple[str, set[str], bool]]:
    """Each event in the code with its fields, and whether these are all: not where a mapping is passed on."""
    for package in ("ps", "relay", "worker", "serve", "web", "common", "launch/job.py"):
        for path in [ROOT / package] if package.endswith(".py") else (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(ast.Attribute(attr=level), [first, *_], keywords) if level in _LEVELS:
                        fields = {word.arg for word in keywords if word.arg is not None}
                        fields |= {"reason"} if level == "note" else set()
                        names = [part.value for part in ast.walk(first) if isinstance(part, ast.Constant)]
                        for name in names if isinstance(first, ast.Constant | ast.IfExp) else ():
                            yield str(name), fields, all(word.arg is not None for word in keywords)
                    case ast.Call(ast.Name("Log"), [_, ast.Constant(str(name)), ast.Dict(keys)]):
                        named = {key.value for key in keys if isinstance(key, ast.Constant)}
                        yield name, named, len(named) == len(keys)
                    case ast.Call(ast.Name("Log"), [_, ast.Constant(str(name)), _]):
                        yield name, set(), False


@pytest.fixture(scope="module")
def everything_sent() -> list[tuple[str, set[str], bool]]:
    return list(sent())


@pytest.mark.parametrize(("name", "fields"), USED)
def test_each_sender_of_an_event_sends_the_fields_that_are_read(
    everything_sent: list[tuple[str, set[str], bool]], name: str, fields: tuple[str, ...]
) -> None:
    senders = [(found, is_all) for event, found, is_all in everything_sent if event == name]
    assert senders, f"nothing sends {name}"
    assert [found for found, is_all in senders if is_all and not found.issuperset(fields) and "path" not in found] == []
