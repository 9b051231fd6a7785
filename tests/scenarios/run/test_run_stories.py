"""The run as transcripts: one file beside this one is one story, in the words of `telling.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramserver.ps.core import effects
from paramserver.tests.scenarios.telling import Workers, compare, in_words, make_run, play, restore

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


def begin(settings: dict[str, Any], restored: list[str]) -> Callable[[str], str]:
    """One process that carries the run."""
    run = make_run(settings)
    if restored:
        restore(run, restored)
    workers = Workers(run.incarnation, dict.fromkeys(run.policy.rows, 0))
    now = 0.0

    def tell(text: str) -> str:
        nonlocal now
        if text.startswith("after "):
            now += float(text.split()[1])
        found: list[effects.Effect] = []
        for event in workers.events_of(text):
            new = run.apply(replace(event, at=now))
            workers.learn(new)
            found += new
        return in_words(found)

    return tell


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    compare(path, play(path.read_text(encoding="utf-8"), begin))
