"""The run as transcripts: one file beside this one is one story, in the words of `telling.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.kinds import ContributionKind
from paramserver.tests.records import contributed
from paramserver.tests.scenarios.telling import Told, compare, in_words, make_run, play, restore

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


def begin(settings: dict[str, Any], restored: list[str]) -> Callable[[str], str]:
    """One process that carries the run."""
    run = make_run(settings)
    if restored:
        restore(run, restored)
    return Told(run).tell


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    compare(path, play(path.read_text(encoding="utf-8"), begin))


def test_snapshots_go_on_where_a_script_no_longer_steps_its_second_optimizer() -> None:
    tell = begin({"mode": "sync", "num_workers": 1, "keeps_snapshots": True, "every_steps": 1}, [])
    first = ["enter w0", "bring w0", "stored 1 v0", "contribute w0 s1 part 1", "contribute w0 s2 part 2"]
    lines = [tell(text) for text in [*first, *(f"contribute w0 s{seq} part 1" for seq in range(3, 70))]]
    assert ["snapshot 2" in text for text in lines].index(True) == len(first) + 64


def test_a_contribution_that_waits_is_forgotten_once_another_process_contributes() -> None:
    """In a group that is over by then, so that the new one is dropped: its discard is not the old one's."""
    run = make_run({"mode": "allreduce", "num_workers": 2})
    story = Told(run)
    for text in ("enter w0", "enter w1", "bring w0", "contribute w0 s1 mean", "leave w0", "enter w0"):
        story.tell(text)
    story.tell("contribute w1 s1 mean")
    found = run.apply(contributed(0, 2, 1, 1, generation=1, kind=ContributionKind.COMPLETION))
    assert in_words(found) == "discard w0#1; reply w0 DROPPED v1"
