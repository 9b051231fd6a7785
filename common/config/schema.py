"""The configuration schema of all programs. It is validated once at the start, and code then reads typed sections.

`sources.py` defines the sources and their precedence, and `sections/` the fields. `--print-config` shows the values.
"""

# No `from __future__ import annotations`: see sections/__init__.py.
from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .option import Section
from .sections.launching import CostConfig, LaunchConfig, LogConfig, OutputConfig, SlowdownConfig, UpstreamConfig
from .sections.policy import PolicyConfig, checked_options, mode_options, own_modes
from .sections.processes import (
    DEFAULT_ADDRESS,
    DEFAULT_PORT,
    CheckpointConfig,
    LimitsConfig,
    SecurityConfig,
    ServeConfig,
    ServerConfig,
    WorkerConfig,
)
from .sections.run import TASK_STEPS, RunConfig, TaskConfig
from .sections.training import LoaderConfig, OptimizerConfig, StoreConfig, TrainConfig

__all__ = [
    "DEFAULT_ADDRESS", "DEFAULT_PORT", "TASK_STEPS", "Config", "CostConfig", "LaunchConfig", "LimitsConfig",
    "LogConfig", "OptimizerConfig", "PolicyConfig", "RunConfig", "SecurityConfig", "ServeConfig", "ServerConfig",
    "SlowdownConfig", "StoreConfig", "TrainConfig", "WorkerConfig", "mode_options", "own_modes",
]  # fmt: skip


class Config(Section):
    """All settings. Each program reads the sections that it needs."""

    task: TaskConfig = Field(default_factory=TaskConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    loader: LoaderConfig = Field(default_factory=LoaderConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    slowdown: SlowdownConfig = Field(default_factory=SlowdownConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    cost: CostConfig = Field(default_factory=CostConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    upstream: UpstreamConfig = Field(default_factory=UpstreamConfig)

    @field_validator("policy")
    @classmethod
    def _known_options(cls, policy: PolicyConfig, info: ValidationInfo) -> PolicyConfig:
        run: RunConfig | None = info.data.get("run")  # None if that section has an error
        checked = checked_options(policy.model_extra or {}, run.modes if run is not None else ())
        return policy.model_copy(update=checked)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (workers := self.run.workers) is not None:
            if self.policy.min_workers > workers:
                raise ValueError(f"policy.min_workers is {self.policy.min_workers}, but run.workers is {workers}")
            if (backup_workers := self.policy.option("backup_workers", 0)) >= workers:
                raise ValueError(f"policy.backup_workers is {backup_workers}: it must be below run.workers, {workers}")
            most = workers - backup_workers
            if self.policy.aggregation == "trimmed_mean" and most <= 2 * self.policy.trim:
                raise ValueError(
                    f"policy.trim is {self.policy.trim}: a round needs more than {2 * self.policy.trim} contributions "
                    f"to leave out that many at each end, and has {most}"
                )
            if (rank := self.worker.rank) is not None and rank >= workers:
                raise ValueError(f"worker.rank is {rank}: with run.workers {workers} it is 0..{workers - 1}")
        if (steps := self.run.task_steps) is not None and self.train.warmup >= steps:
            raise ValueError(f"train.warmup is {self.train.warmup}: it must be below run.steps, {steps}")
        if (least := self.train.min_lr) > self.optimizer.lr:
            raise ValueError(f"train.min_lr is {least:g}: it must not exceed optimizer.lr, {self.optimizer.lr:g}")
        if self.output.save_averaged and self.store.polyak is None:
            raise ValueError("output.save_averaged needs store.polyak, e.g. 0.999")
        return self
