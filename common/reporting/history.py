"""What was applied when, as JSON lines: one object per line, written at once and never changed.

Each line is one write to a file opened for appending, so what a killed process has said stays said,
and a server that is started again goes on in the same file. `drills/check.py` reads it.

    server  start     run, server_incarnation, mode, staleness, workers, version, steps {rank: step}, source,
                      skipped [damaged snapshots], straggler_timeout_s and backup_workers if set
            join      rank, incarnation, step, resumed
            leave     rank, incarnation, how: goodbye | closed | lease | replaced
            accept    rank, incarnation, step, base_version, version, outcome: accepted | dropped | repeated
                      | rejected | skipped | refused
            commit    version, contributions [[rank, incarnation, step], ...], members [rank, ...]
            answer    rank, incarnation, step, version, outcome
            snapshot  version, steps {rank: step}, path, sha256 (of the weights)
            end       version, steps {rank: step}
    worker  start     run, rank, incarnation, server_incarnation, step, version
            send      rank, incarnation, step, base_version
            answered  rank, incarnation, step, version, outcome (START is a `start` line)
            end       rank, step

Every line also has `op`, `role` ("server" or "worker") and `t`, monotonic seconds of its host.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ..errors import OutputError


class History:
    """Writes to `path`; without one, nothing."""

    def __init__(self, path: str | None, role: str) -> None:
        self._role = role
        self._file: int | None = None
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise OutputError(f"--history {path} cannot be written: {error.strerror}") from None

    @property
    def is_kept(self) -> bool:
        return self._file is not None

    def write(self, op: str, **fields: Any) -> None:
        if self._file is not None:
            line = {"op": op, "role": self._role, "t": round(time.monotonic(), 6), **fields}
            os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
