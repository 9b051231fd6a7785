"""What to start: from the settings to one command line and environment per process. Pure.

One run is one `Plan`: a server and N workers, or for the mode `single` one worker that trains
alone on the union batch (batch size times N), so that it makes sync's updates on sync's samples.

Children read the same `--config FILE`. Settings from the launcher's flags follow as
`--set key=value`, so there is one mechanism for all of them; `PS_SECTION__KEY` variables are
inherited anyway. A user's script knows no such flags and gets everything as such variables.
Workers and the other shards of the server need its address, known only once it listens:
`Plan.workers(address)`, `Plan.shards(address)`.

Where processes may land on other machines (`Machine.spans_hosts`), no file is: what the launcher read from
CONFIG follows as --set too, and the summary is written by the launcher. `placement.py` says who runs where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...common.config.documents import scalar_text
from ...common.config.schema import Config
from ...common.config.sources import Resolved
from ...common.registry import MODES
from .placement import Place
from .process import SERVER, WILDCARDS, Child, ProcessSpec
from .settings import (
    DEFAULT_HOST,
    SINGLE,
    arguments,
    check_together,
    code_file,
    file_of,
    for_workers,
    listen_host,
    own_identity,
    own_path,
    read_files,
    single_settings,
    told_settings,
    value_of,
    variable,
)

DEFAULT_NUM_WORKERS = 2
# Arguments of the interpreter that start each program.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "server": ("-m", "paramserver.ps"),
    "worker": ("-m", "paramserver.worker"),
    "group": ("-m", "paramserver.worker.replica_group"),  # several processes of one worker
}

# Files and directories of which each mode has its own where several run.
_OWN_PATHS = ("output.save", "output.history", "output.curve", "output.best_weights", "checkpoint.dir")
_EVALUATED = 20  # times, for a report
# Beside the launcher's own, what a script is told with its place or decides itself.
_NOT_FOR_SCRIPTS = ("optimizer.", "train.", "loader.", "output.", "worker.rank", "worker.server", "run.workers")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asked for beside the settings."""

    modes: tuple[str, ...]
    config_path: str | None = None
    script_args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan needs to know of the place where it is made."""

    python: str
    num_cores: int
    environ: Mapping[str, str] = field(default_factory=dict)
    exists: Callable[[str], bool] = lambda path: False
    spans_hosts: bool = False  # processes may land on other machines
    places: Mapping[Child, Place] = field(default_factory=dict)  # on which ones, where that is known beforehand


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: the server's processes and what its workers have in common."""

    mode: str
    seed: int | None  # where others of the same mode have others
    config: Config
    num_workers: int
    num_shards: int
    save: str | None  # where this run's weights go
    history: str | None  # and what was applied when
    checkpoint_dir: str | None  # and its snapshots
    summary: str | None  # a file the launcher writes after this run, when the server does not
    listen: str  # the coordinator's address
    server_argv: tuple[str, ...]
    server_env: Mapping[str, str]
    worker_argv: tuple[str, ...]
    worker_env: Mapping[str, str]
    identities: Mapping[Child, Mapping[str, Any]]  # settings of those whose certificate is not the configured one
    places: Mapping[Child, Place]

    @property
    def is_script(self) -> bool:
        return self.config.launch.script is not None

    @property
    def server(self) -> ProcessSpec | None:
        """The coordinator."""
        return self._server(SERVER, "") if self.mode != SINGLE else None

    @property
    def reporter(self) -> Child:
        """The process whose status and summary events tell about the run."""
        return SERVER if self.mode != SINGLE else Child("worker", 0)

    def process(self, child: Child, address: str | None) -> ProcessSpec:
        """One of them, given the coordinator's address, which it does not need itself (None: there is no server)."""
        return self._server(child, address or "") if child.role == SERVER.role else self._worker(child, address)

    def processes(self, address: str = "") -> list[ProcessSpec]:
        """All of them."""
        if self.server is None:
            return self.workers(None)
        return [self.server, *self.shards(address), *self.workers(address)]

    def hosts(self) -> dict[Child, str]:
        """The host of each process that has been placed."""
        return {spec.child: spec.host for spec in self.processes() if spec.host}

    def workers(self, address: str | None) -> list[ProcessSpec]:
        return [self._worker(Child("worker", rank), address) for rank in range(self.num_workers)]

    def shards(self, address: str) -> list[ProcessSpec]:
        """The servers beside the coordinator."""
        return [self._server(Child("server", rank), address) for rank in range(1, self.num_shards)]

    def server_again(self, spec: ProcessSpec, address: str, *, has_snapshot: bool) -> ProcessSpec:
        """A server after a failure: at the addresses it had, since others look for it there.

        Once this run has a snapshot it goes on from that, whatever it was to begin with.
        """
        again: dict[str, Any] = {"server.listen": address}
        if has_snapshot:
            again["checkpoint.resume"] = None
        return dataclasses.replace(spec, argv=(*spec.argv, *arguments(None, again)))

    def with_page(self, spec: ProcessSpec, page: str) -> ProcessSpec:
        """The coordinator, with its page where somebody looks already."""
        return dataclasses.replace(spec, argv=(*spec.argv, *arguments(None, {"server.web": page})))

    def _server(self, child: Child, address: str) -> ProcessSpec:
        place, identity = self.places.get(child), self.identities.get(child, {})
        own: dict[str, Any] = {"server.listen": self.listen}
        if self.num_shards > 1:
            own["server.shards"] = self.num_shards
        if (per_hour := self.per_hour) is not None and child == SERVER:
            own["cost.total_per_hour"] = per_hour
        if self.config.launch.web and self.config.server.web is None and child == SERVER:
            own["server.web"] = f"{DEFAULT_HOST}:0"
        if child != SERVER:
            host = self.listen.rpartition(":")[0] or DEFAULT_HOST
            listen = place.listen if place is not None and host not in WILDCARDS else host
            own |= {"server.shard": child.rank, "server.coordinator": address, "server.listen": f"{listen}:0"}
            if self.config.server.direct_port:
                own["server.direct_port"] = 0  # as the port before it: any
            if place is None and self.config.server.metrics is not None:
                own["server.metrics"] = None  # the coordinator has that port on this host
        kept = (self.save, self.history) if child == SERVER else ()
        spec = ProcessSpec(
            child,
            (*self.server_argv, *arguments(None, {**own, **identity})),
            self.server_env,
            needs=read_files(self.config.security, identity, file_of(self.mode)),
            leaves=tuple(path for path in kept if path),
        )
        return _placed(spec, place, self.config)

    def _worker(self, child: Child, server: str | None) -> ProcessSpec:
        address, identity = server or "none", dict(self.identities.get(child, {}))
        if child == self.reporter and (per_hour := self.per_hour) is not None:
            identity["cost.total_per_hour"] = per_hour
        if self.is_script:
            own = {variable(key): scalar_text(value) for key, value in identity.items()}
            rank, workers = str(child.rank), str(self.num_workers)
            places = {variable("worker.rank"): rank, variable("run.workers"): workers, "PS_SERVER": address}
            if self.config.launch.torch_variables:
                places |= {"RANK": rank, "WORLD_SIZE": workers}
            spec = ProcessSpec(child, self.worker_argv, {**self.worker_env, **own, **places})
        else:
            argv = (*self.worker_argv, *arguments(None, identity), "--server", address, "--rank", str(child.rank))
            spec = ProcessSpec(child, argv, self.worker_env)
        needs = read_files(self.config.security, identity, code_file(self.config))
        if self.config.task.init is not None and not self.is_script:
            needs += (self.config.task.init,)
        spec = dataclasses.replace(spec, needs=needs)
        return _placed(spec, self.places.get(child), self.config)

    @property
    def per_hour(self) -> float | None:
        """Of all its hosts together; None where none has a price, or the configuration says it."""
        if self.config.cost.total_per_hour is not None:
            return None
        places = [at for child, at in self.places.items() if self.mode != SINGLE or child == self.reporter]
        hosts = {place.host: place.per_hour for place in places}
        prices = [self.config.cost.per_hour if own is None else own for own in hosts.values()]
        known = [price for price in prices if price is not None]
        return sum(known) if known else None

    @property
    def rate(self) -> float | None:
        """What an hour of the run costs; None where no price is known."""
        return self.config.cost.rate if self.per_hour is None else self.per_hour

    @property
    def work(self) -> str:
        """What workers do."""
        return f"script {self.config.launch.script}" if self.is_script else f"task {self.config.task.name}"

    def headline(self) -> str:
        """What is started, as a phrase: `ssp (staleness 3): a server and 4 workers, 300 steps each, ...`."""
        run = self.config.run
        told = MODES.load(self.mode).told(self.config.policy.options(self.mode)) if self.server is not None else ""
        servers = "a server" if self.num_shards == 1 else f"a server in {self.num_shards} shards"
        num_hosts = len(set(self.hosts().values()))
        where = f" on {num_hosts} host{'s' if num_hosts > 1 else ''}" if num_hosts else ""
        group = self.config.launch.group
        of = f" of {group} processes{' each' if self.num_workers > 1 else ''}" if group > 1 else ""
        who = (
            "one worker alone, no server,"
            if self.server is None
            else f"{servers} and {self.num_workers} worker{'s' if self.num_workers > 1 else ''}{of}{where},"
        )
        batch = run.batch_size * (run.workers or 1) if self.mode == SINGLE else run.batch_size
        delayed_update = ", delayed_update" if self.config.policy.delayed_update and self.server is not None else ""
        length = f"{run.task_steps:,} steps" if run.task_steps else f"{run.epochs} epochs"
        work = self.work if self.is_script else f"{length}, batch {batch}, {self.work}"
        there = f" on {self.server.host}" if self.server is not None and self.server.host else ""
        kept = f", weights to {self.save}{there}" if self.save else ""
        kept += f", snapshots in {self.checkpoint_dir}{there}" if self.checkpoint_dir else ""
        seed = f", seed {self.seed}" if self.seed is not None else ""
        return f"{self.mode}{f' ({told})' if told else ''}{delayed_update}{seed}: {who} {work}{kept}"


def plan_runs(resolved: Resolved, request: Request, machine: Machine) -> list[Plan]:
    """One plan per mode asked for, and seed. The configuration must name `run.workers`. Raises UsageError."""
    check_together(resolved, request.modes, request.script_args)
    run, num_seeds = resolved.config.run, resolved.config.launch.seeds
    seeds = [run.seed + index for index in range(num_seeds)] if num_seeds > 1 else [None]
    return [_plan(resolved, request, machine, mode, seed) for mode in request.modes for seed in seeds]


def _plan(resolved: Resolved, request: Request, machine: Machine, mode: str, seed: int | None) -> Plan:
    """`seed`: None where there is one run of the mode, with that of the configuration."""
    config = resolved.config
    num_workers = config.run.workers or DEFAULT_NUM_WORKERS
    num_runs = len(request.modes) * config.launch.seeds
    several, label = num_runs > 1, mode if seed is None else f"{mode}-seed{seed}"
    own = {key: own_path(value_of(config, key), label, num_runs) for key in _OWN_PATHS}
    settings = told_settings(resolved, with_files=machine.spans_hosts)
    num_shards = sum(child.role == SERVER.role for child in machine.places) or config.server.shards
    settings["run.workers"] = num_workers
    if config.launch.script is None and config.run.task_steps != config.run.steps:
        settings["run.steps"] = config.run.task_steps
    if config.output.summary and (several or machine.spans_hosts):
        settings["output.summary"] = None  # the launcher writes it: one for all runs, or here
    if several and own["output.best_weights"] is None:  # beside the weights, of each mode its own
        own["output.best_weights"] = own_path(config.output.best, label, num_runs)
    if seed is not None:
        settings["run.seed"] = seed
    if config.output.report is not None and config.run.eval_every is None and config.launch.script is None:
        settings["run.eval_every"] = max(1, config.run.task_steps // _EVALUATED) if config.run.task_steps else "1epoch"
    if several:  # what else a run leaves goes to its own place
        settings |= {key: path for key, path in own.items() if path}
    if mode == SINGLE:
        settings = {key: value for key, value in settings.items() if not key.startswith(("run.mode", "checkpoint."))}
        settings |= single_settings(config, num_workers)
        own["checkpoint.dir"] = None
    elif several or "run.mode" in settings:
        settings["run.mode"] = mode
    config_path = None if machine.spans_hosts else request.config_path
    level = "debug" if config.log.level == "debug" else "info"
    env = {"PS_LOG__FORMAT": "json", "PS_LOG__LEVEL": level, "PYTHONUNBUFFERED": "1"}
    shards = [Child("server", shard) for shard in range(num_shards)] if num_shards > 1 else []
    children = [*shards, *(Child("worker", rank) for rank in range(num_workers))] if mode != SINGLE else []
    num_workers, group = (1, 1) if mode == SINGLE else (num_workers, config.launch.group)
    worker_argv, worker_env = (*PROGRAMS["worker"], *arguments(config_path, for_workers(settings))), env
    if config.launch.script is not None:
        worker_argv = (config.launch.script, *request.script_args)
        worker_env = {**_script_env(resolved, own["output.history"]), **env}
    if group > 1:
        worker_argv = (*PROGRAMS["group"], str(group), *worker_argv)
        worker_env = worker_env | {variable("worker.group"): "true"}
    return Plan(
        mode=mode,
        seed=seed,
        config=config,
        num_workers=num_workers,
        num_shards=num_shards,
        save=own["output.save"],
        history=own["output.history"],
        checkpoint_dir=own["checkpoint.dir"],
        summary=config.output.summary if machine.spans_hosts and not several else None,
        listen=_listen(resolved, machine),
        server_argv=(machine.python, *PROGRAMS["server"], *arguments(config_path, settings)),
        server_env=env | (_thread_env(config, machine, num_shards) if num_shards > 1 else {}),
        worker_argv=(machine.python, *worker_argv),
        worker_env=worker_env | _thread_env(config, machine, num_workers * group),
        identities={child: own_identity(config.security, child, machine.exists) for child in children},
        places=machine.places,
    )


def _listen(resolved: Resolved, machine: Machine) -> str:
    """Where the coordinator listens."""
    port = resolved.config.launch.port
    if port is None and resolved.was_set("server.listen"):
        return resolved.config.server.listen
    return f"{listen_host(resolved, machine.places.get(SERVER), spans_hosts=machine.spans_hosts)}:{port or 0}"


def _script_env(resolved: Resolved, history: str | None) -> dict[str, str]:
    """Every setting as a variable, for workers that are the user's script."""
    env = {
        variable(key): scalar_text(value)
        for key, value in for_workers(told_settings(resolved, with_files=True)).items()
        if not key.startswith(_NOT_FOR_SCRIPTS) and key == key.lower()
    }
    if history is not None:  # unlike the server's other files this one is the workers' too
        env["PS_OUTPUT__HISTORY"] = scalar_text(history)
    return env


def _placed(spec: ProcessSpec, place: Place | None, config: Config) -> ProcessSpec:
    """The process at its place, if it has one: the interpreter, the variables and the share of the cores there."""
    if place is None:
        return spec
    is_alone = spec.child.role == "server" and place.sharing == 1
    chosen = config.worker.threads is not None or "OMP_NUM_THREADS" in place.env
    num_each = config.launch.group if spec.child.role == "worker" else 1
    return dataclasses.replace(
        spec,
        argv=(place.python, *spec.argv[1:]),
        env={**spec.env, **place.env},
        host=place.host,
        sharing=0 if is_alone or chosen else place.sharing * num_each,
    )


def _thread_env(config: Config, machine: Machine, num_processes: int) -> dict[str, str]:
    """A share of the cores for each worker or shard: torch's default is all of them in every process."""
    if machine.spans_hosts or config.worker.threads is not None or machine.environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, machine.num_cores // num_processes))}
