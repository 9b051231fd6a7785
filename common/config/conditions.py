"""Parses short texts of settings: intervals and conditions on metrics. Pure.

every("100"), every("30s"), every("1epoch")
condition("accuracy >= 0.98")
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

_EVERY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(steps?|s|epochs?)?")
_CONDITION = re.compile(r"([^\s<>=](?:[^<>=]*[^\s<>=])?) *(<=|>=|<|>) *(\S+)")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Every(NamedTuple):
    """An interval of training steps, seconds or epochs. In an epoch all workers together use the data set once."""

    amount: float
    unit: Literal["steps", "seconds", "epochs"]


class Condition(NamedTuple):
    """A comparison of a metric with a bound."""

    metric: str
    sign: str
    bound: float

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric is present and meets the bound."""
        return self.metric in metrics and _SIGNS[self.sign](metrics[self.metric], self.bound)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.bound:g}"


def every(text: str) -> Every:
    """Return the interval that `text` means. Raises ValueError for other text."""
    found = _EVERY.fullmatch(text.strip())
    amount = float(found[1]) if found else 0.0
    unit = (found[2] or "steps")[:2] if found else ""
    if not 0 < amount < math.inf or (unit != "s" and amount != int(amount)):
        raise ValueError(f"'{text}' is no interval; write 100 (steps), 30s or 1epoch")
    return Every(amount, {"st": "steps", "s": "seconds", "ep": "epochs"}[unit])  # type: ignore[arg-type]


def condition(text: str) -> Condition:
    """Return the condition that `text` means. Raises ValueError for other text."""
    found = _CONDITION.fullmatch(text.strip())
    try:
        assert found is not None and math.isfinite(float(found[3]))
        return Condition(found[1], found[2], float(found[3]))
    except (AssertionError, ValueError):
        raise ValueError(f"'{text}' is no condition; write e.g. 'accuracy >= 0.98' or 'loss < 0.1'") from None
