"""Several shards as transcripts: one file beside this one is one story, in the words of `telling.py` and `sharded.py`.

The right-hand side is what the coordinator does, in order; every follower that has heard of it did the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.errors import ParamServerError
from paramserver.ps.core import events
from paramserver.tests.scenarios.sharded import LINES, Shards
from paramserver.tests.scenarios.telling import Workers, compare, in_words, make_run, play

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
_DIGEST = re.compile(r"shard (\d+) [0-9a-f]{16}")


def begin(settings: dict[str, Any], _: list[str]) -> Callable[[str], str]:
    shards = Shards(partial(make_run, settings), settings["shards"])
    workers = Workers(shards.run.incarnation)

    def tell(text: str) -> str:
        before = len(shards.shards[0].applied)
        refused = _do(shards, workers, text)
        _learn(shards, workers, before)
        found = [effect for _, effects in shards.shards[0].applied[before:] for effect in effects]
        lines = [*refused, _DIGEST.sub(r"shard \1 DIGEST", in_words(found))]
        if behind := shards.behind():
            lines.append(f"[{', '.join(f'shard {shard}: {num} behind' for shard, num in behind.items())}]")
        return " ".join(lines)

    return tell


def _do(shards: Shards, workers: Workers, text: str) -> list[str]:
    """What a line says is done, and everything arrives that can; what was refused on the way."""
    if text.startswith("after "):
        shards.now += float(text.split()[1])
    try:
        match text.split():
            case ["hold", shard]:
                shards.links[int(shard)].is_held = True
            case ["let", shard]:
                shards.links[int(shard)].is_held = False
            case ["cut", shard]:
                shards.links[int(shard)].cut()
            case ["mend", shard]:
                shards.links[int(shard)].is_up = True
            case ["pause", "0"]:
                shards.pause()
            case ["go", "on", "0"]:
                shards.go_on()
            case ["damage", shard]:
                shards.is_checked = False
                shards.shards[int(shard)].run.policy.version += 1
            case ["shard", shard, "says", *words]:
                _says(shards, workers, int(shard), " ".join(words))
            case _:
                where = re.search(r" at ([\d,]+)$", text)
                at = [int(shard) for shard in where[1].split(",")] if where else None
                for event in workers.events_of(text.removesuffix(where[0]) if where else text):
                    num = len(shards.shards[0].applied)
                    shards.offer(event, at)
                    shards.pump()
                    _learn(shards, workers, num)
        shards.pump()
    except ParamServerError as error:
        return [f"refused: {error.message};"]
    return []


def _learn(shards: Shards, workers: Workers, since: int) -> None:
    for _, effects in shards.shards[0].applied[since:]:
        workers.learn(effects)


def _says(shards: Shards, workers: Workers, shard: int, text: str) -> None:
    """Its next report is what no shard says."""
    outbox = shards.shards[shard].sequencer.outbox
    if text.startswith("text "):
        LINES.read(text.removeprefix("text "))
    elif text == "a report after a gap":
        shards.coordinator.hear(shard, outbox.num_put + 2, events.Stored(1, 0))
    else:
        outbox.put(workers.event(text))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    compare(path, play(path.read_text(encoding="utf-8"), begin))
