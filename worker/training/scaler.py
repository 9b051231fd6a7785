"""A GradScaler that tells the session about the steps that it does not take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...common.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Scaling:
    """The scalers of one session. `num_steps` grows with each step() of an optimizer."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.skipped: Callable[[Any], None] = lambda _: None  # called with the optimizer whose step is not taken
        self._is_ours = False  # a scaler of the session calls the optimizer

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        """Let a scaler tell about skipped steps."""
        step = scaler.step

        def watched(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            before = self.num_steps
            with self._ours():
                result = step(optimizer, *args, **options)
            if self.num_steps == before:
                self.skipped(optimizer)
            return result

        scaler.step = watched  # type: ignore[method-assign]

    @contextmanager
    def _ours(self) -> Iterator[None]:
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def check(self) -> None:
        """Raises UsageError if a scaler calls the optimizer that does not tell about skipped steps."""
        if not self._is_ours:
            raise UsageError(
                "torch.amp.GradScaler on the optimizer of session.optimizer(): the run would not know of the steps "
                "that it skips",
                fix='scaler = session.scaler("cuda"), with the arguments of GradScaler; bfloat16 needs no scaler',
            )
