"""What to start: from the settings to one command line and environment per process. Pure.

One run is one `Plan`: a server and N workers, or for the mode `single` one worker that trains
alone on the union batch (batch size times N), so that it makes sync's updates on sync's samples.

Children read the same `--config FILE`. Settings from the launcher's flags follow as
`--set key=value`, so there is one mechanism for all of them; `PS_SECTION__KEY` variables are
inherited anyway. A user's script knows no such flags and gets everything as such variables.
Workers need the server's address, known only once it listens: `Plan.workers(address)`. A server that
is started again must be found where the first one was: `Plan.server_again(address)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..common.config import DEFAULT_ADDRESS, Config
from ..common.config_sources import Resolved, scalar_text
from ..common.errors import UsageError
from .files import SINGLE, check_snapshots, is_flag, own_path, worker_identity

DEFAULT_NUM_WORKERS = 2

# Arguments of the interpreter that start each program.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "server": ("-m", "paramserver.ps"),
    "worker": ("-m", "paramserver.worker"),
}

# The launcher's own affairs. Children log JSON, and at least the events that the launcher lives by.
_NOT_PASSED_ON = ("launch.", "log.")
# Files and directories of which each mode has its own where several run.
_OWN_PATHS = ("output.save", "output.history", "checkpoint.dir")
# Beside the launcher's own, what a script is told otherwise (RANK, ...) or decides itself.
_NOT_FOR_SCRIPTS = (*_NOT_PASSED_ON, "optimizer.", "output.", "worker.rank", "worker.server", "run.workers")


class Child(NamedTuple):
    """The stable name of a process of the run."""

    role: str  # "server" or "worker"
    rank: int

    def __str__(self) -> str:
        return "server" if self.role == "server" else f"{self.role} {self.rank}"


SERVER = Child("server", 0)


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `env` is added to the environment the backend gives."""

    child: Child
    argv: tuple[str, ...]
    env: Mapping[str, str]


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: the server's process and what its workers have in common."""

    mode: str
    config: Config
    num_workers: int
    save: str | None  # where this run's weights go
    history: str | None  # and what was applied when
    checkpoint_dir: str | None  # and its snapshots
    server: ProcessSpec | None
    worker_argv: tuple[str, ...]
    worker_env: Mapping[str, str]
    identities: tuple[Mapping[str, Any], ...] = ()  # of each worker, where they differ from the server's

    @property
    def is_script(self) -> bool:
        return self.config.launch.script is not None

    @property
    def reporter(self) -> Child:
        """The process whose status and summary events tell about the run."""
        return SERVER if self.server is not None else Child("worker", 0)

    def workers(self, address: str | None) -> list[ProcessSpec]:
        """The worker processes, given the server's address (None: there is no server)."""
        return [self._worker(Child("worker", rank), address or "none") for rank in range(self.num_workers)]

    def server_again(self, address: str, *, has_snapshot: bool) -> ProcessSpec:
        """The server after a failure: at the address it had, since its workers look for it there.

        Once this run has a snapshot it goes on from that, whatever it was to begin with.
        """
        assert self.server is not None
        again: dict[str, Any] = {"server.listen": address}
        if has_snapshot:
            again["checkpoint.resume"] = None
        return dataclasses.replace(self.server, argv=(*self.server.argv, *_arguments(None, again)))

    def _worker(self, child: Child, address: str) -> ProcessSpec:
        identity = self.identities[child.rank] if self.identities else {}
        if self.is_script:
            own = {_variable(key): scalar_text(value) for key, value in identity.items()}
            places = {"RANK": str(child.rank), "WORLD_SIZE": str(self.num_workers), "PS_SERVER": address}
            return ProcessSpec(child, self.worker_argv, {**self.worker_env, **own, **places})
        argv = (*self.worker_argv, *_arguments(None, identity), "--server", address, "--rank", str(child.rank))
        return ProcessSpec(child, argv, self.worker_env)

    def headline(self) -> str:
        """What is started, as a phrase: `ssp (staleness 3): a server and 4 workers, 300 steps each, ...`."""
        run, what = self.config.run, self.config.launch.script or self.config.task.name
        options = {
            "ssp": f" (staleness {self.config.policy.staleness})",
            "localsgd": f" ({self.config.policy.local_steps} local steps)",
        }
        who = (
            "one worker alone, no server,"
            if self.server is None
            else f"a server and {self.num_workers} worker{'s' if self.num_workers > 1 else ''},"
        )
        batch = run.batch_size * (run.workers or 1) if self.mode == SINGLE else run.batch_size
        pipelined = ", pipelined" if self.config.policy.pipelined and self.server is not None else ""
        work = f"script {what}" if self.is_script else f"{run.steps:,} steps, batch {batch}, task {what}"
        kept = f", weights to {self.save}" if self.save else ""
        kept += f", snapshots in {self.checkpoint_dir}" if self.checkpoint_dir else ""
        return f"{self.mode}{options.get(self.mode, '')}{pipelined}: {who} {work}{kept}"


def plan_runs(resolved: Resolved, request: Request, machine: Machine) -> list[Plan]:
    """One plan per mode asked for. The configuration must name `run.workers`. Raises UsageError."""
    script = resolved.config.launch.script
    if script is not None:
        for key, origin in resolved.origins.items():
            if key.startswith("optimizer.") and is_flag(origin):
                raise UsageError(
                    f"{origin} together with the script {script}: the script owns the optimizer",
                    fix="set it in the script, where session.optimizer() wraps it",
                )
    elif request.script_args:
        raise UsageError(
            f"arguments after -- ({' '.join(request.script_args)}) belong to a script, and there is none",
            fix="give the script: --script FILE.py -- ARGS",
        )
    check_snapshots(resolved, request.modes)
    return [_plan(resolved, request, machine, mode) for mode in request.modes]


def _plan(resolved: Resolved, request: Request, machine: Machine, mode: str) -> Plan:
    config = resolved.config
    num_workers = config.run.workers or DEFAULT_NUM_WORKERS
    several = len(request.modes) > 1
    own = {key: own_path(_value(config, key), mode, len(request.modes)) for key in _OWN_PATHS}
    settings = _flag_settings(resolved)
    settings["run.workers"] = num_workers
    if several:
        # The launcher writes one summary for all runs; what else a run leaves goes to its own place.
        settings |= {"output.summary": None} if config.output.summary else {}
        settings |= {key: path for key, path in own.items() if path}
    if mode == SINGLE:
        settings = {key: value for key, value in settings.items() if not key.startswith(("run.mode", "checkpoint."))}
        settings |= _single_settings(config, num_workers)
        own["checkpoint.dir"] = None
    elif several or "run.mode" in settings:
        settings["run.mode"] = mode
    common = _arguments(request.config_path, settings)
    level = "debug" if config.log.level == "debug" else "info"
    env = {"PS_LOG__FORMAT": "json", "PS_LOG__LEVEL": level, "PYTHONUNBUFFERED": "1"}
    server = None
    identities: tuple[Mapping[str, Any], ...] = ()
    if mode != SINGLE:
        listen = f"server.listen={_listen(resolved)}"
        argv = (machine.python, *PROGRAMS["server"], *common, "--set", listen)
        server = ProcessSpec(SERVER, argv, env)
        identities = tuple(worker_identity(config.security, rank, machine.exists) for rank in range(num_workers))
    plan = Plan(
        mode=mode,
        config=config,
        num_workers=1 if mode == SINGLE else num_workers,
        save=own["output.save"],
        history=own["output.history"],
        checkpoint_dir=own["checkpoint.dir"],
        server=server,
        worker_argv=(machine.python, *PROGRAMS["worker"], *common),
        identities=identities,
        worker_env=env | _thread_env(config, machine, 1 if mode == SINGLE else num_workers),
    )
    return _with_script(plan, resolved, request, machine) if config.launch.script else plan


def _with_script(plan: Plan, resolved: Resolved, request: Request, machine: Machine) -> Plan:
    """The plan whose workers are the user's script; every setting reaches it as a variable."""
    script = str(plan.config.launch.script)
    env = {
        _variable(key): scalar_text(_value(plan.config, key))
        for key, origin in resolved.origins.items()
        if not key.startswith(_NOT_FOR_SCRIPTS) and not origin.startswith("environment ") and key == key.lower()
    }
    if plan.history is not None:  # unlike the server's other files this one is the workers' too
        env["PS_OUTPUT__HISTORY"] = scalar_text(plan.history)
    argv = (machine.python, script, *request.script_args)
    return dataclasses.replace(plan, worker_argv=argv, worker_env={**env, **plan.worker_env})


def _single_settings(config: Config, num_workers: int) -> dict[str, Any]:
    """The settings that turn a run of N workers into one worker on the union batch."""
    settings: dict[str, Any] = {"run.workers": 1, "run.batch_size": config.run.batch_size * num_workers}
    if config.policy.min_workers > 1:  # these would contradict run.workers=1
        settings["policy.min_workers"] = 1
    if config.policy.backup_workers:
        settings["policy.backup_workers"] = 0
    return settings


def _thread_env(config: Config, machine: Machine, num_workers: int) -> dict[str, str]:
    """A share of the cores for each worker: torch's default is all of them in every process."""
    if config.worker.threads is not None or machine.environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, machine.num_cores // num_workers))}


def _listen(resolved: Resolved) -> str:
    """launch.port, else a server.listen that someone set, else a free port of the default host."""
    listen, port = resolved.config.server.listen, resolved.config.launch.port
    if port is None and resolved.was_set("server.listen"):
        return listen
    host = listen.rpartition(":")[0] or DEFAULT_ADDRESS.rpartition(":")[0]
    return f"{host}:{port or 0}"


def _flag_settings(resolved: Resolved) -> dict[str, Any]:
    """The values of flags and --set, by dotted key, as validated."""
    return {
        key: _value(resolved.config, key)
        for key, origin in resolved.origins.items()
        if is_flag(origin) and not key.startswith(_NOT_PASSED_ON)
    }


def _arguments(config_path: str | None, settings: Mapping[str, Any]) -> tuple[str, ...]:
    arguments = ["--config", config_path] if config_path else []
    for key, value in settings.items():
        arguments += ["--set", f"{key}={scalar_text(value)}"]
    return tuple(arguments)


def _variable(key: str) -> str:
    return f"PS_{key.upper().replace('.', '__')}"


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value
