"""The machines of a job (hosts.yaml), the names of its processes, and which process goes where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from ...common.config.option import Section
from ...common.config.sources import built, items, read_document, refusal, scalar_text
from ...common.errors import UsageError, did_you_mean

THIS_MACHINE = "localhost"  # started without ssh
_EXAMPLE = "configs/hosts.example.yaml"


class Host(Section):
    """One machine. Its paths are paths there: ~ is the home there, relative paths are below workdir."""

    host: str = Field(min_length=1, description="name for ssh, also an alias of ~/.ssh/config; localhost: no ssh")
    user: str | None = Field(None, min_length=1, description="user to log in as; none: as ssh decides")
    port: int | None = Field(None, ge=1, le=65535, description="port of its sshd; none: as ssh decides")
    address: str | None = Field(None, min_length=1, description="address of its servers; none: what ssh connects to")
    slots: int = Field(1, ge=1, le=4096, description="number of workers; none: one for each device, or 1")
    server: bool = Field(False, description="run servers here; none of the hosts: the first one runs them")
    python: str | None = Field(None, description="interpreter in which paramserver is installed")
    venv: str | None = Field(None, description="virtual environment with that interpreter")
    workdir: str | None = Field(None, description="where processes start; none: the launcher's directory")
    per_hour: float | None = Field(None, ge=0, description="price of an hour; none: cost.per_hour")
    region: str | None = Field(None, min_length=1, description="its region: hosts that are close to each other")
    env: dict[str, str] = Field(default_factory=dict, description="variables of its processes")
    devices: tuple[int | str, ...] = Field((), description="its GPUs; each worker sees one, in turn")

    @field_validator("host", "region")
    @classmethod
    def _is_no_option(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and (value.startswith("-") or any(character.isspace() for character in value)):
            raise ValueError(f"is not the name of a {info.field_name}: no spaces, and no - at its beginning")
        return value

    @model_validator(mode="before")
    @classmethod
    def _a_slot_for_each_device(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("devices") and "slots" not in values:
            return {**values, "slots": len(values["devices"])}
        return values

    @model_validator(mode="after")
    def _one_interpreter(self) -> Host:
        if self.python is not None and self.venv is not None:
            raise ValueError("python and venv are two ways to name the interpreter: give one")
        return self

    @property
    def listen(self) -> str:
        """The host part of the address of its servers."""
        address = self.address or ("127.0.0.1" if self.host == THIS_MACHINE else self.host)
        return f"[{address}]" if ":" in address else address

    def folder(self, launchers: str) -> str:
        """Returns the directory of its processes. `launchers`: the launcher's directory."""
        return self.workdir if self.workdir is not None else launchers

    def interpreter(self, launchers: str) -> str:
        """Returns the interpreter's path, or a name for the PATH there."""
        python = self.python or "python3" if self.venv is None else f"{self.venv.rstrip('/')}/bin/python"
        if "/" not in python or python.startswith(("/", "~")):
            return python
        return f"{self.folder(launchers).rstrip('/')}/{python}"


def load_hosts(path: str) -> tuple[Host, ...]:
    """Returns the hosts of a file, in its order. Raises UsageError with file:line."""
    nodes, defaults = _hosts_nodes(path)
    hosts: dict[str, Host] = {}
    for node in nodes:
        host = _host(node, defaults, path)
        if host.host in hosts:
            raise UsageError(
                f"{path}:{node.start_mark.line + 1}: {host.host} is there already",
                fix=f"give it more slots, it has {hosts[host.host].slots}",
            )
        hosts[host.host] = host
    return tuple(hosts.values())


def text_with_regions(path: str, regions: Mapping[str, str]) -> str:
    """Returns the text of a hosts file with the region of each host. All else stays as it is.

    Raises UsageError, and KeyError for an entry that takes its name from the defaults. Other unusual forms, such as
    aliases, give a text with another meaning.
    """
    text = Path(path).read_text(encoding="utf-8")
    for node in reversed(_hosts_nodes(path)[0]):
        start, end, new = _region_edit(node, regions, text)
        text = text[:start] + new + text[end:]
    return text


def _region_edit(node: yaml.Node, regions: Mapping[str, str], text: str) -> tuple[int, int, str]:
    """Returns where an entry's text changes, and the new text."""
    if not isinstance(node, yaml.MappingNode):  # only the name of a host
        start, end = node.start_mark.index, node.end_mark.index
        return start, end, f"{{host: {text[start:end]}, region: {scalar_text(regions[node.value])}}}"
    entries = {key.value: (key, value) for key, value in node.value}
    key, value = entries["host"]
    region = scalar_text(regions[value.value])
    if "region" in entries:
        found = entries["region"][1]
        return found.start_mark.index, found.end_mark.index, region
    at = value.end_mark.index
    if node.flow_style:
        return at, at, f", region: {region}"
    at = text.find("\n", at) if "\n" in text[at:] else len(text)
    return at, at, f"\n{' ' * key.start_mark.column}region: {region}"


def _hosts_nodes(path: str) -> tuple[list[yaml.Node], dict[str, Any]]:
    """Returns the entries of a hosts file, and the defaults for each. Raises UsageError."""
    entries = read_document(path, "the hosts", f"see {_EXAMPLE}")
    defaults: dict[str, Any] = {}
    if isinstance(entries, yaml.MappingNode):
        parts = {name: node for name, node, _ in _known(entries, ("hosts", "defaults"), path)}
        if "defaults" in parts:
            defaults, _ = _entry(parts["defaults"], path)
        entries = parts.get("hosts")
    if not isinstance(entries, yaml.SequenceNode) or not entries.value:
        raise UsageError(f"{path}: names no hosts", fix=f"write a list below 'hosts:', see {_EXAMPLE}")
    return list(entries.value), defaults


def _host(node: yaml.Node, defaults: Mapping[str, Any], path: str) -> Host:
    """One entry: a mapping, or only the name of a host."""
    entry, origins = ({"host": node.value}, {}) if isinstance(node, yaml.ScalarNode) else _entry(node, path)
    if "python" in entry or "venv" in entry:  # either names the interpreter
        defaults = {name: value for name, value in defaults.items() if name not in ("python", "venv")}
    merged = {**defaults, **entry}
    if isinstance(entry.get("env"), dict) and isinstance(defaults.get("env"), dict):
        merged["env"] = {**defaults["env"], **entry["env"]}
    try:
        return Host.model_validate(merged)
    except ValidationError as error:
        raise refusal(error, origins, f"{path}:{node.start_mark.line + 1}") from None


def _entry(node: yaml.Node, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the keys of a host in a mapping: their values, and their lines."""
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(
            f"{path}:{node.start_mark.line + 1}: expected keys such as 'host:' and 'slots:'", fix=f"see {_EXAMPLE}"
        )
    found = list(_known(node, Host.model_fields, path))
    origins = {key: f"{path}:{line}" for key, _, line in found}
    return {key: built(value, f"{origins[key]}: {key}") for key, value, _ in found}, origins


def _known(node: yaml.MappingNode, known: Collection[str], path: str) -> Iterator[tuple[str, yaml.Node, int]]:
    for key, value, line in items(node):
        if key not in known:
            raise UsageError(f"{path}:{line}: unknown key '{key}'", fix=did_you_mean(key, known))
        yield key, value, line


# ---- process -------------------------------------------------------------------------------------
# A process of a run: its name, and how to start it. Pure.


WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # with the addresses at which this machine reaches them


@dataclass(frozen=True)
class Child:
    """The stable name of a process of the run. Server 0 is the coordinator. The others are shards, or relays."""

    role: str  # "server", "worker" or "serve"
    rank: int
    region: str = field(default="", compare=False)  # of a relay

    def __str__(self) -> str:
        if self.region:
            return f"relay {self.region}"
        if self.role == "server":
            return f"server shard {self.rank}" if self.rank else "server"
        return self.role if self == SERVE else f"{self.role} {self.rank}"


SERVER = Child("server", 0)
SERVE = Child("serve", 0)  # ps-serve beside the run


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `env` is added to the backend's environment."""

    child: Child
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str = ""  # of its placement; "": the backend decides
    sharing: int = 0  # processes that share that host's cores; 0: the launcher sets no number of threads
    needs: tuple[str, ...] = ()  # files that it reads on its host
    leaves: tuple[str, ...] = ()  # files that it writes there
    reports: bool = False  # the results of the run


# ---- placement -----------------------------------------------------------------------------------
# Decides which process of a run goes to which host, or to which node of a Slurm job. Pure.
#
# Servers go to the first host, or in turn to the hosts with `server: true`. Workers fill the slots of the first host,
# then those of the next. With `colocate` each host with workers also has one server shard, the coordinator on the
# first of them. With several regions, the relay of each goes to the host that the region is named after, else to its
# first host. Workers fill region after region.


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
