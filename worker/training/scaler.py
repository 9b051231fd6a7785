"""GradScalers tell the session about the steps that they do not take. A foreign one is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...common.errors import UsageError


class Scaling:
    """The scalers of one session. `num_steps` grows with each step() of an optimizer."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.skipped: Callable[[Any], None] = lambda _: None  # called with the optimizer whose step is not taken
        self._has_any = False

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        """Let a scaler tell about skipped steps."""
        step = scaler.step
        self._has_any = True

        def watched(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            before = self.num_steps
            result = step(optimizer, *args, **options)
            if self.num_steps == before:
                self.skipped(optimizer)
            return result

        scaler.step = watched  # type: ignore[method-assign]

    def check(self) -> None:
        """Raises UsageError if the scaler that asks is not the session's: the session has none."""
        if not self._has_any:
            raise UsageError(
                "torch.amp.GradScaler on the optimizer of session.optimizer(): the run would not know of the steps "
                "that it skips",
                fix="scaler = session.scaler(...), with the arguments of your GradScaler; bfloat16 needs no scaler",
            )
