"""The settings of every mode, the live workers, and their spelling."""

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
    """Settings of the run that every mode gets."""

    training_steps: int | None = 1_000_000  # of each worker; None: until its own loop ends
    num_workers: int | None = None  # training starts when all of them have joined
    min_workers: int = 1  # with fewer, training holds
    max_staged: int | None = None  # uploads in memory at once; None: one of each worker
    weighting: Literal["samples", "equal"] = "samples"
    delayed_update: bool = False  # workers compute their next contribution while an exchange is in flight
    rounds: bool = False  # the run has a codec: encoded weights would lose small steps
    keeps_most: bool = False  # the contributions' codec sends most of a delta later; outer momentum would sum it up


@dataclass(slots=True)
class Member:
    """A live worker."""

    rank: int
    pending: Outcome | None = None  # the outcome of its pending reply; None: it computes
    is_away: bool = False  # its connection is lost: the pending reply waits until it asks again
    is_fresh: bool = True  # nothing contributed since it was let in


def names(ranks: Any) -> str:
    """Returns the ranks in a sentence; of many the first few."""
    first = list(islice(ranks, _NUM_NAMED + 1))
    return ", ".join(map(str, first[:_NUM_NAMED])) + (", ..." if len(first) > _NUM_NAMED else "")


def canonical(value: Any) -> Any:
    """Returns JSON in a canonical form: collections without an order are sorted."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return [[canonical(key), canonical(value[key])] for key in sorted(value)]
    if isinstance(value, set | frozenset):
        value = sorted(value)
    return [canonical(entry) for entry in value] if isinstance(value, list | tuple) else value
