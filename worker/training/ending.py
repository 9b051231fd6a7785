"""How a script ended: normally, interrupted, or failed."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple, NoReturn

from ...common.config.cli import report
from ...common.errors import ParamServerError


class Ending(NamedTuple):
    is_interrupted: bool = False  # the script was interrupted and may be started again
    failure: str = ""  # the error in one line; empty: no failure
    exit_code: int = 0  # the process's exit code after a failure


def ending_of(error: BaseException | None) -> Ending:
    """The ending for an exception that left the script. None and `sys.exit(0)` are a normal end."""
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
    """The text in one line for logs and summaries: at most 500 printable characters."""
    line = " ".join(text.split())[:500]
    return "".join(letter if letter.isprintable() else "?" for letter in line) or "no reason given"


def exit_at_once(error: ParamServerError) -> NoReturn:
    """Report the error and end the process with its exit code, whatever other threads do."""
    code = report("paramserver", error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _LastExit:
    error: SystemExit | None = None  # from the script's newest call of sys.exit


def watch_exit() -> None:
    """Record the status of each `sys.exit` call. Python does not keep it for atexit handlers."""
    if hasattr(sys.exit, "is_watched"):
        return
    end = sys.exit

    def watched(status: Any = None, /) -> None:
        _LastExit.error = SystemExit(status)
        end(status)

    watched.is_watched = True  # type: ignore[attr-defined]
    sys.exit = watched  # type: ignore[assignment]


def ending_of_process() -> Ending:
    """The ending of the process, for atexit handlers: from an uncaught exception or from `sys.exit`."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    return ending_of(error or _LastExit.error)
