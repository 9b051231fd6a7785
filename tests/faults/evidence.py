"""What a run with faults in it leaves behind, and what must hold for it: histories, weights, commits per worker."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paramserver.drills.check import check
from paramserver.drills.lineage import Lineage

Line = dict[str, Any]


class History:
    """The server's history file; read on at every question, because it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Line] = []
        self._offset = 0

    def lines(self, op: str | None = None, **fields: Any) -> list[Line]:
        """Whole lines of this kind whose fields have these values."""
        self._read_on()
        return [
            line
            for line in self._lines
            if op in (None, line["op"]) and all(line[name] == value for name, value in fields.items())
        ]

    def _read_on(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._offset += len(raw)
                # What a killed process left unfinished may stand before the line.
                self._lines.append(json.loads(raw[raw.rfind(b'{"op":') :]))

    def commits_of(self, ranks: set[int]) -> list[float]:
        """When commits were decided that hold something of one of `ranks`: monotonic seconds."""
        return [line["t"] for line in self.lines("commit") if any(c[0] in ranks for c in line["contributions"])]

    def stall(self, ranks: set[int], since: float, until: float) -> float:
        """Seconds: the longest pause between two commits of `ranks` that began or ended in [since, until]."""
        times = self.commits_of(ranks)
        pauses = [
            after - max(before, since)
            for before, after in itertools.pairwise(times)
            if after >= since and before <= until
        ]
        assert pauses, f"no commit of {sorted(ranks)} after the fault"
        return max(pauses)

    def last_step(self, rank: int) -> int:
        """The highest contribution of a rank that is in a commit; 0: none."""
        commits = reversed(self.lines("commit"))
        return next((c[2] for line in commits for c in line["contributions"] if c[0] == rank), 0)

    def ends_of(self, rank: int) -> list[str]:
        """How a rank left, each time."""
        return [line["how"] for line in self.lines("leave", rank=rank)]

    def outcomes(self) -> Counter[str]:
        return Counter(line["outcome"] for line in self.lines("accept"))

    def resumes(self, rank: int) -> int:
        """How often a rank came back to where it was."""
        return sum(line["resumed"] for line in self.lines("join", rank=rank))

    def check(self) -> Lineage:
        """Every invariant that `ps-launch check` knows holds, so no contribution is committed twice."""
        with self.path.open("rb") as file:
            verdict = check({self.path.name: file})
        assert verdict.is_good, "\n".join(map(str, verdict.problems[:20]))
        return verdict.lineage


def applied(path: Path, num_workers: int, steps: int) -> torch.Tensor:
    """[num_workers, steps]: how often each contribution was applied (scripts/onehot.py of the loopback tests)."""
    return -load_file(path)["seen"].view(-1, steps)[:num_workers]
