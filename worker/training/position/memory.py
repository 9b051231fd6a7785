"""A script's state beside the model (`session.state`), and its position, at the beginning of each contribution.

Both travel with the contribution and count when it counts. A process that takes the rank later gets the state and
position from the beginning of the last counted contribution. It computes that contribution again, on the newer weights,
and does not send it. So the script itself repeats its work between two steps, wherever the previous process was killed.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from ....common.errors import UsageError
from ....common.reporting.log import get_logger
from ...conversation.messages import Begun
from ...session import Progress
from ...tensors.packed import pack, unpack
from .data import LOOPS, DataPosition

log = get_logger()

_GROUPS = "optimizer groups"
_GENERATORS = "generators"
_SHOWN = 200  # longest part of a script's own error that a message shows, in characters


class Memory:
    """The memory of one rank's script. Its position in the data is in `data`."""

    def __init__(self, data: DataPosition) -> None:
        self.data, self._strategy, self._progress = data, data.strategy, data.progress
        self._objects: dict[str, Any] = {}
        self._first = b""  # the packed state before the first batch
        self._noted: Begun | None = None  # state and position at the beginning of the open contribution
        self._num_starts = self._progress.num_starts
        # a loop lay behind the rank, and the script has done its work after it: the next batch restores the state again
        self.passed_over = False

    def add(self, objects: Mapping[str, Any]) -> None:
        """Send these objects with each contribution from now on, and load their saved state if the server has one.

        Raises UsageError after the first batch, for a name given twice, and for a state that does not fit.
        """
        if self.data.has_begun:
            fix = "call it after session.optimizer() and before the loop"
            raise UsageError("session.state() after the first batch: the state could not be restored", fix=fix)
        for name, item in objects.items():
            if name in self._objects:
                raise UsageError(f"session.state({name}=...) was called before", fix="use another name")
            self._objects[name] = item
        payload = self._pack()
        self.data.use()
        if (begun := self._strategy.begun()) is not None:
            self._load(begun.payload, objects)
        else:
            self._first = payload

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.data.optimizers for group in optimizer.param_groups]

    def _pack(self) -> bytes:
        positions = [(cursor.position, cursor.epoch_at) for cursor in self.data.cursors]
        loops = {LOOPS: positions} if len(positions) > 1 else {}
        if not self._objects:
            return pack(loops)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        return pack({name: item.state_dict() for name, item in self._objects.items()} | {_GROUPS: groups} | loops)

    def _load(self, payload: bytes, names: Iterable[str]) -> None:
        """Restore the objects of these names, and the hyperparameters of the optimizer's groups."""
        found = unpack(payload)
        for name in (*names, _GROUPS):
            if name not in found:
                log.warning("state_not_there", name=name, meaning="the rank has no saved state of this name")
            elif name == _GROUPS:
                for group, saved in zip(self._groups, found[name], strict=False):
                    _fill(group, saved)
            else:
                try:
                    self._objects[name].load_state_dict(found[name])
                except Exception as error:
                    message = f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"
                    raise UsageError(
                        f"session.state({name}=...) does not accept the state that the run saved: {message}",
                        fix="resume with the script that began the run, or use another name, which begins without "
                        "saved state",
                    ) from error

    # ---- while the loop runs ------------------------------------------------------------------

    def note(self) -> bool:
        """Called before a batch is requested or a step taken. Saves state and position where a contribution begins.

        Returns whether one begins here.
        """
        self.data.has_begun = True
        progress = self._progress
        if self.passed_over and (begun := self._strategy.begun()) is not None:
            self.passed_over = False
            if self._objects:
                self._load(begun.payload, self._objects)
        if self.data.is_sent and self._noted is None and not progress.is_replaying and not self.has_moved:
            self._noted = Begun(self.data.position_record(), self._pack())
            return True
        return False

    def skipped(self) -> None:
        """A step was not taken. If it would have been the first of a contribution, that begins after it.

        A replay with other weights might take it, and the script may do work between these steps, such as averaging.
        """
        progress = self._progress
        if progress.steps_left == progress.local_steps and not self.data.is_parted:
            self._noted = None

    def mark(self) -> None:
        """Note the beginning of a batch, for a loop that does not use `shard()`."""
        self.data.is_marked = True
        if self.has_moved:
            self.move()
        self.note()

    def take(self) -> Begun | None:
        """Return the saved beginning of the contribution that is complete now."""
        noted, self._noted = self._noted, None
        return noted

    @property
    def has_moved(self) -> bool:
        """Whether the server gave a new start position that this process has not gone to yet."""
        return self.data.is_sent and self._num_starts != self._progress.num_starts

    def move(self, may_replay: bool = True) -> None:
        """Load the rank's state and position as they were at the new start."""
        self._num_starts, self._noted = self._progress.num_starts, None
        begun = self._strategy.begun()
        self.data.apply_start()
        self.data.forget()
        if self._objects and (begun is not None or self._first):
            self._load(self._first if begun is None else begun.payload, self._objects)
        position = self.data.beginning()
        if position is not None and may_replay:
            self.data.go_back(position)
        elif begun is None:
            self.data.set_first_epoch()


class Generators:
    """State of the random generators of this process: torch (all devices), Python and NumPy."""

    def state_dict(self) -> dict[str, Any]:
        version, numbers, normal = random.getstate()
        kind, words, *rest = np.random.get_state(legacy=True)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": (version, torch.tensor(numbers, device="cpu"), normal),
            "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        torch.set_rng_state(saved["torch"])
        if len(saved["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(saved["cuda"])
        version, numbers, normal = saved["python"]
        random.setstate((version, tuple(numbers.tolist()), normal))
        kind, words, *rest = saved["numpy"]
        np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))


class _Generator:
    """Gives a `torch.Generator` of the script the methods of a stateful object."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._generator.set_state(saved["state"])


def stateful(objects: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    """Wrap generators as stateful objects. Raises UsageError, with the name, for an object without state methods."""
    found: dict[str, Any] = {}
    for name, item in objects.items():
        if isinstance(item, torch.Generator):
            found[name] = _Generator(item)
        elif callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)):
            found[name] = item
        else:
            raise UsageError(
                f"session.state({name}=...) is a {type(item).__name__}, without state_dict() and load_state_dict()",
                fix="give it both methods: state_dict() returns tensors and JSON, load_state_dict() restores them",
            )
    if rng:
        found[_GENERATORS] = Generators()
    return found


def _fill(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore hyperparameters. A learning rate that is a tensor stays the same object."""
    for key, value in saved.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            current.copy_(value)
        else:
            group[key] = value


# ---- restarted -----------------------------------------------------------------------------------
# Detects a script that takes over a rank with a restarted schedule or counters.
#
# The server and `session.shard()` resume at the rank's position. The script's own counters do not, unless the script
# gives them to `session.state()` or computes them from `session.step`. Before the first step of a process on a rank
# that has contributed before, `Restarted` compares the script's learning rates with those of the rank:
#
#     script                                          at its first step there
#     ------                                          -----------------------
#     has called session.state()                      nothing
#     has read session.step                           nothing; a warning if its rate restarts
#     its rate is the rank's first one, not its       an error, if the optimizer has a scheduler, or if the rank's rate
#     last one                                        changed more than once: a script may make one change by hand
#     anything else                                   one warning, unless it loops over session.epochs()


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
