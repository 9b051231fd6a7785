"""What a backend does: start processes somewhere, report their lines and their end, end them.

It runs on the launcher's event loop, so it calls `on_line` and `on_exit` from there, one at a
time. What every backend promises (tests/launch/test_backend_contract.py):

- each line a process wrote comes before the report of its end;
- each started process is reported to have ended exactly once, also one that cannot be started
  (exits.CANNOT_START, after a line that says why);
- `kill` ends a process and everything it started; so does the process's own end;
- when the launcher dies, whatever the cause, nothing it started stays behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..plan import Child, ProcessSpec

OnLine = Callable[[Child, str], None]
OnExit = Callable[[Child, int], None]


class Backend(Protocol):
    """Built inside the running event loop, with the two callbacks."""

    def __init__(self, on_line: OnLine, on_exit: OnExit) -> None: ...

    def start(self, spec: ProcessSpec) -> None:
        """Start a process; its failure to start is reported as its end."""

    def terminate(self, child: Child) -> None:
        """Ask for an end in good order. Nothing happens when it has ended."""

    def kill(self, child: Child) -> None:
        """End it and everything it started at once. Nothing happens when it has ended."""

    def close(self) -> None:
        """Kill what is left and give back what the backend holds; nothing is reported any more."""
