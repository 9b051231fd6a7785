"""What the end of a script means for the run: it takes no more steps, or it was interrupted, or it has failed."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ...common.errors import ParamServerError


class Ending(NamedTuple):
    is_interrupted: bool = False  # told to end: it may be started again
    failure: str = ""  # what went wrong, in one line
    exit_code: int = 0  # of the process, for that


def ending_of(error: BaseException | None) -> Ending:
    """Of a script that ends with this; without an error, or by `sys.exit(0)`, it just ends."""
    match error:
        case None | SystemExit(code=None | 0):
            return Ending()
        case SystemExit(code=int(code)):
            return Ending(failure=f"exit code {code}", exit_code=code & 0xFF)
        case SystemExit(code=text):
            return Ending(failure=one_line(str(text)), exit_code=1)
        case ParamServerError(message=message, exit_code=code):
            return Ending(failure=one_line(message), exit_code=code)
        case Exception():
            kind = "" if type(error).__name__ == "UserCodeError" else f"{type(error).__name__}: "
            return Ending(failure=one_line(f"{kind}{error}"), exit_code=1)
        case _:
            return Ending(is_interrupted=True)


def one_line(text: str) -> str:
    """As it may stand in a log and a summary: at most 500 characters, all of them printable."""
    line = " ".join(text.split())[:500]
    return "".join(letter if letter.isprintable() else "?" for letter in line) or "no reason given"


class _Asked:
    by: SystemExit | None = None  # how the script ended itself last


def watch_exit() -> None:
    """Remember with which code a script calls sys.exit: at the end of the interpreter nothing else knows."""
    if hasattr(sys.exit, "is_watched"):
        return
    end = sys.exit

    def watched(status: Any = None, /) -> None:
        _Asked.by = SystemExit(status)
        end(status)

    watched.is_watched = True  # type: ignore[attr-defined]
    sys.exit = watched  # type: ignore[assignment]


def ending_of_process() -> Ending:
    """While the interpreter ends: by an exception that nobody caught, or as the script asked."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    return ending_of(error or _Asked.by)
