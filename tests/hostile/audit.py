"""What this process imports, opens and runs, as Python's own audit events tell it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVENTS = frozenset({
    "import", "open", "exec", "compile", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork",
    "subprocess.Popen", "ctypes.dlopen", "socket.connect", "os.remove", "os.rename", "os.mkdir", "os.rmdir",
    "os.listdir", "os.scandir", "shutil.rmtree", "pickle.find_class", "webbrowser.open",
})  # fmt: skip
_noted: list[str] | None = None
_is_there = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _noted is not None and event in _EVENTS:
        _noted.append(f"{event} {str(args)[:200]}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What happens meanwhile. A hook cannot be removed: it stays, and notes nothing."""
    global _noted, _is_there
    if not _is_there:
        _is_there = True
        sys.addaudithook(_hook)
    found = _noted = []
    try:
        yield found
    finally:
        _noted = None
