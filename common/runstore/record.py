"""Records a run of this process in the run store that its configuration names. No error of the file reaches the run."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path

from ..config.schema import Config
from ..errors import ParamServerError
from ..reporting.log import get_logger
from ..reporting.summary import Summary
from ..reporting.view import Tick
from ..version import PROGRAM_VERSION, installed
from .process import machine
from .schema import FILE
from .writing import Beginning, RunWriter

log = get_logger()

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_PACKAGES = ("torch", "numpy", "grpcio")


class Record:
    """Writes one run to the run store. `flush` writes the ticks that were given to `writer`.

    If the file cannot be created or written, the record logs one line and stops writing. The line is a warning unless
    the file is the default one. If other processes lock the file, the next `flush` tries again.
    """

    def __init__(self, config: Config, *, run: str, mode: str, at_version: int = 0) -> None:
        self._config = config
        self._path = Path(config.output.track_dir) / FILE
        beginning = Beginning(
            run=run,
            mode=mode,
            project=config.output.project,
            version=at_version,
            heartbeat_s=config.server.status_interval_s,
            name=config.output.name,
            note=config.output.note,
            code={"paramserver": PROGRAM_VERSION},
            machine=machine({name: installed(name) for name in _PACKAGES}),
        )
        self.writer = RunWriter(self._path, beginning)
        self.is_off = self._has_waited = False

    def flush(self) -> None:
        self._do(self.writer.flush)

    def end(self, last: Tick, summary: Summary, ended_by: str) -> None:
        """Write the last tick and the results of the run, and close the file."""
        self._do(lambda: self.writer.end(last, summary, ended_by), is_last=True)
        self.writer.close()

    def _do(self, write: Callable[[], bool], is_last: bool = False) -> None:
        if self.is_off:
            return
        try:
            is_written = write()
        except (sqlite3.Error, OSError, ParamServerError) as error:
            self.is_off = True
            is_wanted = not self._config.output.model_fields_set.isdisjoint({"store", "track_dir"})
            is_default = isinstance(error, OSError) and error.errno in _NOT_ALLOWED and not is_wanted
            tell = log.info if is_default else log.warning
            tell("store_off", path=str(self._path), reason=str(error), meaning="the run goes on, and is not on record")
            return
        if not is_written and (is_last or not self._has_waited):
            self._has_waited = True
            lost = "what was not written is lost" if is_last else "it is tried again with each status"
            why = f"{self.writer.obstacle} writes this run" if self.writer.obstacle else "another process has locked it"
            log.warning("store_locked", path=str(self._path), meaning=f"{why}; {lost}")
