"""Plans a run: one command line and environment for each process. Pure.

One run is one `Plan`: a server and N workers. The mode `single` is one worker that trains alone on the union batch
(batch size times N), so that it makes sync's updates on sync's samples.

Children read the same `--config FILE`. Settings from the launcher's flags follow as `--set key=value`, so there is one
mechanism for all of them; children inherit `PS_SECTION__KEY` variables. A user's script has no such flags and gets all
settings as variables. Workers and the other shards of the server need its address, which is known once it listens:
`Plan.workers(address)`, `Plan.shards(address)`. With regions (`regions.py`) relays take the place of shards.

Where processes may run on other machines (`Machine.spans_hosts`), the settings of CONFIG follow as --set too, and the
launcher writes the summary. `hosts.py` decides which process runs where.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...common.combinations import check, check_values
from ...common.config.schema import Config
from ...common.config.sources import Resolved, scalar_text
from ...common.registry import MODES, mode_label
from . import regions
from .hosts import SERVE, SERVER, WILDCARDS, Child, Host, ProcessSpec
from .settings import (
    DEFAULT_HOST,
    SINGLE,
    arguments,
    check_together,
    chosen,
    code_file,
    file_of,
    for_workers,
    listen_address,
    own_identity,
    own_path,
    passed_settings,
    read_files,
    single_settings,
    value_of,
    variable,
)

DEFAULT_NUM_WORKERS = 2
# Arguments of the interpreter that start each program. -P: a queue.py in the current folder is not Python's.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "server": ("-P", "-m", "paramserver.ps"),
    "worker": ("-P", "-m", "paramserver.worker"),
    "group": ("-P", "-m", "paramserver.worker.replica_group"),  # several processes of one worker
    "serve": ("-P", "-m", "paramserver.serve"),
}

# Files and directories that each run of several has its own of.
_OWN_PATHS = ("output.save", "output.history", "output.curve", "output.best_weights", "checkpoint.dir")
_NUM_POINTS = 20  # of the curves in a report
# Settings that a script decides itself, or gets with its rank and address.
_NOT_FOR_SCRIPTS = ("optimizer.", "train.", "loader.", "output.", "worker.rank", "worker.server", "run.workers")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line beside the settings."""

    modes: tuple[str, ...]
    config_path: str | None = None
    script_args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine where a plan is made."""

    python: str
    environ: Mapping[str, str] = field(default_factory=dict)
    exists: Callable[[str], bool] = lambda path: False
    spans_hosts: bool = False  # processes may land on other machines
    places: Mapping[Child, Host] = field(default_factory=dict)  # of processes whose host is known beforehand
    hosts: Sequence[Host] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: the processes of the server, and what its workers have in common."""

    mode: str
    seed: int | None  # None: all runs of the mode have the configured one
    config: Config
    num_workers: int
    num_shards: int
    save: str | None  # paths of this run's weights,
    history: str | None
    checkpoint_dir: str | None  # snapshots,
    summary: str | None  # and the summary where the launcher writes it instead of the server
    listen: str  # the coordinator's address
    server_argv: tuple[str, ...]
    relay_argv: tuple[str, ...]
    server_env: Mapping[str, str]
    worker_argv: tuple[str, ...]
    worker_env: Mapping[str, str]
    identities: Mapping[Child, Mapping[str, Any]]  # certificate settings that differ from the configured ones
    places: Mapping[Child, Host]
    workers_of: Mapping[Child, range]  # of the relay of each region, by their ranks among all workers; or empty
    knows_hosts: bool  # otherwise the backend decides where processes run

    def server_of(self, child: Child) -> Child:
        """Returns the server that a process connects to."""
        mine = (relay for relay, workers in self.workers_of.items() if child.rank in workers)
        return next(mine, SERVER) if child.role == "worker" else SERVER

    def worker_of(self, server: Child, rank: int) -> Child:
        """Returns the process that has a rank in the run of a server."""
        if server in self.workers_of:
            return Child("worker", self.workers_of[server].start + rank)
        return dict(enumerate(self.workers_of)).get(rank, Child("worker", rank))

    @property
    def is_script(self) -> bool:
        return self.config.launch.script is not None

    @property
    def server(self) -> ProcessSpec | None:
        """The coordinator."""
        return self._server(SERVER, "") if self.mode != SINGLE else None

    @property
    def reporter(self) -> Child:
        """The process that reports status and summary of the run."""
        return SERVER if self.mode != SINGLE else Child("worker", 0)

    def process(
        self, child: Child, address: str | None, *, num_lost: int = 0, listen: str = "", has_snapshot: bool = False,
        dashboard: str = "",
    ) -> ProcessSpec:  # fmt: skip
        """Returns how to start a process. `address`: the coordinator's; None where there is no server.

        `num_lost`: processes of the worker that were lost, without which it may start (launch.group_min). A server that
        starts again listens at its old address, `listen`, and has its dashboard where browsers have it open. It starts
        from this run's newest snapshot; without one (`has_snapshot`) as it did at first.
        """
        if child.role == "worker":
            spec, least, at = self._worker(child, address), self.config.launch.group_min, 1 + len(PROGRAMS["group"])
            if least is None or not num_lost:
                return spec
            group = str(max(least, self.config.launch.group - num_lost))  # after the interpreter
            return dataclasses.replace(spec, argv=(*spec.argv[:at], group, *spec.argv[at + 1 :]))
        if child == SERVE:
            return self.serve(address or "")
        spec = self._server(child, address or "")
        again: dict[str, Any] = {"server.listen": listen} if listen else {}
        again |= {"checkpoint.resume": None} if has_snapshot else {}
        again |= {"server.web": dashboard} if dashboard else {}
        return dataclasses.replace(spec, argv=(*spec.argv, *arguments(None, again)))

    def processes(self, address: str = "") -> list[ProcessSpec]:
        """Returns how to start each process."""
        if self.server is None:
            return self.workers(None)
        serve = [self.serve(address)] if self.serves_at else []
        return [self.server, *self.shards(address), *self.workers(address), *serve]

    def hosts(self) -> dict[Child, str]:
        """Returns the host of each process that has a placement."""
        return {child: self.places[child].host for child in self._children if child in self.places}

    def workers(self, address: str | None) -> list[ProcessSpec]:
        return [self._worker(child, address) for child in self._children if child.role == "worker"]

    def shards(self, address: str) -> list[ProcessSpec]:
        """Returns how to start the shards, or the relays, beside the coordinator."""
        return [self._server(child, address) for child in self._children if child.role == "server" and child != SERVER]

    @property
    def serves_at(self) -> str:
        """The address of ps-serve beside the run; empty: there is none."""
        (host, _, port), wanted = self.config.serve.listen.rpartition(":"), self.config.launch.serve
        return "" if wanted is None or self.mode == SINGLE else f"{host}:{wanted or port}"

    def serve(self, address: str) -> ProcessSpec:
        """Returns how to start ps-serve, with the settings of the server."""
        settings = self.server_argv[1 + len(PROGRAMS["server"]) :]
        settings_of_serve = {"serve.listen": self.serves_at, **self.identities.get(SERVE, {})}
        where = (*arguments(None, settings_of_serve), "--server", address)
        return ProcessSpec(SERVE, (self.server_argv[0], *PROGRAMS["serve"], *settings, *where), self.server_env)

    def _server(self, child: Child, address: str) -> ProcessSpec:
        placement, identity = self.places.get(child), self.identities.get(child, {})
        settings: dict[str, Any] = {"server.listen": self.listen}
        if self.num_shards > 1:
            settings["server.shards"] = self.num_shards
        if child == SERVER:
            if self.per_hour is not None:
                settings["cost.total_per_hour"] = self.per_hour
            if self.config.launch.web and self.config.server.web is None:
                settings["server.web"] = f"{DEFAULT_HOST}:0"
            if self.serves_at:  # the dashboard links to it
                settings["launch.serve"] = int(self.serves_at.rpartition(":")[2])
        else:
            host = self.listen.rpartition(":")[0] or DEFAULT_HOST
            listen = placement.listen if placement is not None and host not in WILDCARDS else host
            settings |= {"server.listen": f"{listen}:0"}
            if child in self.workers_of:
                settings |= regions.settings_of_relay(self.config, child, address, len(self.workers_of[child]))
                settings |= self._history_of(child)
            else:
                settings |= {"server.shard": child.rank, "server.coordinator": address}
            if self.config.server.direct_port:
                settings["server.direct_port"] = 0
            if placement is None and self.config.server.metrics is not None:
                settings["server.metrics"] = None  # the coordinator has that port on this host
        argv = self.relay_argv if child.region else self.server_argv
        argv = (*argv, *arguments(None, {**settings, **identity}))
        needs = read_files(self.config.security, identity, file_of(self.mode))
        written = self._history_of(child).values() if child.region else (self.save, self.history)
        leaves = tuple(path for path in written if path and (child.region or child == SERVER))
        reports = child == SERVER or bool(child.region)  # those of a relay are of its region alone
        spec = ProcessSpec(child, argv, self.server_env, needs=needs, leaves=leaves, reports=reports)
        return self._on_its_host(spec)

    def _worker(self, child: Child, server: str | None) -> ProcessSpec:
        address, identity = server or "none", dict(self.identities.get(child, {}))
        needs = read_files(self.config.security, identity, code_file(self.config))
        if child == self.reporter and self.per_hour is not None:
            identity["cost.total_per_hour"] = self.per_hour
        argv, env, rank, workers = self.worker_argv, self.worker_env, str(child.rank), str(self.num_workers)
        relay = self.server_of(child)
        if near := self.workers_of.get(relay):
            rank, workers = str(near.index(child.rank)), str(len(near))
            identity |= regions.settings_of_size(self.config, len(near)) | self._history_of(relay)
        if self.is_script:
            env = {**env, **{variable(key): scalar_text(value) for key, value in identity.items()}}
            env |= {variable("worker.rank"): rank, variable("run.workers"): workers, "PS_SERVER": address}
            if self.config.launch.torch_variables:
                env |= {"RANK": str(child.rank), "WORLD_SIZE": str(self.num_workers)}
        else:
            argv = (*argv, *arguments(None, identity), "--server", address, "--rank", rank)
            needs += (self.config.task.init,) if self.config.task.init is not None else ()
        reports = child == self.reporter
        return self._on_its_host(ProcessSpec(child, argv, env, needs=needs, reports=reports))

    def _on_its_host(self, spec: ProcessSpec) -> ProcessSpec:
        """Returns the process with the interpreter and variables of its placement, and its share of the cores."""
        placement, is_worker = self.places.get(spec.child), spec.child.role == "worker"
        num = self._num_sharing[spec.child.role, placement.host if placement is not None else ""]
        num *= self.config.launch.group if is_worker and self.mode != SINGLE else 1
        is_left_alone = not self.knows_hosts or self.config.worker.threads is not None or (num == 1 and not is_worker)
        spec = dataclasses.replace(spec, sharing=0 if is_left_alone else num)
        if placement is None:
            return spec
        env = {**spec.env, **placement.env}
        return dataclasses.replace(
            spec, argv=(placement.python or spec.argv[0], *spec.argv[1:]), env=env, host=placement.host
        )

    @cached_property
    def _num_sharing(self) -> Counter[tuple[str, str]]:
        """How many processes share the cores of a host, by role and host. torch's default is all cores in each."""
        hosts = self.hosts()
        return Counter((child.role, hosts.get(child, "")) for child in self._children)

    @cached_property
    def _children(self) -> list[Child]:
        """The servers, the coordinator first, then the workers."""
        workers = [Child("worker", rank) for rank in range(self.num_workers)]
        if self.mode == SINGLE:
            return workers
        return [SERVER, *(self.workers_of or (Child("server", rank) for rank in range(1, self.num_shards))), *workers]

    def _history_of(self, relay: Child) -> dict[str, str | None]:
        """Returns the setting of the history of a region's run, none without a history."""
        return {"output.history": own_path(self.history, f"relay-{relay.region}", 2)} if self.history else {}

    @property
    def per_hour(self) -> float | None:
        """The price of an hour of all hosts; None where none has a price, or the configuration sets the total."""
        if self.config.cost.total_per_hour is not None:
            return None
        chosen = [at for child, at in self.places.items() if self.mode != SINGLE or child == self.reporter]
        hosts = {placement.host: placement.per_hour for placement in chosen}
        prices = [self.config.cost.per_hour if price is None else price for price in hosts.values()]
        known = [price for price in prices if price is not None]
        return sum(known) if known else None

    @property
    def rate(self) -> float | None:
        """The price of an hour of the run; None where it is not known."""
        return self.config.cost.rate if self.per_hour is None else self.per_hour

    @property
    def work(self) -> str:
        """The script or the task, as a phrase."""
        return f"script {self.config.launch.script}" if self.is_script else f"task {self.config.task.name}"

    def notes(self, hosts: Sequence[Host]) -> Iterator[tuple[str, str]]:
        """Returns what a user may expect on these hosts and does not get: the name of an event, and a sentence."""
        if self.config.launch.web and self.server is None:
            yield "no_dashboard", f"{self.mode} has no server, and so no dashboard"
        if len(names := {host.region for host in hosts}) == 1 and (name := names.pop()):
            yield "one_region", f"{name} is the only region: a relay gains nothing, and none starts"

    def headline(self) -> str:
        """Returns the run as a phrase: `ssp (staleness 3): a server and 4 workers, 300 steps each, ...`."""
        run, group, server = self.config.run, self.config.launch.group, self.server
        if server is None:
            mode, who, batch, there = self.mode, "one worker alone, no server,", run.batch_size * (run.workers or 1), ""
        else:
            options = MODES.load(self.mode).summary(self.config.policy.options(self.mode))
            mode = f"{self.mode} ({options})" if options else self.mode
            mode += ", delayed_update" if self.config.policy.delayed_update else ""
            servers = "a server" if self.num_shards == 1 else f"a server in {self.num_shards} shards"
            if self.workers_of:
                mode += f" in {len(self.workers_of)} regions, {regions.mode_above(self.config, self.mode)} above"
                mode += f" every {self.config.upstream.every} steps" if self.config.upstream.every else ""
                servers = f"a server, {len(self.workers_of)} relays"
            workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
            workers += f" of {group} processes" if group > 1 else ""
            num_hosts = len(set(self.hosts().values()))
            hosts = f" on {num_hosts} host{'s' if num_hosts > 1 else ''}" if num_hosts else ""
            who, batch = f"{servers} and {workers}{hosts},", run.batch_size
            there = f" on {server.host}" if server.host else ""
        seed = f", seed {self.seed}" if self.seed is not None else ""
        length = f"{run.task_steps:,} steps" if run.task_steps else f"{run.epochs} epochs"
        work = self.work if self.is_script else f"{length}, batch {batch}, {self.work}"
        files = f", weights to {self.save}{there}" if self.save else ""
        files += f", snapshots in {self.checkpoint_dir}{there}" if self.checkpoint_dir else ""
        return f"{mode}{seed}: {who} {work}{files}"


def plan_runs(resolved: Resolved, request: Request, machine: Machine) -> list[Plan]:
    """Returns a plan for each mode and seed. The configuration must name `run.workers`. Raises UsageError."""
    config = resolved.config
    relays = regions.relays_of(resolved, machine.hosts, config.run.workers or DEFAULT_NUM_WORKERS)
    regions.check_together(resolved, request.modes, len(relays), spans_hosts=machine.spans_hosts)
    check_together(resolved, request.modes, request.script_args)
    for mode in request.modes if len(request.modes) == 1 else [mode for mode in request.modes if mode != SINGLE]:
        check(chosen(resolved, mode, **regions.choices(config, len(relays))))
        if mode != SINGLE:
            check_values(config, mode)
    run, num_seeds = config.run, config.launch.seeds
    seeds = [run.seed + index for index in range(num_seeds)] if num_seeds > 1 else [None]
    return [_plan(resolved, request, machine, mode, seed) for mode in request.modes for seed in seeds]


def _plan(resolved: Resolved, request: Request, machine: Machine, mode: str, seed: int | None) -> Plan:
    """`seed`: None where all runs of the mode have the configured one."""
    config = resolved.config
    num_workers = config.run.workers or DEFAULT_NUM_WORKERS
    num_runs = len(request.modes) * config.launch.seeds
    several, label = num_runs > 1, mode if seed is None else f"{mode}-seed{seed}"
    paths = {key: own_path(value_of(config, key), label, num_runs) for key in _OWN_PATHS}
    settings = passed_settings(resolved, with_files=machine.spans_hosts)
    relays = regions.relays_of(resolved, machine.hosts, num_workers)
    num_servers = sum(child.role == SERVER.role for child in machine.places)
    num_shards = num_servers - len(relays) if machine.places else config.server.shards
    settings["run.workers"] = num_workers
    is_script = config.launch.script is not None
    if not is_script and config.run.task_steps != config.run.steps:
        settings["run.steps"] = config.run.task_steps
    if config.output.summary and (several or machine.spans_hosts):
        settings["output.summary"] = None  # the launcher writes it
    if seed is not None:
        settings["run.seed"] = seed
    if config.output.report is not None and config.run.eval_every is None and not is_script:
        steps = config.run.task_steps
        settings["run.eval_every"] = max(1, steps // _NUM_POINTS) if steps else "1epoch"
    if several:
        if paths["output.best_weights"] is None:  # beside the weights of each run
            paths["output.best_weights"] = own_path(config.output.best, label, num_runs)
        settings |= {key: path for key, path in paths.items() if path}
        if config.output.name is not None:
            settings["output.name"] = f"{config.output.name}-{mode_label(label)}"
    children = [Child("worker", rank) for rank in range(num_workers)]
    children += [Child("server", shard) for shard in range(num_shards)] if num_shards > 1 else []
    children += [SERVE] if config.launch.serve is not None else []
    group = config.launch.group
    if mode == SINGLE:
        settings = {key: value for key, value in settings.items() if not key.startswith(("run.mode", "checkpoint."))}
        settings |= single_settings(config, num_workers)
        paths["checkpoint.dir"], relays, children, num_workers, group = None, {}, [], 1, 1
    elif several or "run.mode" in settings:
        settings["run.mode"] = mode
    config_path = None if machine.spans_hosts else request.config_path
    level = "debug" if config.log.level == "debug" else "info"
    env = {"PS_LOG__FORMAT": "json", "PS_LOG__LEVEL": level, "PYTHONUNBUFFERED": "1"}
    worker_argv, worker_env = (*PROGRAMS["worker"], *arguments(config_path, for_workers(settings))), env
    if config.launch.script is not None:
        worker_argv = (config.launch.script, *request.script_args)
        of_run = {"run.mode": mode, "run.seed": config.run.seed if seed is None else seed}
        worker_env = {**_script_env(resolved, settings | of_run, paths["output.history"], machine.environ), **env}
    if group > 1:
        worker_argv = (*PROGRAMS["group"], str(group), *worker_argv)
        worker_env = worker_env | {variable("worker.group"): "true"}
    above = regions.settings_above(config, mode, settings, len(relays)) if relays else settings
    of_relays = regions.settings_of_relays(config, mode, settings) if relays else {}
    return Plan(
        mode=mode,
        seed=seed,
        config=config,
        num_workers=num_workers,
        num_shards=num_shards,
        save=paths["output.save"],
        history=paths["output.history"],
        checkpoint_dir=paths["checkpoint.dir"],
        summary=config.output.summary if machine.spans_hosts and not several else None,
        listen=listen_address(resolved, machine.places.get(SERVER), spans_hosts=machine.spans_hosts),
        server_argv=(machine.python, *PROGRAMS["server"], *arguments(config_path, above)),
        relay_argv=(machine.python, *PROGRAMS["server"], *arguments(config_path, of_relays)),
        server_env=env,
        worker_argv=(machine.python, *worker_argv),
        worker_env=worker_env,
        identities=_identities(config, children, machine, relays),
        places=machine.places,
        workers_of=relays,
        knows_hosts=not machine.spans_hosts or bool(machine.places),
    )


def _identities(
    config: Config, children: list[Child], machine: Machine, relays: Mapping[Child, range]
) -> dict[Child, dict[str, Any]]:
    """Returns the certificate settings of each process. A relay is also a worker, of its region's rank.

    A worker of a region shows the rank that it has there.
    """
    security, exists = config.security, machine.exists
    local = {rank: at for workers in relays.values() for at, rank in enumerate(workers)}
    found = {}
    for child in children:
        at = local.get(child.rank, child.rank) if child.role == "worker" else child.rank
        found[child] = own_identity(security, dataclasses.replace(child, rank=at), exists)
    for relay in relays if security.mutual else ():
        above = own_identity(security, Child("worker", relay.rank - 1), exists)
        found[relay] = {key.replace("security", "upstream"): path for key, path in above.items()}
    return found


def _script_env(
    resolved: Resolved, settings: Mapping[str, Any], history: str | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the run's settings as variables, for workers that run the user's script. `settings`: of this run.

    A length that is off hides the launcher's own variable (`environ`), which the script would inherit.
    """
    run = resolved.config.run
    length = {"run.steps": run.steps, "run.epochs": run.epochs}
    length = {key: value for key, value in length.items() if value is not None or variable(key) in environ}
    env = {
        variable(key): scalar_text(value)
        for key, value in for_workers({**passed_settings(resolved, with_files=True), **settings, **length}).items()
        if not key.startswith(_NOT_FOR_SCRIPTS) and key == key.lower()
    }
    # Workers write to the history too, unlike to the server's other files.
    return env if history is None else env | {"PS_OUTPUT__HISTORY": scalar_text(history)}
