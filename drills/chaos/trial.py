"""One run under chaos: its settings, and three proofs that it lost nothing and applied nothing twice.

The proofs are the weights of the task `ledger` (each sample applied exactly once), the history (`ps-launch check`),
and the job's exit code. No process may end without being killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...common.config.sources import LAUNCHER_ENV_NAMES, load_config
from ...common.errors import UsageError
from ...common.registry import MODES
from ...ps.policies.base import Common
from ..check_main import check_paths, describe, show
from .job import Ending, Setup
from .ledger import Epoch, audit
from .plan import make_plan

# `worker.transports` by the tested transport.
TRANSPORTS = {"direct": "[direct, grpc]", "grpc": "[grpc]", "shared": "[shared, direct, grpc]"}
_LEDGER = "ledger"
_BATCH_SIZE = 4
_STEP_S = 0.05  # computing time of a step; more in a long run
_MAX_STEPS = 6000  # limit, because an epoch has a sample for each step and the model a weight for each sample
_EXCHANGE_S = 0.02  # estimate, on a busy machine, beside the time of the bytes
_BYTES_PER_S = 50e6  # estimate, through the proxy of the faults
_BUSY_SHARE = 0.7  # share of the time for training; faults cost the rest
_RETURN_S = 6.0  # at the end of the run without faults, so that every process is back
_MODEL_BYTES = 200_000
_LEAST_CUT_BYTES = 1 << 16
_LEASE_S = 2.0
_SPARE_RESTARTS = 3  # restarts of each process beyond its kills


def make_setup(
    config_path: str | None, chosen: dict[str, Any], sets: list[str], *, folder: Path, seconds: float, seed: int,
    kinds: Iterable[str], model_bytes: int = _MODEL_BYTES,
) -> Setup:  # fmt: skip
    """Returns a job that writes into `folder` and lasts about `seconds`, under a plan of faults of these kinds.

    Settings: the trial's, then `chosen` (by dotted key), then `sets` (`key=value`). Without a configuration the task
    is `ledger`, for one epoch, with a model of about `model_bytes`. Raises UsageError.
    """
    exchange_s = _EXCHANGE_S + model_bytes / _BYTES_PER_S
    settings = {
        "checkpoint.dir": folder / "snapshots", "checkpoint.every_s": 1.0, "launch.backoff_s": 0,
        "output.history": folder / "history.jsonl", "output.save": folder / "weights.safetensors",
        "server.status_interval_s": 0.25, "log.format": "json",
        **({} if config_path else _ledger(seconds, seed, exchange_s)), **chosen,
    }  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV_NAMES}
    resolved = load_config(config_path, {}, [*_as_sets(settings), *sets], environ)
    config, run = resolved.config, resolved.config.run
    if config.launch.regions:
        problem = f"launch.regions is {config.launch.regions}: the drill knows no relays, nor the workers of each"
        raise UsageError(problem, fix="leave regions out; docs/regions.md says what becomes of a region")
    for key in resolved.unread([run.mode]):
        settings.pop(key, None)  # an option of another mode
    num_workers, steps = run.workers or 1, run.task_steps or 1
    if config.task.name == _LEDGER:
        samples = num_workers * steps * run.batch_size
        args = {"samples": samples, "padding_bytes": model_bytes, **config.task.args}
        settings["task.args"] = "{" + ", ".join(f"{key}: {value}" for key, value in args.items()) + "}"
    plan = make_plan(
        seed, seconds=seconds, num_workers=num_workers, lease_s=config.server.lease_s, kinds=kinds,
        num_shards=config.server.shards,
    )  # fmt: skip
    settings.setdefault("launch.max_restarts", _SPARE_RESTARTS + sum(fault.kind.startswith("kill") for fault in plan))
    arguments = [config_path] if config_path else []
    for item in [*_as_sets(settings), *sets]:
        arguments += ["--set", item]
    num_last = round(_RETURN_S / (config.slowdown.base_s + exchange_s))
    return Setup(
        arguments=tuple(arguments), folder=folder, config=config, plan=plan, seed=seed,
        last_step=max(steps // 4, steps - num_last), deadline_s=3 * seconds + 60,
        most_cut_bytes=max(_LEAST_CUT_BYTES, model_bytes),
    )  # fmt: skip


def _ledger(seconds: float, seed: int, exchange_s: float) -> dict[str, Any]:
    busy_s = _BUSY_SHARE * seconds
    steps = min(_MAX_STEPS, max(10, round(busy_s / (_STEP_S + exchange_s))))
    step_s = round(max(_STEP_S, busy_s / steps - exchange_s), 3)
    return {
        "task.name": _LEDGER, "run.steps": steps, "run.batch_size": _BATCH_SIZE, "run.seed": seed,
        "optimizer.name": "sgd", "optimizer.lr": 1.0, "slowdown.base_s": step_s,
        "slowdown.jitter_s": round(step_s / 5, 3), "server.lease_s": _LEASE_S, "policy.local_steps": 4,
        "policy.outer_lr": 1.0, "policy.outer_momentum": 0.0,  # the weights then count what was applied
    }  # fmt: skip


def _as_sets(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def judge(ending: Ending, setup: Setup) -> list[str]:
    """Print the verdict on history and weights. Returns the failures as sentences."""
    history, log, config = setup.folder / "history.jsonl", setup.folder / "job.log", setup.config
    failures = [f"ended without being killed: {reason}" for reason in ending.unexpected]
    if ending.exit_code is None:
        failures.append(ending.hang or "the job did not end")
    elif ending.exit_code:
        failures.append(f"the job ended with exit code {ending.exit_code}")
    if not ending.num_bytes:
        failures.append("no byte went through the controlled network, so its faults hit nothing")
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if count := text.count("Traceback (most recent call last)"):  # a process must end with a sentence
        failures.append(f"there are {count} tracebacks in {log.name}")
    if not history.exists():
        return [*failures, "there is no history"]
    verdict = check_paths([str(history)], [config.run.mode])
    show(verdict)
    if not verdict.is_good or verdict.deleted:  # this drill deletes no snapshots
        failures.append(f"its history: {describe(verdict)}")
    if config.task.name == _LEDGER and ending.exit_code == 0:
        run, weights = config.run, setup.folder / "weights.safetensors"
        mode = MODES.load(run.mode)(Common(num_workers=run.workers), config.policy.options(run.mode))
        epoch = Epoch(run.task_steps or 1, run.batch_size, mode.local_steps, mode.has_rounds, mode.may_scale)
        # If the workers' paces differ, some contributions have fewer steps.
        num_samples = sum(verdict.samples.get(contribution, 0) for contribution in verdict.lineage.contributions())
        problems, summary = audit(weights, epoch, verdict.lineage, num_samples if mode.may_scale else None)
        print(summary)
        failures += problems
    return failures
