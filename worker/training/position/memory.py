"""What a script remembers beside the model (`session.state`), and where it was, when each contribution began.

It travels with that contribution and counts when it does. A process that takes the rank later is given it as it was at
the beginning of the last contribution that counts, and computes that contribution once more without sending it, on the
weights that came of it: so what the script does between two steps is done by the script again, whatever it is, and
wherever the process before was killed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....common.errors import UsageError
from ....common.reporting.log import get_logger
from ....common.wire.records import Position
from ...conversation.messages import Begun
from ...session import Progress
from ...strategies.base import Strategy
from ...tensors.packed import pack, unpack
from .taken import Taken

log = get_logger()

_GROUPS = "optimizer groups"
_GENERATORS = "generators"
_SHOWN = 200  # characters of an error of somebody else's


class Memory:
    """Of one rank's script; `strategy` says how this process is to begin."""

    def __init__(self, strategy: Strategy, taken: Taken, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._strategy, self._taken, self._optimizers = strategy, taken, optimizers
        self._objects: dict[str, Any] = {}
        self._first = b""  # all of it, before the first batch
        self._noted: Begun | None = None  # when the contribution under way began
        self._num_starts = self._progress.num_starts
        self.is_used = False
        self.has_begun = self.is_marked = False  # a batch was asked for, or a step taken; mark() is called
        self.is_tried = False  # a scaler has looked for infinities, and no step() has followed
        taken.memory = self

    @property
    def _progress(self) -> Progress:
        return self._strategy.progress

    def use(self) -> None:
        """From here on the script's place travels. What is remembered of the rank comes back, before the first
        batch."""
        if self.is_used or self.has_begun:
            return
        self.is_used = True
        if (position := self._beginning()) is not None:
            self._go_back(position)

    def _beginning(self) -> Position | None:
        """Where to go back to. A rank that is new may come into the middle of a training step of several parts."""
        if (begun := self._strategy.begun()) is not None:
            return begun.position
        progress = self._progress
        return Position(progress.training_steps - 1, 1, max(0, progress.batches - 1)) if progress.in_step else None

    def add(self, objects: Mapping[str, Any]) -> None:
        """These travel from here on, and have been loaded if there was anything of them. UsageError."""
        if self.has_begun:
            fix = "call it after session.optimizer() and before the loop"
            raise UsageError("session.state() after the first batch: it could not come back as it was", fix=fix)
        for name, item in objects.items():
            if name in self._objects:
                raise UsageError(f"session.state({name}=...) was said before", fix="give it another name")
            self._objects[name] = item
        payload = self._pack()
        self.use()
        if (begun := self._strategy.begun()) is not None:
            self._load(begun.payload, [*objects, _GROUPS])
        else:
            self._first = payload

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _pack(self) -> bytes:
        if not self._objects:
            return pack({})
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        return pack({name: item.state_dict() for name, item in self._objects.items()} | {_GROUPS: groups})

    def _load(self, payload: bytes, names: list[str]) -> None:
        found = unpack(payload)
        for name in names:
            if name not in found:
                log.warning("state_not_there", name=name, meaning="the rank had no such state: it begins anew")
            elif name == _GROUPS:
                for group, saved in zip(self._groups, found[name], strict=False):
                    _fill(group, saved)
            else:
                self._load_one(name, found[name])

    def _load_one(self, name: str, saved: Any) -> None:
        try:
            self._objects[name].load_state_dict(saved)
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"
            raise UsageError(
                f"session.state({name}=...) does not take what the run remembers: {message}",
                fix="go on with the script that the run was begun with, or give it another name: it begins anew then",
            ) from error

    # ---- while the loop runs ------------------------------------------------------------------

    def note(self) -> None:
        """A batch is about to be asked for, or a step to be taken: where a contribution begins it is remembered so.

        It begins anew after batches without a step, in which a scaler found infinities: with other weights it would
        not find them in the same batches, and the script does things between them (averages weights, say)."""
        self.has_begun = True
        progress = self._progress
        is_anew = self.is_tried and progress.steps_left == progress.local_steps and not self._taken.is_parted
        self.is_tried = False
        if self.is_used and (self._noted is None or is_anew) and not progress.is_replaying:
            num_passed = self._taken.num_used if is_anew else 0
            position = self._taken.where(progress.position, progress.local_steps, num_passed)
            self._noted = Begun(position, self._pack())

    def mark(self) -> None:
        """As `note`, of a loop with batches of its own."""
        self.is_marked = True
        if self.has_moved:
            self.move()
        self.note()

    def after_step(self) -> None:
        """Of a loop that says nothing of its batches: it goes on with what it has in hand."""
        if self.has_moved and not (self._taken.is_used or self.is_marked):
            self.move(may_replay=self._taken.is_parted)

    def take(self) -> Begun | None:
        """That of the contribution which is complete."""
        noted, self._noted = self._noted, None
        return noted

    @property
    def has_moved(self) -> bool:
        """The run has told this process to begin elsewhere, and it has not yet."""
        return self.is_used and self._num_starts != self._progress.num_starts

    def move(self, may_replay: bool = True) -> None:
        """Be what the rank was there."""
        self._num_starts, self._noted = self._progress.num_starts, None
        begun = self._strategy.begun()
        names = [*self._objects, _GROUPS] if self._objects else []
        if begun is not None:
            self._load(begun.payload, names)
        elif self._first:
            self._load(self._first, names)
        position = self._beginning()
        if position is not None and may_replay:
            self._go_back(position)
        elif begun is None:
            self._taken.begin_anew()

    def _go_back(self, position: Position) -> None:
        log.info("replaying", step=position.step, meaning="the rank's last step is computed once more, and not sent")
        self._taken.go_back(position)
        self._strategy.replay(position)

    def replayed(self) -> None:
        """The contribution has been computed once more."""
        num_missed = self._strategy.replayed()
        self._taken.go_on()
        if num_missed:
            message = (
                f"the run took {num_missed} training steps without this rank, which its script's state has not seen"
            )
            log.warning("state_is_behind", meaning=message)


class Generators:
    """Of this process: torch's, on all devices, Python's and NumPy's."""

    def state_dict(self) -> dict[str, Any]:
        version, numbers, normal = random.getstate()
        kind, words, *rest = np.random.get_state(legacy=True)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": (version, torch.tensor(numbers), normal),
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
    """A generator of the script's own."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._generator.set_state(saved["state"])


def stateful(objects: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    """As things with state_dict() and load_state_dict(). UsageError, which names it, for what is none."""
    found: dict[str, Any] = {}
    for name, item in objects.items():
        if isinstance(item, torch.Generator):
            found[name] = _Generator(item)
        elif callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)):
            found[name] = item
        else:
            raise UsageError(
                f"session.state({name}=...) is a {type(item).__name__}, without state_dict() and load_state_dict()",
                fix="give it these two: state_dict() returns tensors and JSON, load_state_dict() takes them back",
            )
    if rng:
        found[_GENERATORS] = Generators()
    return found


def _fill(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Hyperparameters as they were; a learning rate that is a tensor stays the same one."""
    for key, value in saved.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            current.copy_(value)
        else:
            group[key] = value
