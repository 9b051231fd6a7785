"""Names the task whose model is served, so that each process can load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..worker.training.tasks.loading import load_named_by_server, load_task


class TaskSpec(NamedTuple):
    """A task by its name. `from_run`: the arguments that a run gives a built-in task; None: the user names the task."""

    name: str
    args: dict[str, Any]
    from_run: dict[str, Any] | None = None

    def load(self) -> Any:
        """Return the task. Raises UsageError."""
        device = torch.device("cpu")
        if self.from_run is None:
            return load_task(self.name, self.args, seed=0, device=device)
        return load_named_by_server(self.name, self.from_run, self.args, seed=0, device=device)


def model_name(task: str) -> str:
    """Return the name of a task's model in requests, where a path would end the path of an address."""
    file, _, name = task.rpartition(":")
    return name if file else Path(task).stem
