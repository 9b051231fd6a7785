"""Decides which process of a run goes to which node of a Slurm job. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...common.errors import UsageError
from .runs import Child, ProcessSpec


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, with the number of its tasks and cores on each."""

    job: str
    nodes: tuple[str, ...]
    tasks: tuple[int, ...]
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a process runs: the node, and its number among the node's workers."""

    node: str
    local_rank: int
    num_threads: int


def parse_counts(text: str) -> tuple[int, ...]:
    """Returns a number for each node: `4,1(x2)` is 4, 1, 1."""
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return tuple(counts)


def place_on_nodes(specs: Sequence[ProcessSpec], allocation: Allocation) -> dict[Child, Place]:
    """Returns the placement of each process: servers on the nodes in turn, workers in the tasks of node after node.

    Each server takes a task where there are enough. Raises UsageError for fewer tasks than workers.
    """
    servers = [spec.child for spec in specs if spec.child.role == "server"]
    workers = [spec.child for spec in specs if spec.child.role != "server"]
    chosen = {child: index % len(allocation.nodes) for index, child in enumerate(servers)}
    free = list(allocation.tasks)
    if sum(free) >= len(specs):
        taken = Counter(chosen.values())
        free = [max(0, tasks - taken[index]) for index, tasks in enumerate(free)]
    slots = [index for index, tasks in enumerate(free) for _ in range(tasks)]
    if len(slots) < len(workers):
        raise UsageError(
            f"{len(workers)} workers need a task each, but job {allocation.job} has {sum(allocation.tasks)} tasks",
            fix=f"ask for more, salloc -n {len(specs)}, or -n {len(slots)} here",
        )
    chosen |= dict(zip(workers, slots, strict=False))
    here = Counter(chosen.values())
    seen: Counter[int] = Counter()
    places = {}
    for child, index in chosen.items():
        num_threads = max(1, allocation.cores[index] // here[index])
        places[child] = Place(allocation.nodes[index], seen[index], num_threads)
        seen[index] += child.role != "server"
    return places
