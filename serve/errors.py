"""Why a request gets no reply, and why a step must be computed again."""

from __future__ import annotations

MOST_PAUSES = 3  # that a request may see before its next result; then it may be the reason


class Refused(Exception):
    """The reason why a request is not served: an HTTP status, a sentence, and a code for programs."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class Paused(Exception):
    """A part of the model is away. The same step can be computed once it is back."""
