"""A gate: where a script of a test waits for a file, so that the test can break something meanwhile."""

from __future__ import annotations

import time
from pathlib import Path


class Gate:
    """Without a step nobody waits."""

    def __init__(self, path: str = "", step: str = "") -> None:
        self._path, self._step = Path(path), step

    def wait(self, step: object) -> None:
        """Waits for the file, if this is the step."""
        if str(step) == self._step:
            print("at the gate", flush=True)
            while not self._path.exists():
                time.sleep(0.005)
