"""Where each rank is in its data: a training step that accumulates gradients draws several batches."""

from __future__ import annotations

from typing import Any


class Drawn:
    """Batches that are behind each rank, of what is in a version."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # by rank: batches, and the training steps they were for

    def committed(self, rank: int, num_batches: int, num_steps: int, steps_done: int) -> None:
        """Contributions of the rank, of `num_steps` training steps, are in a version; with them so many count."""
        self._places[rank] = (self.place(rank, steps_done - num_steps) + num_batches, steps_done)

    def place(self, rank: int, steps_done: int) -> int:
        """Batches behind a rank with so many training steps. Steps that counted without it (it was away, or the
        snapshot does not tell) are taken to have drawn as many as others'."""
        batches, steps = self._places.get(rank, (0, 0))
        if steps_done <= steps:
            return batches
        per_step = max((num // of for num, of in self._places.values() if of), default=1)
        return batches + (steps_done - steps) * max(1, per_step)

    def saved(self) -> dict[str, list[int]]:
        return {str(rank): list(place) for rank, place in self._places.items()}

    def restore(self, saved: Any) -> None:
        """What is not there, or not what it should be, is counted in training steps."""
        for rank, place in saved.items() if isinstance(saved, dict) else ():
            match place:
                case [int(batches), int(steps)] if rank.isdecimal():
                    self._places[int(rank)] = (batches, steps)
