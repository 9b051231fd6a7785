"""Reads the history of a recorded run (`--history`)."""

from __future__ import annotations

from ..common.errors import UsageError
from ..drills.history_lines import Line, read_lines


def read_trace(path: str) -> list[Line]:
    """The server's lines, in order. UsageError for a file that is none."""
    try:
        with open(path, "rb") as file:
            lines, problems = read_lines(path, file)
    except OSError as error:
        raise UsageError(f"flag --trace: {path} cannot be read: {error.strerror}", fix="a file of --history") from None
    if problems:
        raise UsageError(f"flag --trace: {problems[0]}", fix="ps-launch check says more of what is wrong with it")
    found = [line for line in lines if line.role == "server"]
    if not found or found[0].op != "start":
        told = "the server's lines do not begin with a start"
        raise UsageError(f"flag --trace: {path}: {told}", fix="the file that ps-server wrote with --history")
    return found
