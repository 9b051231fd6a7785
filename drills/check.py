"""Checks in history files that every contribution was applied exactly once and nothing durable was lost. Pure.

The rules for the server are in `server_lines.py` and `seats.py`, those for workers in `worker_lines.py`.
Their lines may be in the same file or in other files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .history_lines import Line, Problem, read_lines
from .lineage import Lineage, Tally
from .regions import Comparison, compared, runs_of, tiers, without_empty_starts
from .server_lines import ServerLines
from .worker_lines import check_workers


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
    comparisons: Sequence[Comparison] = ()  # of a relay's history with that of the server above

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
    first, ranks = tiers(servers)
    checked: dict[str, ServerLines] = {}
    for name, lines in servers.items():
        if name != first and name not in ranks:
            message = f"a second server's history, of no region of the first, {first}"
            problems.append(Problem(name, lines[0].number, message))
            continue
        checked[name] = server = ServerLines(modes, keeps_state=name not in ranks)
        for line in without_empty_starts(lines) if name in ranks else lines:
            server.feed(line)
        server.finish()
        others = {run for other, of_other in servers.items() if other != name for run in runs_of(of_other)}
        is_mine = runs_of(lines).__contains__ if name != first else lambda run, others=others: run not in others
        problems += server.problems + check_workers([line for run, line in of_workers if is_mine(run)], server)
    comparisons = [compared(name, rank, checked[first], checked[name]) for name, rank in ranks.items()]
    problems += [Problem(found.file, 0, found.problem) for found in comparisons if found.problem]
    order = {name: index for index, name in enumerate(files)}
    problems.sort(key=lambda problem: (order.get(problem.file, -1), problem.number))
    found = checked.get(first, ServerLines())
    unchecked = tuple(dict.fromkeys(mode for server in checked.values() for mode in server.unchecked_modes))
    deleted = tuple(text for server in checked.values() for text in server.deleted)
    return Verdict(
        problems, found.tally, num_lines, found.lineage, unchecked, deleted, found.samples,
        servers[first][-1].op if servers else "end", comparisons,
    )  # fmt: skip


def _with_runs(lines: Iterable[Line]) -> list[tuple[str, Line]]:
    """Returns the lines of workers, each with the run that its worker has joined."""
    runs: dict[int, str] = {}
    found = []
    for line in lines:
        if line.op == "start":
            runs[line["rank"]] = line["run"]
        found.append((runs.get(line["rank"], ""), line))
    return found
