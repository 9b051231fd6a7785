"""Detects a script that takes over a rank with a restarted schedule or counters.

The server and `session.shard()` resume at the rank's position. The script's own counters do not, unless the script
gives them to `session.state()` or computes them from `session.step`. Before the first step of a process on a rank that
has contributed before, this module compares the script's learning rates with those of the rank:

    script                                          at its first step there
    ------                                          -----------------------
    has called session.state()                      nothing
    has read session.step                           nothing; a warning if its rate restarts
    its rate is the rank's first one, not its       an error, if the optimizer has a scheduler, or if the rank's rate
    last one                                        changed more than once: a script may make one change by hand
    anything else                                   one warning, unless it loops over session.epochs()
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler

from ....common.errors import UsageError
from ....common.reporting.log import get_logger
from ...session import Progress

log = get_logger()

_SETTING, _VARIABLE = "worker.accept_restarted_schedule", "PS_WORKER__ACCEPT_RESTARTED_SCHEDULE"
_FIX = "call session.state(scheduler=scheduler) before the loop, or compute rate and counters from session.step"


class Restarted:
    """The check of one script. `accepts`: the user allows the schedule to restart."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = (), accepts: bool = False) -> None:
        self.optimizers, self._accepts = optimizers, accepts
        self.has_state = self.knows_step = self.has_epochs = False  # parts of the session that the script has used
        self._has_warned = False

    def look(self, progress: Progress, expected: int | None) -> None:
        """Check the script before its first training step after a START. Raises UsageError for a restarted schedule.

        `expected`: the step after this process's newest one; None: it has taken none.
        """
        if self.has_state or self._accepts:
            return
        is_aware, change = self.knows_step or self.has_epochs, ""
        if expected is not None:  # a server went back to a snapshot, or the run went on without this rank for a while
            if not (moved := progress.position - expected):
                return
            change = f"the run has moved this process by {moved:+d} training steps"
        elif not progress.row.steps:
            return
        else:
            compared = zip(rates_of(self.optimizers), progress.rates.first, progress.rates.last, strict=False)
            if anew := next(((rate, last) for rate, first, last in compared if rate == first != last), None):
                names = sorted(set(schedulers_of(self.optimizers)))
                change = f"its learning rate restarts at {anew[0]:g} instead of {anew[1]:g}"
                change += f" ({', '.join(names)})" if names else ""
                if not self.knows_step and (names or progress.rates.num_changes > 1):
                    raise UsageError(
                        f"rank {progress.rank} resumes at training step {progress.position}, but {change}",
                        fix=f"{_FIX}; to restart the schedule on purpose, set {_SETTING}=true ({_VARIABLE}=1)",
                    )
                is_aware = False
        if is_aware or self._has_warned:
            return
        self._has_warned = True
        meaning = "the script has not called session.state(): its schedulers and counters restart, the weights do not"
        log.warning(
            "nothing_registered",
            rank=progress.rank,
            step=progress.position,
            meaning=f"{meaning}; {change}" if change else meaning,
            fix=_FIX,
        )


def rates_of(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[float, ...]:
    """The current learning rate of each parameter group."""
    return tuple(float(group.get("lr", 0.0)) for optimizer in optimizers for group in optimizer.param_groups)


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Names of the classes of the torch schedulers that use these optimizers' parameter groups.

    An optimizer does not know its schedulers, so this function looks at all objects of the process. It takes 0.1 s and
    runs once.
    """
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    found = [item for item in gc.get_objects() if issubclass(type(item), LRScheduler)]
    return [type(item).__name__ for item in found if any(id(group) in groups for group in item.optimizer.param_groups)]
