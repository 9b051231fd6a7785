"""Log events, not prose: `event key=value ...`, one line when a state changes, on standard error.

`json` writes one object per line, which is how the launcher understands its children;
`text` is for people. Results (tables, --print-config) go to standard output instead.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from ..config.schema import LogConfig


def setup_logging(config: LogConfig, program: str) -> None:
    """Configure structlog once, at a program's start. `program` is bound to every event."""
    if config.format == "json":
        renderer: Any = structlog.processors.JSONRenderer(default=str)
        stamp = structlog.processors.TimeStamper(fmt=None)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.level.upper()]),
        # A line and its end in one write: torchrun's workers share a file.
        logger_factory=structlog.WriteLoggerFactory(_Stderr()),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(program=program)


class _Stderr:
    """Whatever standard error is at the moment: a live table puts lines above itself."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def get_logger() -> Any:
    """The process's event logger: `log.info("joined", rank=0)`."""
    return structlog.get_logger()
