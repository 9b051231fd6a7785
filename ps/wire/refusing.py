"""How a call ends that cannot go on: with a refusal the caller can act on, or with a mistake of ours, logged."""

from __future__ import annotations

import traceback
from typing import Any

from ...common.errors import ParamServerError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.wire.protocol import refusal_to_status

log = get_logger()

_MAX_LOGGED = 2_000
_MAX_SHOWN = 200


async def refuse(call: Any, rank: int | None, error: ParamServerError) -> None:
    """End a call, of a Stream or of gRPC's own context."""
    message, reason = loggable(error.message), (error.reason or Reason.BAD_REQUEST).value
    log.warning("refused", rank=rank, reason=reason, message=message)
    await call.abort(*refusal_to_status(error))


async def fail(call: Any, rank: int | None, error: Exception) -> None:
    """What nobody foresaw ends one call, and is logged in one line; never the run."""
    frames = traceback.extract_tb(error.__traceback__)
    traceback.clear_frames(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    what = loggable(f"{type(error).__name__}: {error}")
    log.error("internal_error", rank=rank, error=what, where=where)
    message = f"the server failed on what it was sent: {what[:_MAX_SHOWN]}"
    await call.abort(*refusal_to_status(refusal(Reason.INTERNAL, message)))


def loggable(text: str) -> str:
    """Text that may come from anyone, for a line of the log."""
    text = text[:_MAX_LOGGED]
    return text if text.isprintable() else ascii(text)[1:-1]
