"""What every mode is told of a run, who its workers are, and how both are spelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from itertools import islice
from typing import Any, Literal

from ....common.wire.records import Outcome

_NUM_NAMED = 8  # ranks in a sentence


@dataclass(frozen=True)
class Common:
    """What every mode is told of the run."""

    training_steps: int | None = 1_000_000  # of each worker; None: until its own loop ends
    num_workers: int | None = None  # training starts when all of them have joined
    min_workers: int = 1  # with fewer, training holds
    max_staged: int | None = None  # uploads that lie in memory at once; None: one of each worker may
    weighting: Literal["samples", "equal"] = "samples"
    delayed_update: bool = False  # workers compute their next contribution while an exchange is in flight
    leaves_out: bool = False  # a codec of the run's does, more than weights themselves survive
    keeps_most: bool = False  # contributions' does for later, which outer momentum would add up


@dataclass(slots=True)
class Member:
    """A live worker."""

    rank: int
    pending: Outcome | None = None  # what it will be replied to with; None: it computes
    is_away: bool = False  # its connection is lost: what is pending stays so until it asks again
    is_fresh: bool = True  # nothing contributed since it was let in


def names(ranks: Any) -> str:
    """The first few ranks of many, in a sentence."""
    first = list(islice(ranks, _NUM_NAMED + 1))
    return ", ".join(map(str, first[:_NUM_NAMED])) + (", ..." if len(first) > _NUM_NAMED else "")


def canonical(value: Any) -> Any:
    """As JSON, in one way: whatever has no order of its own is sorted."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return [[canonical(key), canonical(value[key])] for key in sorted(value)]
    if isinstance(value, set | frozenset):
        value = sorted(value)
    return [canonical(entry) for entry in value] if isinstance(value, list | tuple) else value
