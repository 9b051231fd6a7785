"""Checks in history files that every contribution was applied exactly once and nothing durable was lost. Pure.

The rules for the server are in `server_lines.py` and `seats.py`, those for workers in `worker_lines.py`.
Their lines may be in the same file or in other files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..common.reporting.history import region_run
from .history_lines import Line, Problem, read_lines
from .lineage import Lineage, Tally
from .server_lines import ServerLines
from .worker_lines import check_workers


class Region(NamedTuple):
    """The history of a relay: its counts, its samples, and how many of these the run above counts."""

    tally: Tally
    num_samples: int
    num_counted: int | None  # None: lines of a killed server are missing, so they cannot be compared


@dataclass(frozen=True)
class Verdict:
    """A check's result. `problems`: in the order of files and lines; `lineage`: of the last run's final weights."""

    problems: list[Problem]
    tally: Tally
    num_lines: int
    lineage: Lineage
    unchecked_modes: tuple[str, ...] = ()  # modes without installed rules
    deleted: tuple[str, ...] = ()  # deleted snapshots, as sentences
    samples: Mapping[tuple[int, int], int] = field(default_factory=dict)  # in accepted contributions
    last_op: str = "end"  # last operation of the server; if it is not the run's end, the history is cut
    regions: Mapping[str, Region] = field(default_factory=dict)  # by the file of a relay's history

    @property
    def is_good(self) -> bool:
        return not self.problems


def check(files: Mapping[str, Iterable[bytes]], modes: Iterable[str] = ()) -> Verdict:
    """Check the histories of a run. `files`: names, and lines as read from a binary file.

    One file has the server's history; a restarted server writes to the same file. Each relay of a region has a file of
    its own beside it. `modes`: modes in the user's files, `FILE.py:NAME`, whose rules are checked too.
    """
    problems: list[Problem] = []
    servers: dict[str, list[Line]] = {}
    of_workers: list[tuple[str, Line]] = []  # with the name of its run
    num_lines = 0
    for name, raw in files.items():
        lines, unreadable = read_lines(name, raw)
        problems += unreadable
        num_lines += len(lines)
        of_workers += _with_runs(line for line in lines if line.role != "server")
        if of_server := [line for line in lines if line.role == "server"]:
            servers[name] = of_server
    if not servers:
        problems.append(Problem(", ".join(files), 0, "no file has lines of a server: give the server's history"))
    first, relays = _tiers(servers)
    checked: dict[str, ServerLines] = {}
    for name, lines in servers.items():
        if name != first and name not in relays:
            message = f"a second server's history, of no region of the first, {first}"
            problems.append(Problem(name, lines[0].number, message))
            continue
        checked[name] = server = ServerLines(modes, is_relay=name in relays)
        for line in _from_above(lines) if name in relays else lines:
            server.feed(line)
        server.finish()
        others = {run for other, of_other in servers.items() if other != name for run in _runs(of_other)}
        is_mine = _runs(lines).__contains__ if name != first else lambda run, others=others: run not in others
        problems += server.problems + check_workers([line for run, line in of_workers if is_mine(run)], server)
    regions = {}
    for name, rank in relays.items():
        regions[name], message = _of_region(rank, checked[first], checked[name])
        problems += [Problem(name, 0, message)] if message else []
    order = {name: index for index, name in enumerate(files)}
    problems.sort(key=lambda problem: (order.get(problem.file, -1), problem.number))
    found = checked.get(first, ServerLines())
    unchecked = tuple(dict.fromkeys(mode for server in checked.values() for mode in server.unchecked_modes))
    deleted = tuple(text for server in checked.values() for text in server.deleted)
    return Verdict(
        problems, found.tally, num_lines, found.lineage, unchecked, deleted, found.samples,
        servers[first][-1].op if servers else "end", regions,
    )  # fmt: skip


def _runs(lines: Iterable[Line]) -> set[str]:
    return {line["run"] for line in lines if line.op == "start"}


def _from_above(lines: list[Line]) -> list[Line]:
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


def _with_runs(lines: Iterable[Line]) -> list[tuple[str, Line]]:
    """Returns the lines of workers, each with the run that its worker has joined."""
    runs: dict[int, str] = {}
    found = []
    for line in lines:
        if line.op == "start":
            runs[line["rank"]] = line["run"]
        found.append((runs.get(line["rank"], ""), line))
    return found


def _tiers(servers: Mapping[str, list[Line]]) -> tuple[str, dict[str, int]]:
    """Returns the file of the server above, the first without relays, and the rank of each relay by file."""
    for name, lines in servers.items():
        ranks = {line["rank"] for line in lines if line.op == "join"}
        regions = {region_run(run, rank): rank for run in _runs(lines) for rank in ranks}
        relays = {
            other: regions[run] for other, of_other in servers.items() for run in _runs(of_other) if run in regions
        }
        if relays:
            return name, relays
    return next(iter(servers), ""), {}


def _of_region(rank: int, above: ServerLines, region: ServerLines) -> tuple[Region, str]:
    """Returns a region, and a message unless the samples that count above are those up to one of its versions.

    Later versions of a region may come after the end of the run above.
    """
    counted = sum(above.samples.get(item, 0) for item in above.lineage.contributions() if item[0] == rank)
    counted += above.set_aside.get(rank, 0)
    total, totals = 0, {0: 0}  # by version
    for version, worker, number in region.lineage.commits():
        totals[version] = total = total + region.samples.get((worker, number), 0)
    if region.has_gaps or above.has_gaps or (above.tally.restarts and rank in above.set_aside):
        return Region(region.tally, total, None), ""
    message = f"the run above counts {counted:,} samples of this region, rank {rank}: no version has them, of {total:,}"
    return Region(region.tally, total, counted), "" if counted in totals.values() else message
