"""One run under chaos: its settings, and the three proofs that it lost nothing and applied nothing twice.

The proofs: the weights of the task `ledger` (each sample applied exactly once), the history
(`ps-launch check`), and the exit code of the job, of which no process may have ended unless it was killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.config.sources import LAUNCHER_ENV_NAMES, Resolved, load_config
from ...common.registry import MODES
from ...common.wire.json_text import read_json
from ...ps.policies.base import Common
from ..check_main import check_paths, describe, show
from .job import Ending, Setup
from .ledger import Account, Epoch, audit
from .plan import make_plan

if TYPE_CHECKING:
    from ...common.config.schema import Config
    from ..check import Verdict

# `worker.transports` by the one that is tried.
TRANSPORTS = {"direct": "[direct, grpc]", "grpc": "[grpc]", "shared": "[shared, direct, grpc]"}
_LEDGER = "ledger"
_BATCH_SIZE = 4
_STEP_S = 0.05  # of every step of a worker, beside its exchange; more where a run is long
_MAX_STEPS = 6000  # an epoch has a sample for each, and the model a weight for each sample
_EXCHANGE_S = 0.02  # about, with all that goes on
_BUSY_SHARE = 0.7  # of the time; the rest is what the faults cost
_RETURN_S = 6.0  # of the run without faults at its end, for whoever was hit last to come back
_PADDING_BYTES = 200_000
_LEASE_S = 2.0
_SPARE_RESTARTS = 3  # of each process, beside one for each time it is killed


@dataclass(frozen=True)
class Trial:
    """A job to be run: `setup` is what `job.Chaos` takes, `config` the settings as its processes see them."""

    setup: Setup
    config: Config


def make_trial(
    config_path: str | None,
    chosen: dict[str, Any],
    sets: list[str],
    *,
    folder: Path,
    seconds: float,
    seed: int,
    kinds: Iterable[str],
) -> Trial:
    """A job that writes into `folder` and lasts about `seconds`, under a plan of faults of these kinds.

    Settings: the trial's own, then `chosen` (by dotted key), then `sets` (`key=value`). Without a
    configuration the task is `ledger`, for one epoch. Raises UsageError.
    """
    own = _where_to(folder) | ({} if config_path else _what_to_do(seconds, seed)) | chosen
    resolved = _resolved(config_path, [*_as_sets(own), *sets])
    config, run = resolved.config, resolved.config.run
    for key in resolved.unread([run.mode]):
        own.pop(key, None)  # meant for another mode
    num_workers, steps = run.workers or 1, run.task_steps or 1
    if config.task.name == _LEDGER:
        samples = num_workers * steps * run.batch_size
        args = {"samples": samples, "padding_bytes": _PADDING_BYTES, **config.task.args}
        own["task.args"] = "{" + ", ".join(f"{key}: {value}" for key, value in args.items()) + "}"
    plan = make_plan(
        seed, seconds=seconds, num_workers=num_workers, lease_s=config.server.lease_s, kinds=kinds,
        num_shards=config.server.shards,
    )  # fmt: skip
    own.setdefault("launch.max_restarts", _SPARE_RESTARTS + sum(fault.kind.startswith("kill") for fault in plan))
    arguments = [config_path] if config_path else []
    for item in [*_as_sets(own), *sets]:
        arguments += ["--set", item]
    num_last = round(_RETURN_S / (config.slowdown.base_s + _EXCHANGE_S))
    last_step = max(steps // 4, steps - num_last)
    setup = Setup(
        arguments=tuple(arguments),
        folder=folder,
        plan=plan,
        seed=seed,
        last_step=last_step,
        deadline_s=3 * seconds + 60,
    )
    return Trial(setup, config)


def _where_to(folder: Path) -> dict[str, Any]:
    return {
        "checkpoint.dir": folder / "snapshots", "checkpoint.every_s": 1.0, "launch.backoff_s": 0,
        "output.history": folder / "history.jsonl", "output.save": folder / "weights.safetensors",
        "server.status_interval_s": 0.25, "log.format": "json",
    }  # fmt: skip


def _what_to_do(seconds: float, seed: int) -> dict[str, Any]:
    busy_s = _BUSY_SHARE * seconds
    steps = min(_MAX_STEPS, max(10, round(busy_s / (_STEP_S + _EXCHANGE_S))))
    step_s = round(max(_STEP_S, busy_s / steps - _EXCHANGE_S), 3)
    return {
        "task.name": _LEDGER, "run.steps": steps, "run.batch_size": _BATCH_SIZE, "run.seed": seed,
        "optimizer.name": "sgd", "optimizer.lr": 1.0, "slowdown.base_s": step_s,
        "slowdown.jitter_s": round(step_s / 5, 3), "server.lease_s": _LEASE_S, "policy.local_steps": 4,
        "policy.outer_lr": 1.0, "policy.outer_momentum": 0.0,  # the weights then count what was applied
    }  # fmt: skip


def _resolved(config_path: str | None, sets: list[str]) -> Resolved:
    """The settings as the job will see them. Raises UsageError."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV_NAMES}
    return load_config(config_path, {}, sets, environ)


def _as_sets(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def judge(ending: Ending, trial: Trial) -> list[str]:
    """Show what the history and the weights say; returns what is wrong, one sentence each."""
    folder = trial.setup.folder
    failures = [f"nobody killed it: {reason}" for reason in ending.unexpected]
    if ending.exit_code is None:
        failures.append(ending.hang or "the job did not end")
    elif ending.exit_code:
        failures.append(f"the job ended with exit code {ending.exit_code}")
    failures += _tracebacks(folder / "job.log")
    history = folder / "history.jsonl"
    if not history.exists():
        return [*failures, "there is no history"]
    verdict = check_paths([str(history)], [trial.config.run.mode])
    show(verdict)
    if not verdict.is_good or verdict.deleted:  # nobody deletes any here
        failures.append(f"its history: {describe(verdict)}")
    if trial.config.task.name == _LEDGER and ending.exit_code == 0:
        account = _audit(trial, verdict)
        print(account)
        failures += account.problems
    return failures


def _tracebacks(log: Path) -> list[str]:
    """Whatever is done to a process, it says in a sentence how it ends."""
    if not log.exists():
        return []
    count = log.read_text(encoding="utf-8", errors="replace").count("Traceback (most recent call last)")
    return [f"there are {count} tracebacks in {log.name}"] if count else []


def _audit(trial: Trial, verdict: Verdict) -> Account:
    run = trial.config.run
    mode = MODES.load(run.mode)(Common(num_workers=run.workers), trial.config.policy.options(run.mode))
    epoch = Epoch(
        run.workers or 1, run.task_steps or 1, run.batch_size, mode.local_steps, mode.has_rounds, mode.may_scale
    )
    folder = trial.setup.folder
    told = _samples(folder / "history.jsonl", verdict.lineage.contributions()) if mode.may_scale else None
    return audit(folder / "weights.safetensors", epoch, verdict.lineage, told)


def _samples(history: Path, contributions: set[tuple[int, int]]) -> int:
    """In these, as the history has them: where paces differ some are of fewer steps."""
    found: dict[tuple[int, int], int] = {}
    with history.open(encoding="utf-8") as lines:
        for line in lines:
            if '"op":"accept"' in line and (fields := read_json(line, nan=True, big=True))["outcome"] == "accepted":
                found[fields["rank"], fields["step"]] = fields["samples"]  # of what was taken out the newest counts
    return sum(found[contribution] for contribution in contributions)
