"""Writes the history file from the facts; `common/reporting/history.py` has its format."""

from __future__ import annotations

from typing import Any

from ...common.reporting.history import HistoryFile
from ..core import effects
from .bus import Sink


class HistorySink(Sink):
    """Writes the history to `path`. Raises OutputError if the file cannot be opened."""

    name = "history"
    does_io = True
    needs_all = True

    def __init__(self, path: str) -> None:
        self._file = HistoryFile(path, "server")
        self._lines: list[bytes] = []

    def take(self, at: float, fact: effects.Fact) -> None:
        op, fields = line_of(fact)
        if isinstance(fact, effects.SendReply) and fact.has_weights and self._model.is_large:
            fields["newer"] = True
        if op:
            self._lines.append(self._file.line(op, at, fields))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._file.append(b"".join(lines))

    def close(self) -> None:
        self._file.close()


def line_of(fact: effects.Fact) -> tuple[str, dict[str, Any]]:
    """Return the operation and the fields of a fact's line, or ("", {}) if the fact has no line."""
    match fact:
        case effects.ContributionTaken(contribution):
            rank, incarnation, seq = contribution.id
            counts, timing, first = contribution.counts, contribution.timing, contribution.first
            return "accept", {
                "rank": rank, "incarnation": incarnation, "seq": seq, "base_version": contribution.base.version,
                "version": fact.version, "outcome": fact.outcome, "samples": counts.new_samples,
                "compute_s": round(timing.compute_s, 6), "transfer_s": round(timing.transfer_s, 6),
                "num_steps": counts.num_steps, "num_batches": counts.num_batches,
                **({"part": counts.part} if counts.part else {}),
                **({"run_steps": first.run_steps} if first is not None and first.run_steps else {}),
                **({"bytes": fact.traffic} if any(fact.traffic) else {}),
            }  # fmt: skip
        case effects.Commit(version, contributions, members):
            fields = {"version": version, "contributions": contributions, "members": members}
            return "commit", {**fields, "samples": fact.num_samples}
        case effects.SendReply(rank, incarnation, reply, has_weights):
            result, reference = reply.result, fact.reference_version
            return "reply", {
                "rank": rank, "incarnation": incarnation, "seq": result.seq, "version": result.version,
                "outcome": result.outcome.name, "training_steps": reply.next_work.training_steps,
                **({} if reply.next_work.local_steps else {"last": True}),
                **({} if has_weights or reply.group is not None else {"weights": False}),
                **({} if reference in (None, result.version) else {"reference": reference}),
            }  # fmt: skip
        case effects.ControlTaken(event, result, is_done):
            fields = {name: getattr(event, name) for name in ("do", "rank", "name", "value")}
            return "control", {**fields, "result": result, "done": is_done}
        case effects.Seated(_, rank, incarnation, is_resumed, number):
            return "join", {"rank": rank, "incarnation": incarnation, "seq": number, "resumed": is_resumed}
        case effects.WorkerMoved(rank, incarnation, how, number):
            return how, {"rank": rank, "incarnation": incarnation, "seq": number}
        case effects.WorkerLeft(rank, incarnation, how):
            finished = {"finished": True} if fact.has_finished else {}
            return "leave", {"rank": rank, "incarnation": incarnation, "how": how, **finished}
        case effects.SnapshotTaken(version, rows, path, sha256):
            return "snapshot", {"version": version, "rows": rows, "path": path, "sha256": sha256}
        case effects.RunStarted():
            return "start", {
                "run": fact.run, "server_incarnation": fact.server_incarnation, "mode": fact.mode,
                "staleness": fact.staleness_bound, "workers": fact.num_workers, "version": fact.version,
                "rows": fact.rows, "source": fact.source, "skipped": fact.skipped, "options": fact.options,
                "common": fact.common, "found": fact.found,
            }  # fmt: skip
        case effects.RunEnded(version, rows):
            return "end", {
                "version": version, "rows": rows, **({} if fact.has_begun else {"begun": False}),
                **({"over": True} if fact.is_over else {}),
            }  # fmt: skip
    return "", {}
