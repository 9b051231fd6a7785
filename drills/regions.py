"""Compares the history of the server above with those of its relays. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..common.reporting.regions import region_run
from .history_lines import Line
from .lineage import Tally
from .server_lines import ServerLines


class Comparison(NamedTuple):
    """The history of a relay: its counts, its samples, and how many of these the run above counts. `problem`: unless
    these are the samples of one of its versions."""

    file: str
    tally: Tally
    num_samples: int
    num_counted: int | None  # None: lines of a killed server are missing, so they cannot be compared
    problem: str = ""

    def __str__(self) -> str:
        restarts = f", {self.tally.restarts} restarts of the relay" if self.tally.restarts else ""
        counts = "was not compared: lines of a killed server are missing"
        if self.num_counted is not None:
            counts = f"counts {self.num_counted:,} of its {self.num_samples:,} samples"
        return f"region {self.file}: {self.tally.applied:,} applied{restarts}; the run above {counts}"


def runs_of(lines: Iterable[Line]) -> set[str]:
    return {line["run"] for line in lines if line.op == "start"}


def tiers(servers: Mapping[str, list[Line]]) -> tuple[str, dict[str, int]]:
    """Returns the file of the server above, the first without relays, and the rank of each relay by file."""
    for name, lines in servers.items():
        ranks = {line["rank"] for line in lines if line.op == "join"}
        regions = {region_run(run, rank): rank for run in runs_of(lines) for rank in ranks}
        relays = {file: regions[run] for file, its in servers.items() for run in runs_of(its) if run in regions}
        if relays:
            return name, relays
    return next(iter(servers), ""), {}


def compared(file: str, rank: int, above: ServerLines, region: ServerLines) -> Comparison:
    """Returns the comparison of a region. Its later versions may come after the end of the run above."""
    counted = sum(above.samples.get(item, 0) for item in above.lineage.contributions() if item[0] == rank)
    counted += above.set_aside.get(rank, 0)
    total, totals = 0, {0: 0}  # by version
    for version, worker, number in region.lineage.commits():
        totals[version] = total = total + region.samples.get((worker, number), 0)
    if region.has_gaps or above.has_gaps or (above.tally.restarts and rank in above.set_aside):
        return Comparison(file, region.tally, total, None)
    message = f"the run above counts {counted:,} samples of this region, rank {rank}: no version has them, of {total:,}"
    return Comparison(file, region.tally, total, counted, "" if counted in totals.values() else message)


def without_empty_starts(lines: list[Line]) -> list[Line]:
    """Returns the lines of a relay without starts from nothing before its first reply from above.

    A new relay process learns from this reply where its region is, and starts again there.
    """
    starts: list[list[Line]] = []
    for line in lines:
        if line.op == "start" or not starts:
            starts.append([])
        starts[-1].append(line)
    known = [part for part in starts if part[0].fields.get("source") or any(line.op == "commit" for line in part)]
    return [line for part in known or starts for line in part]
