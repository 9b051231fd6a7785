"""The one configuration schema, for all programs. Checked once at the door; no dict travels after that.

Sources and their precedence live in `config_sources.py`. Every field is documented here with
its unit and what setting it wrong does; `--print-config` shows the resolved values.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from .registry import CODECS, TASKS, canonical_mode

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"


class Section(BaseModel):
    """Keyword-only, immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps: yes` is a mistake, not one step."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if bool not in (annotation, *get_args(annotation)):
                raise ValueError(f"is no switch, got {value}")
        return value


class TaskConfig(Section):
    name: str = Field("digits", description="a built-in task, or FILE.py:NAME (never taken from the server)")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task")

    @field_validator("name")
    @classmethod
    def _known_task(cls, value: str) -> str:
        if value.endswith(".py"):
            raise ValueError(f"'{value}' names a file: say which task in it, {value}:NAME")
        return value if ".py:" in value else TASKS.check(value)


class RunConfig(Section):
    mode: str = Field("sync", description="sync, async, ssp or localsgd, or an alias")
    steps: int = Field(500, ge=1, description="training steps (batches) per worker")
    workers: int | None = Field(None, ge=1, le=4096, description="workers of the run; none: any number")
    batch_size: int = Field(32, ge=1, description="samples per worker and step")
    seed: int = Field(0, ge=0, lt=2**31, description="initial weights and data order")

    @field_validator("mode")
    @classmethod
    def _known_mode(cls, value: str) -> str:
        return canonical_mode(value)


class PolicyConfig(Section):
    """How contributions are synchronised. A mode reads the fields it knows and ignores the others."""

    staleness: int = Field(3, ge=0, description="ssp: how far ahead of the slowest a worker may start a step")
    local_steps: int = Field(8, ge=1, description="localsgd: local optimizer steps between two averages")
    pull_every: int = Field(1, ge=1, description="async: fetch weights with every Nth contribution")
    min_workers: int = Field(1, ge=1, description="training holds until this many workers are live")
    straggler_timeout_s: float | None = Field(
        None,
        gt=0,
        description="sync, localsgd: seconds after a round's first contribution at which it closes",
    )
    backup_workers: int = Field(0, ge=0, description="sync, localsgd: a round closes without this many")
    weighting: Literal["samples", "equal"] = Field("samples", description="weight of a worker in a mean")
    extra: dict[str, Any] = Field(default_factory=dict, description="options of a mode of your own")


class StoreConfig(Section):
    buffers: Literal["average", "lowest_rank", "keep"] = Field(
        "average", description="BatchNorm statistics and the like: averaged, of the lowest rank, or untouched"
    )
    polyak: float | None = Field(None, gt=0, lt=1, description="decay of a moving average of the weights")
    max_nonfinite: int = Field(
        10, ge=1, description="NaN or Inf contributions of one worker in a row that end the run (exit 16)"
    )


class OptimizerConfig(Section):
    """An elementwise optimizer of torch.optim by its lower-case name; other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field("sgd", description="sgd, adam, adamw, rmsprop, ...")
    lr: float = Field(0.1, gt=0, description="learning rate")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the torch class: `lr` and every extra key."""
        return {"lr": self.lr, **(self.model_extra or {})}


class ServerConfig(Section):
    listen: str = Field(DEFAULT_ADDRESS, description="HOST:PORT; port 0 takes a free one")
    insecure: bool = Field(False, description="allow an address other machines can reach, in the clear")
    max_staged: int = Field(4, ge=1, description="uploads held in memory at once; more wait in flow control")
    max_replies: int = Field(4, ge=1, description="encoded versions held in memory at once")
    status_interval_s: float = Field(1.0, gt=0, description="seconds between status events")
    join_timeout_s: float = Field(30.0, gt=0, description="a connection that does not join by then is closed")
    drain_s: float = Field(5.0, gt=0, description="seconds a stopping server lets its workers leave")


class WorkerConfig(Section):
    server: str = Field(DEFAULT_ADDRESS, description="HOST:PORT of the server; 'none' trains alone")
    rank: int | None = Field(None, ge=0, description="0..N-1; none: the server gives a free one")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:I")
    threads: int | None = Field(None, ge=1, description="torch threads; none: torch's default")
    codec: str = Field("raw", description="how contributions are encoded")
    give_up_s: float = Field(60.0, gt=0, description="seconds without a server before exit 15")

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        return CODECS.check(value)


class SlowdownConfig(Section):
    """Delays added to a worker's steps, to try unequal machines on equal ones. Seconds are per step."""

    base_s: float = Field(0.0, ge=0, description="added to every step of every worker")
    jitter_s: float = Field(0.0, ge=0, description="plus a uniform random 0..jitter_s")
    straggler_rank: int | None = Field(None, ge=0, description="the rank that is slow; none: any")
    straggler_every: int | None = Field(None, ge=1, description="it is slow every Nth step")
    straggler_factor: float = Field(5.0, ge=1, description="a slow step takes this many times the step")
    straggler_probability: float = Field(0.0, ge=0, le=1, description="chance of any step of any worker")

    @model_validator(mode="after")
    def _one_kind(self) -> SlowdownConfig:
        if (self.straggler_rank is None) != (self.straggler_every is None):
            raise ValueError("straggler_rank and straggler_every go together: which rank, and every how many steps")
        return self


class OutputConfig(Section):
    save: str | None = Field(None, description="final weights, safetensors")
    save_averaged: bool = Field(False, description="save the Polyak average (store.polyak) instead")
    summary: str | None = Field(None, description="results as JSON")

    @field_validator("save")
    @classmethod
    def _is_safetensors(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".safetensors"):
            raise ValueError("weights are written as safetensors: let the name end in .safetensors")
        return value


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level shown")
    format: Literal["text", "json"] = Field("text", description="text for people, json for programs")


class LaunchConfig(Section):
    backend: str = Field("local", description="where processes start")
    script: str | None = Field(None, description="your own training script instead of ps-worker")
    port: int | None = Field(None, ge=0, le=65535, description="server port; none: a free one")
    status_interval_s: float = Field(2.0, gt=0, description="seconds between status lines without a terminal")
    grace_s: float = Field(10.0, gt=0, description="seconds from Ctrl-C until children are killed")


class Config(Section):
    """Everything a program can be told; each program reads its own sections."""

    task: TaskConfig = TaskConfig()
    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    store: StoreConfig = StoreConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    server: ServerConfig = ServerConfig()
    worker: WorkerConfig = WorkerConfig()
    slowdown: SlowdownConfig = SlowdownConfig()
    output: OutputConfig = OutputConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        workers = self.run.workers
        if workers is not None:
            if self.policy.min_workers > workers:
                raise ValueError(f"policy.min_workers is {self.policy.min_workers}, but run.workers is {workers}")
            if self.policy.backup_workers >= workers:
                raise ValueError(
                    f"policy.backup_workers is {self.policy.backup_workers}: it must be below run.workers, {workers}"
                )
            if self.worker.rank is not None and self.worker.rank >= workers:
                raise ValueError(
                    f"worker.rank is {self.worker.rank}: with run.workers {workers} it is 0..{workers - 1}"
                )
        if self.output.save_averaged and self.store.polyak is None:
            raise ValueError("output.save_averaged needs store.polyak, e.g. 0.999")
        return self
