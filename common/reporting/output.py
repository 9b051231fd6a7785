"""Result files of a run: checked before training, written atomically."""

from __future__ import annotations

import fcntl
import glob
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..config.schema import Config, LogConfig
from ..errors import OutputError, plain
from ..wire.json_text import to_json
from .curve import Point, text_of
from .report import print_results, summary_table
from .summary import RESULTS_VARIABLE, Summary

if TYPE_CHECKING:
    import torch


# ---- log -----------------------------------------------------------------------------------------
# Log events, not prose: `event key=value ...`, one line when a state changes, on standard error.
#
# `json` writes one object per line, which is how the launcher understands its children; `text` is for people. Results
# (tables, --print-config) go to standard output instead.


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


# ---- output --------------------------------------------------------------------------------------

log = get_logger()

_TEMPORARY = ".tmp"


def check_writable(path: str) -> None:
    """Raise OutputError if `path` cannot be written; called before training."""
    target = Path(path)
    parent = target.parent
    if target.is_dir():
        raise OutputError(f"cannot write {path}: it is a directory", fix="name a file in it")
    if not parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no directory {parent}", fix=f"mkdir -p {parent}")
    probe = parent / f".{target.name}.{os.getpid()}.probe"
    try:
        probe.touch()
        probe.unlink()
        if target.exists():
            with target.open("ab"):
                pass
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="choose a path you may write to") from None


def write_whole(path: Path, data: bytes, mode: int = 0o666, is_synced: bool = True) -> None:
    """Write a file atomically: the old file stays until the new file is complete. `mode`: its permissions."""
    with replacing(path, mode, is_synced) as file:
        file.write(data)


def write_result(path: str | Path, data: bytes) -> None:
    """Write a file of results atomically. Raises OutputError."""
    try:
        write_whole(Path(path), data, is_synced=False)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def replacing(path: Path, mode: int = 0o666, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write. It replaces the old file when the block ends without an error."""
    if path.exists() and not path.is_file():  # a device, a pipe
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # replace the target of a link, not the link
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            with suppress(OSError):  # not supported on all file systems
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield file
            file.flush()
            if is_synced:
                os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Delete temporary files of processes killed while they wrote `path`; a live writer has a lock."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{_TEMPORARY}"):
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def write_best(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write the weights of the best evaluation so far; log an error if they cannot be written."""
    from safetensors.torch import save  # loads torch, which the launcher does without

    try:
        found = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        write_whole(Path(path), save(found, metadata))
        log.info("saved_best", path=path, version=int(metadata["version"]))
    except OSError as error:
        log.error("best_not_saved", path=path, reason=str(error))


def write_curve(path: str, points: list[Point]) -> None:
    """Write all evaluations so far; log an error if they cannot be written."""
    try:
        write_whole(Path(path), text_of(points, path).encode(), is_synced=False)
    except OSError as error:
        log.error("curve_not_written", path=path, reason=str(error))


def write_results(config: Config, summary: Summary, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write the weights, if any, and the summary to the files in `config.output`, and print or hand over the summary.

    The weights are safetensors, for `model.load_state_dict(load_file(path))`. The same file has `metadata`, whose
    `version` is the version of the weights. Raises OutputError if a file cannot be written.
    """
    output = config.output
    try:
        if output.save is not None and tensors:
            from safetensors.torch import save  # loads torch, which the launcher does without

            write_whole(Path(output.save), save(tensors, metadata))
            log.info("saved", path=output.save, version=int(metadata["version"]))
        if output.summary is not None:
            write_whole(Path(output.summary), summary.text().encode(), is_synced=False)
        if descriptor := os.environ.pop(RESULTS_VARIABLE, ""):  # of a launcher, which prints them
            with open(int(descriptor), "w", encoding="utf-8") as file:
                file.write(summary.text())
            return
    except OSError as error:
        raise OutputError(f"cannot write the results: {error}", fix="free some space and run again") from None
    if config.log.format == "json":
        log.info("summary", **summary.model_dump())
    else:
        print_results(summary_table(summary))
