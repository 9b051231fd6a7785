"""Measures values in a worker's process, such as CPU time, for the metrics of this worker.

Each heartbeat sends all values by name. A name here needs a metric of this name (`_measured` in
common/reporting/metrics.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...common.errors import UsageError
from ...common.reporting.summary import RECORDED
from ...common.reporting.usage import HERE

_MOST_RECORDED = 64  # metrics of a script
_MOST_CHARACTERS = 60  # of a name
_LEAST_S = 1.0  # between two norms
_SHARE = 200  # norms take at most this part of the time


def number_of(value: Any, name: str) -> float:
    """A number of the script, without its graph. Raises UsageError for a value that is no number."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        message = f"{name} is a {type(value).__name__}, and a metric is one number"
        raise UsageError(message, fix="give it one number: float(...)") from None


class Readings:
    """The newest values. The training thread writes them, and the heartbeat's thread reads them."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._recorded: dict[str, float] = {}
        self.note_at = 0.0  # when the next step is to be noted, on `time.perf_counter`

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Take the newest values of metrics that a script records. Raises UsageError for a value that is no number."""
        for name, value in metrics.items():
            key = f"{RECORDED}{name}"
            if key not in self._recorded and (len(name) > _MOST_CHARACTERS or len(self._recorded) >= _MOST_RECORDED):
                raise UsageError(
                    f"session.record({name[:_MOST_CHARACTERS]}=...) is one metric too many, or its name is too long",
                    fix=f"record at most {_MOST_RECORDED} metrics, with names of at most {_MOST_CHARACTERS} characters",
                )
            self._recorded[key] = number_of(value, f"session.record({name}=...)")

    def note(self, values: Mapping[str, float]) -> None:
        """Take the newest values of metrics of the table (`common/reporting/metrics.py`)."""
        self._values.update(values)

    def note_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note the learning rate and the gradients' norm of a step.

        Steps before `note_at` are left out, so that this costs no visible time. The rate may be a tensor on a GPU, so
        only the training thread reads it.
        """
        began = time.perf_counter()
        self._values["learning_rate"] = float(groups[0].get("lr", math.nan))
        gradients = [item.grad for group in groups for item in group["params"] if item.grad is not None]
        # The norm of a DTensor would need all processes of a worker.
        plain = [item for item in gradients if type(item) is torch.Tensor and not item.is_sparse]
        if plain:
            self._values["grad_norm"] = float(torch.nn.utils.get_total_norm(plain))
        self.note_at = began + max(_LEAST_S, _SHARE * (time.perf_counter() - began))

    def taken(self) -> dict[str, float]:
        """Returns all current values, by name."""
        found = {**self._values, **self._recorded, "memory_bytes": float(HERE.memory())}
        if torch.cuda.is_initialized():  # nothing of a GPU before the process uses one
            found["gpu_bytes"] = float(torch.cuda.memory_reserved())
            with suppress(ImportError, RuntimeError):  # no nvidia-ml-py, or a driver without it
                found["gpu"] = torch.cuda.utilization() / 100
        if (cpu := HERE.cpu()) is not None:
            found["cpu"] = cpu
        return found
