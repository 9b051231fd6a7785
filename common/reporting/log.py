"""Log events, not prose: `event key=value ...`, one line when a state changes, on standard error.

`json` writes one object per line, which is how the launcher understands its children;
`text` is for people. Results (tables, --print-config) go to standard output instead.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from functools import cached_property, partial
from typing import Any

from ..config.schema import LogConfig
from ..errors import plain
from ..wire.json_text import to_json

Event = MutableMapping[str, Any]
_ROUTINE = "_routine"  # marks an event on its way to the processors


def setup_logging(config: LogConfig, program: str) -> None:
    """Configure structlog once, at a program's start. `program` is bound to every event."""
    import logging

    import structlog

    if config.format == "json":
        renderer: Any = structlog.processors.JSONRenderer(to_json, default=str)
        stamp = structlog.processors.TimeStamper(fmt=None)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            partial(_routine, config.format == "json" or config.level == "debug"),
            stamp,
            structlog.processors.format_exc_info,
            _printable,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.level.upper()]),
        # One write per line including its newline, because torchrun's workers share a file.
        logger_factory=structlog.WriteLoggerFactory(_Stderr()),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(program=program)


def _printable(_logger: Any, _method: str, event: Event) -> Event:
    """Escapes control characters in names and values, which could start a new line or control a terminal.

    Text from other processes is also checked on receipt (`common/wire/checks.py`). A traceback keeps its lines.
    """
    return {plain(name): plain(value) if isinstance(value, str) and name != "exception" else value
            for name, value in event.items()}  # fmt: skip


def _routine(is_shown: bool, _logger: Any, _method: str, event: Event) -> Event:
    """Makes events of `routine` events of level debug, or drops them."""
    if event.pop(_ROUTINE, False):
        if not is_shown:
            import structlog

            raise structlog.DropEvent
        event["level"] = "debug"
    return event


class _Stderr:
    """The current standard error, because a live table redirects it to print lines above the table."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class _Logger:
    """structlog's logger, loaded at the first line, so that a command with a wrong option does not load it."""

    @cached_property
    def _logger(self) -> Any:
        import structlog

        return structlog.get_logger()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def routine(self, event: str, **fields: Any) -> None:
        """Log an event of one worker's normal operation at level debug.

        In JSON format the level is info, because the launcher depends on some of these events.
        """
        self._logger.info(event, **{_ROUTINE: True}, **fields)


def get_logger() -> Any:
    """The process's event logger: `log.info("joined", rank=0)`."""
    return _Logger()
