"""Finds a script that takes a rank and whose schedule or counters begin anew.

The server and `session.shard()` go on where the rank was. What the script counts by itself does not, unless it is given
to `session.state()` or computed from `session.step`. Before the first step of a process on a rank that has contributed
before, this module compares the script's learning rates with those of the rank:

    script                                          at its first step there
    ------                                          -----------------------
    has called session.state()                      nothing
    has read session.step                           nothing; a warning if its rate begins anew
    its rate is the rank's first one, not its       stopped, if a scheduler is made on the optimizer, or if the rank's
    last one                                        rate has changed more than once: one change may be made by hand
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

_SETTING = "worker.accept_restarted_schedule"
_FIX = "call session.state(scheduler=scheduler) before the loop, or compute rate and counters from session.step"


class Restarted:
    """Of one script; `accepts`: the user's word that its schedule is to begin anew."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = (), accepts: bool = False) -> None:
        self.optimizers, self._accepts = optimizers, accepts
        self.has_state = self.knows_step = self.has_epochs = False  # what the script has asked the session for
        self._position: int | None = None  # training steps behind the rank, as this process counts them
        self._num_starts = -1  # that were looked at
        self._is_said = False

    def look(self, progress: Progress) -> None:
        """Before each training step: after a START, which says where the rank goes on. UsageError for a schedule that
        begins anew."""
        before, self._position = self._position, progress.position + 1
        if self._num_starts == progress.num_starts:
            return
        self._num_starts = progress.num_starts
        if self.has_state or self._accepts:
            return
        if before is not None:  # a process that has taken steps
            self._look_again(progress, before)
        elif progress.num_counted:
            self._look_first(progress)

    def _look_first(self, progress: Progress) -> None:
        compared = zip(rates_of(self.optimizers), progress.first_rates, progress.last_rates, strict=False)
        anew = next(((rate, last) for rate, first, last in compared if rate == first != last), None)
        if anew is None:
            if not (self.knows_step or self.has_epochs):
                self._warn(progress, "")
            return
        names = sorted(set(schedulers_of(self.optimizers)))
        rate, last = anew
        change = f"its learning rate restarts at {rate:g} instead of {last:g}"
        if names:
            change += f" ({', '.join(names)})"
        if self.knows_step or not (names or progress.num_rate_changes > 1):
            self._warn(progress, change)
            return
        raise UsageError(
            f"rank {progress.rank} resumes at training step {progress.position}, but {change}",
            fix=f"{_FIX}; to restart the schedule on purpose, set {_SETTING}=true ({_variable(_SETTING)}=1)",
        )

    def _look_again(self, progress: Progress, before: int) -> None:
        """A server that went back to a snapshot, or a rank that was let go for a while."""
        if (moved := progress.position - before) and not (self.knows_step or self.has_epochs):
            self._warn(progress, f"the run has moved this process by {moved:+d} training steps")

    def _warn(self, progress: Progress, change: str) -> None:
        if self._is_said:
            return
        self._is_said = True
        meaning = "the script has not called session.state(): its schedulers and counters restart, the weights do not"
        log.warning(
            "nothing_registered",
            rank=progress.rank,
            step=progress.position,
            meaning=f"{meaning}; {change}" if change else meaning,
            fix=_FIX,
        )


def rates_of(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[float, ...]:
    """The learning rate of each group, now."""
    return tuple(float(group.get("lr", 0.0)) for optimizer in optimizers for group in optimizer.param_groups)


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Names of the classes of torch's schedulers that are made on these optimizers, or on one that shares their groups.

    No scheduler is known to its optimizer, so all objects of the process are looked at: a tenth of a second, once.
    """
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    found = [item for item in gc.get_objects() if issubclass(type(item), LRScheduler)]
    return [type(item).__name__ for item in found if any(id(group) in groups for group in item.optimizer.param_groups)]


def _variable(setting: str) -> str:
    return "PS_" + setting.replace(".", "__").upper()
