"""The meaning of exit codes."""

from __future__ import annotations

import signal

from ...common.errors import UnreachableError, UsageError

MEANINGS = {
    0: "done",
    1: "an exception",
    2: "usage or configuration",
    10: "cannot listen on the address",
    11: "TLS or token",
    12: "model or run mismatch",
    13: "not admitted or evicted",
    14: "a file cannot be written or read",
    15: "the peer cannot be reached",
    16: "diverged",
    17: "restart budget spent",
    126: "cannot be started",
    130: "interrupted",
    143: "drained on SIGTERM",
    255: "its host was lost",
}

USAGE, UNREACHABLE = UsageError.exit_code, UnreachableError.exit_code
BUDGET_SPENT = 17
HOST_LOST = 255  # as ssh says of itself
CANNOT_START = 126  # as a shell says of a program it cannot execute


def describe_exit(code: int, *, is_script: bool = False) -> str:
    """`exit code 12 (model or run mismatch)`, or `killed by SIGKILL` for a negative code."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    if code == 1 and is_script:
        return "exit code 1 (the script failed)"
    meaning = MEANINGS.get(code)
    return f"exit code {code} ({meaning})" if meaning else f"exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
