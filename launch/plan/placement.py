"""Decides which process of a run goes to which host, or to which node of a Slurm job. Pure.

Servers go to the first host, or in turn to the hosts with `server: true`. Workers fill the slots of the first host,
then those of the next. With `colocate` each host with workers also has one server shard, the coordinator on the first
of them. With several regions, the relay of each goes to the host that the region is named after, else to its
first host. Workers fill region after region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...common.errors import UsageError
from .hosts import THIS_MACHINE, Host
from .process import Child, ProcessSpec


def place_workers(hosts: Sequence[Host], num_workers: int) -> list[Host]:
    """Returns the host of each rank, slot after slot. Raises UsageError for too few slots."""
    regions = [host.region for host in hosts]
    by_region = sorted(hosts, key=lambda host: regions.index(host.region))
    slots = [host for host in by_region for _ in range(host.slots)]
    if len(slots) < num_workers:
        each = ", ".join(f"{host.host} {host.slots}" for host in hosts)
        raise UsageError(
            f"{num_workers} workers need a slot each, but the hosts have {len(slots)} slots: {each}",
            fix=f"-n {len(slots)}, or more slots or hosts",
        )
    return slots[:num_workers]


def place_servers(hosts: Sequence[Host], num_shards: int) -> list[Host]:
    """Returns the host of each shard."""
    chosen = [host for host in hosts if host.server] or [hosts[0]]
    return [chosen[shard % len(chosen)] for shard in range(num_shards)]


def place_processes(
    hosts: Sequence[Host], num_workers: int, num_shards: int, *, colocate: bool, folder: str, group: int = 1
) -> dict[Child, Host]:
    """Returns the host of every process, with its interpreter and variables; empty without hosts. Raises UsageError.

    `folder`: where the launcher was started. `group`: processes of each worker, which take as many devices.
    """
    if not hosts:
        return {}
    workers = place_workers(hosts, num_workers)
    servers = list({host.host: host for host in workers}.values())
    if not colocate:
        servers = place_servers(hosts, num_shards)
        regions = dict.fromkeys(host.region for host in hosts)
        for region in regions if len(regions) > 1 else ():  # each has a relay
            of_region = [host for host in hosts if host.region == region]
            servers.append(max(of_region, key=lambda host: host.host == host.region))
    check_addresses(servers, workers)
    places = {}
    for role, chosen in (("server", servers), ("worker", workers)):
        seen = Counter[str]()
        for rank, host in enumerate(chosen):
            env = dict(host.env)
            if role == "worker" and host.devices:
                env["CUDA_VISIBLE_DEVICES"] = _devices_of(host, seen[host.host], group)
            seen[host.host] += 1
            changes = {"env": env, "python": host.interpreter(folder), "venv": None}
            places[Child(role, rank)] = host.model_copy(update=changes)
    return places


def _devices_of(host: Host, worker: int, group: int) -> str:
    """Returns the devices of a host's `worker`th worker; more workers than devices share them."""
    num = len(host.devices)
    if num % group:
        raise UsageError(
            f"{host.host} has {num} devices, and workers of {group} processes each (launch.group) do not divide them",
            fix=f"name a multiple of {group} devices there, or another --group",
        )
    first = worker * group % num
    return ",".join(map(str, host.devices[first : first + group]))


def check_addresses(servers: Sequence[Host], workers: Sequence[Host]) -> None:
    """Raise UsageError for servers on this machine without an address that the other hosts know."""
    elsewhere = next((host.host for host in [*workers, *servers] if host.host != THIS_MACHINE), None)
    for host in servers:
        if host.host == THIS_MACHINE and host.address in (None, THIS_MACHINE) and elsewhere is not None:
            raise UsageError(
                f"servers on {THIS_MACHINE}: {elsewhere} could not find them by that name",
                fix="give the entry an address that the other hosts can reach, address: 10.0.0.1",
            )


# ---- the nodes of a Slurm job


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, with the number of its tasks and cores on each."""

    job: str
    nodes: tuple[str, ...]
    tasks: tuple[int, ...]
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """Where a process runs in a job: the node, and its number among the node's workers."""

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


def place_on_nodes(specs: Sequence[ProcessSpec], allocation: Allocation) -> dict[Child, Task]:
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
        places[child] = Task(allocation.nodes[index], seen[index], num_threads)
        seen[index] += child.role != "server"
    return places
