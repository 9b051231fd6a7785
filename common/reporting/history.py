"""The history of a run: JSON lines, one object per event, in order, never changed.

The file is opened for appending. The lines of a killed process stay, and a restarted server continues in the same
file. A worker writes each line at once. A server's lines come from its event bus a moment later, so a killed server may
lose its last few lines. `drills/check.py` reads the file.

    server  start     run, server_incarnation, mode, staleness, workers, version, rows {rank: row}, source,
                      skipped [damaged snapshots], options {name: value} of the mode, common {name: value} of every
                      mode (training steps, num_workers, min_workers, weighting, delayed_update)
            join      rank, incarnation, seq, resumed
            enter     rank, incarnation, seq: it has offered its model, and is a member from here on
            away      rank, incarnation, seq: its connection is lost, and its process is still there
            back      rank, incarnation, seq: it goes on after a join that resumed
            leave     rank, incarnation, how: goodbye | failed | closed | lease | replaced, or
                      finished: it takes no more steps, but stays for the final weights; finished (true: it has had
                      every reply)
            accept    rank, incarnation, seq, base_version, version, outcome: accepted | dropped | repeated
                      | rejected | skipped | refused; samples (null: unknown), compute_s (computing it),
                      transfer_s (of the previous exchange, without the wait for the mode), num_steps, num_batches
                      (training steps and batches in it), part (of a model in parts), run_steps
                      (training steps of the run, if known), bytes [sent, received] (traffic, if counted)
            commit    version, contributions [[rank, incarnation, seq], ...], members [rank, ...], samples (in all of
                      them; 1 for an unknown number)
            reply     rank, incarnation, seq, version, outcome, training_steps (of the rank, that count); last (true: no
                      steps follow), weights (false: none), newer (true: the weights of a large model may be of a
                      newer version), reference (the version of the weights, if a reply codec sends those of an older
                      one)
            snapshot  version, rows {rank: row}, path, sha256 (of the weights)
            control   do, rank, name, value (the request), result (a sentence), done (false: refused)
            end       version, rows {rank: row}; over (true: all workers have left after the final weights)
    worker  start     run, rank, incarnation, server_incarnation, seq, version
            send      rank, incarnation, seq, base_version; num_steps, num_batches, samples, part as in accept
            replied   rank, incarnation, seq, version, outcome (START is a `start` line)
            end       rank, seq

A row has what counts of a rank: [seq, steps, samples, batches, part] (`Row` in `common/wire/records.py`).

Every line also has `op`, `role` ("server" or "worker") and `t`, monotonic seconds of its host.

If the file cannot be written any more (a full disk), the process continues without it, logs this once, and logs the
number of missing lines. A later process may continue in the file.
"""

from __future__ import annotations

import os
import time
from io import FileIO
from typing import Any

from ..errors import OutputError
from ..wire.json_text import to_json
from .log import get_logger

log = get_logger()


class HistoryFile:
    """Appends the lines of one process; several processes may append to the same file."""

    def __init__(self, path: str, role: str) -> None:
        self._role = role
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OutputError(f"--history {path} cannot be written: {error.strerror}") from None
        self._file = FileIO(descriptor, "ab")

    def line(self, op: str, at: float, fields: dict[str, Any]) -> bytes:
        line = {"op": op, "role": self._role, "t": round(at, 6), **fields}
        return to_json(line, separators=(",", ":")).encode() + b"\n"

    def append(self, lines: bytes) -> None:
        """Write whole lines. Raises OSError; then the file may have a partial line."""
        while lines:
            lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        self._file.close()


class History(HistoryFile):
    """A worker's, whose lines are written at once."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "worker")
        self._path, self._num_missing = path, 0

    def write(self, op: str, **fields: Any) -> None:
        try:
            if not self._num_missing:
                self.append(self.line(op, time.monotonic(), fields))
                return
        except OSError as error:
            log.warning("history_off", path=self._path, reason=error.strerror)
        self._num_missing += 1

    def close(self) -> None:
        if self._num_missing and not self._file.closed:
            log.warning("history_incomplete", path=self._path, missing=self._num_missing)
        super().close()
