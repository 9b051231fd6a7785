"""Every way a run can fail, in one tree.

    ParamServerError            1   a bug of this program, unless a subclass says otherwise
    ├── UsageError              2   a flag, key or value the user can correct
    │   └── UnknownNameError    2   no such mode, codec, task or the like
    ├── BindError              10   the address cannot be listened on
    ├── AuthError              11   wrong TLS settings or token, or a public address without them
    ├── MismatchError          12   model, optimizer or run differs from the server's
    ├── NotAdmittedError       13   no slot for this rank, or a newer process replaced this one
    ├── OutputError            14   a file the run needs cannot be written or read
    │   └── CheckpointError    14   a snapshot that cannot be used
    ├── UnreachableError       15   the peer did not reply within the give-up time
    └── DivergedError          16   too many non-finite contributions in a row

A message says what happened, to whom, the limit and the actual value; `fix` says what to do. Programs print both and
exit with `exit_code`. A user's mistake never shows a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

EXIT_BUG = 1
EXIT_INTERRUPTED = 130
EXIT_OUTPUT_LOST = 141  # 128 + SIGPIPE
EXIT_DRAINED = 143


class ParamServerError(Exception):
    """Base of all errors raised on purpose. `fix` is one sentence that tells the reader what to do."""

    exit_code = EXIT_BUG

    def __init__(self, message: str, *, fix: str = "", reason: Reason | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.reason = reason


class UsageError(ParamServerError):
    exit_code = 2


class UnknownNameError(UsageError, ValueError):
    """An unknown mode, codec, task or similar name. It is a ValueError, so that validators may raise it."""


def raise_first(*problems: tuple[object, str, str]) -> None:
    """Raise UsageError for the first problem (condition, message, fix) whose condition is true."""
    for is_one, message, fix in problems:
        if is_one:
            raise UsageError(message, fix=fix)


class BindError(ParamServerError):
    exit_code = 10


class AuthError(ParamServerError):
    exit_code = 11


class MismatchError(ParamServerError):
    exit_code = 12


class NotAdmittedError(ParamServerError):
    exit_code = 13


class OutputError(ParamServerError):
    exit_code = 14


class CheckpointError(OutputError):
    """No usable snapshot where one is needed."""


class UnreachableError(ParamServerError):
    exit_code = 15


class DivergedError(ParamServerError):
    exit_code = 16


class Reason(StrEnum):
    """The machine-readable reason of a refusal, sent as trailing metadata `ps-reason`.

    Each reason has the gRPC status of the call, and the error class that server and client raise. Clients decide by the
    reason, never by the message. proto/parameter_server.proto documents each reason.
    """

    status: str
    error: type[ParamServerError]

    def __new__(cls, name: str, status: str, error: type[ParamServerError]) -> Reason:
        reason = str.__new__(cls, name)
        reason._value_, reason.status, reason.error = name, status, error
        return reason

    BAD_REQUEST = "BAD_REQUEST", "INVALID_ARGUMENT", ParamServerError
    RANK_OUT_OF_RANGE = "RANK_OUT_OF_RANGE", "OUT_OF_RANGE", NotAdmittedError
    RUN_FULL = "RUN_FULL", "RESOURCE_EXHAUSTED", NotAdmittedError
    RUN_MISMATCH = "RUN_MISMATCH", "FAILED_PRECONDITION", MismatchError
    MODEL_MISMATCH = "MODEL_MISMATCH", "FAILED_PRECONDITION", MismatchError
    OPTIMIZER_MISMATCH = "OPTIMIZER_MISMATCH", "FAILED_PRECONDITION", MismatchError
    OPTIMIZER_UNSUPPORTED = "OPTIMIZER_UNSUPPORTED", "INVALID_ARGUMENT", UsageError
    REPLACED = "REPLACED", "ABORTED", NotAdmittedError
    NOT_JOINED = "NOT_JOINED", "ABORTED", NotAdmittedError
    SEQ_GAP = "SEQ_GAP", "FAILED_PRECONDITION", ParamServerError
    DIVERGED = "DIVERGED", "ABORTED", DivergedError
    DRAINING = "DRAINING", "UNAVAILABLE", UnreachableError
    NOT_READY = "NOT_READY", "UNAVAILABLE", UnreachableError
    UNAUTHENTICATED = "UNAUTHENTICATED", "UNAUTHENTICATED", AuthError
    PERMISSION_DENIED = "PERMISSION_DENIED", "PERMISSION_DENIED", AuthError
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED", NotAdmittedError
    TOO_SLOW = "TOO_SLOW", "ABORTED", UnreachableError
    INTERNAL = "INTERNAL", "INTERNAL", ParamServerError
    EVICTED = "EVICTED", "ABORTED", NotAdmittedError
    SHARD_MISMATCH = "SHARD_MISMATCH", "FAILED_PRECONDITION", MismatchError


def refusal(reason: Reason, message: str, *, fix: str = "") -> ParamServerError:
    """Returns the error of a refusal. Server and client use the same class."""
    return reason.error(message, fix=fix, reason=reason)


def bad_request(message: str, *, fix: str = "") -> ParamServerError:
    """Returns the refusal of a message that this version of the program does not send."""
    return refusal(Reason.BAD_REQUEST, message, fix=fix)


def shown(text: str, most: int = 80) -> str:
    """Returns text from another process without control characters, cut to `most` characters."""
    return plain(text if len(text) <= most else f"{text[:most]}...")


def plain(text: str) -> str:
    """Returns text on one line: characters that a terminal or a file would execute are escaped, as `\\x1b`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def same_batches(first: int, second: int) -> dict[str, Any]:
    """Returns the log fields for two ranks whose first gradients are equal."""
    return {
        "ranks": [first, second],
        "meaning": f"the first gradients of ranks {first} and {second} are equal to the bit, from the same weights: "
        "both seem to train on the same batches, so that one of them adds nothing",
        "fix": "loop over session.shard(dataset); or divide the data with DistributedSampler(dataset, "
        "session.num_workers, session.rank); or give each rank's loader another seed",
    }


def did_you_mean(wrong: str, known: Iterable[str], before: str = "") -> str:
    """Returns `did you mean 'ssp'?` with the nearest known name, or the list of all known names.

    `before` is a prefix for display. It does not affect which name is nearest.
    """
    names = sorted(known)
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    return f"did you mean '{before}{near[0]}'?" if near else f"known: {before}" + f", {before}".join(names)
