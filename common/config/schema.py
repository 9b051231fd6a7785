"""The one configuration schema, for all programs. Checked once at the door; no dict travels after that.

Sources and their precedence live in `sources.py`. Every field is documented here with
its unit and what setting it wrong does; `--print-config` shows the resolved values.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 20 ms of every start.
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..errors import UsageError
from ..registry import AGGREGATIONS, CODECS, MODES, TASKS, canonical_mode, mode_anywhere
from ..user_code import is_in_file
from .addresses import listening, reached, reached_or_none
from .conditions import condition, every
from .option import EVERY, LAUNCHER, SERVER, WORKER, Flag, Panel, Section


def _readable(read: Callable[[str], object]) -> Callable[[str], str]:
    """Text that `read` understands."""

    def check(text: str) -> str:
        read(text)
        return text

    return check


DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
TASK_STEPS = 500  # of a task, where nobody has said how long it is to be trained

Mode = Annotated[str, AfterValidator(canonical_mode)]
Interval = Annotated[str, BeforeValidator(lambda value: str(value)), AfterValidator(_readable(every))]
Until = Annotated[str, AfterValidator(_readable(condition))]
Codec = Annotated[str, AfterValidator(CODECS.check)]
Lane = Literal["shared", "direct", "grpc"]
Listening = Annotated[str, AfterValidator(listening)]
Reached = Annotated[str, AfterValidator(reached)]
ReachedOrNone = Annotated[str, AfterValidator(reached_or_none)]


class TaskConfig(Section):
    name: Annotated[str, Flag(Panel.RUN, EVERY, metavar="NAME|FILE.py:NAME")] = Field(
        "digits", description="a built-in task, or FILE.py:NAME (never taken from the server)"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task")
    init: Annotated[str | None, Flag(Panel.RUN, (WORKER, LAUNCHER), metavar="FILE.safetensors")] = Field(
        None, description="initial weights, where a run begins: a file that every worker has"
    )

    @field_validator("name")
    @classmethod
    def _known_task(cls, value: str) -> str:
        if value.endswith(".py"):
            raise ValueError(f"'{value}' names a file: say which task in it, {value}:NAME")
        return value if is_in_file(value) else TASKS.check(value)


class RunConfig(Section):
    mode: Annotated[Mode, Flag(metavar="MODE")] = Field(
        "sync",
        description="sync, async, ssp, localsgd, diloco or an alias, or FILE.py:NAME (never from another process); "
        "ps-launch runs several, MODE,MODE, one after another and compares them, among them single: one worker alone "
        "on the union batch",
    )
    steps: Annotated[int | None, Flag(Panel.RUN, EVERY, is_for_alone=True)] = Field(
        None, ge=1, description="training steps (batches) per worker; none: 500 of a task, as many as a script takes"
    )
    epochs: Annotated[int | None, Flag(Panel.RUN, EVERY, is_for_alone=True)] = Field(
        None, ge=1, description="instead of steps: how often all workers together go through the data set"
    )
    eval_every: Annotated[Interval | None, Flag(Panel.RUN, EVERY, "", "", "N|30s|1epoch", is_for_alone=True)] = Field(
        None, description="evaluate during the run: every so many training steps, seconds or epochs"
    )
    best: Annotated[str | None, Flag(Panel.RUN, EVERY, metavar="FIGURE", is_for_alone=True)] = Field(
        None, description="the figure that decides what is best; none: accuracy where there is one, else loss"
    )
    stop_when: Annotated[Until | None, Flag(Panel.RUN, EVERY, "", "", "'loss < 0.1'", is_for_alone=True)] = Field(
        None, description="end the run for all when an evaluation says so, e.g. 'accuracy >= 0.98'"
    )
    patience: Annotated[int | None, Flag(Panel.RUN, EVERY, metavar="N", is_for_alone=True)] = Field(
        None, ge=1, description="end it after so many evaluations in a row without a better one"
    )
    workers: Annotated[int | None, Flag(Panel.RUN, short="n")] = Field(
        None, ge=1, le=4096, description="workers of the run; none: any number, or 2 of ps-launch"
    )
    batch_size: Annotated[int, Flag(Panel.RUN, EVERY)] = Field(
        32, ge=1, description="samples per worker and step; a worker takes the server's unless told"
    )
    other_modes: Annotated[tuple[Mode, ...], Flag(name="mode", programs=())] = Field(
        (), description="modes in files whose options the section policy may hold as well; ps-launch says so"
    )
    seed: Annotated[int, Flag(Panel.RUN)] = Field(0, ge=0, lt=2**31, description="initial weights and data order")

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}: a run has one length")
        return self

    @property
    def ends_by_figures(self) -> bool:
        """Its end may hang on evaluations."""
        return self.stop_when is not None or self.patience is not None

    @property
    def task_steps(self) -> int | None:
        """Training steps of a run whose workers train a task; None where `epochs` says it."""
        return self.steps if self.steps is not None or self.epochs is not None else TASK_STEPS

    @property
    def modes(self) -> tuple[str, ...]:
        """Those whose options the section policy may hold beside the built-in ones'; first the run's."""
        return (self.mode, *self.other_modes)


class PolicyConfig(Section):
    """How contributions are synchronised: what holds for every mode, and beside it whatever options the modes
    declare. A mode reads those it knows and ignores the others, so that several are compared with one file."""

    model_config = ConfigDict(extra="allow", frozen=True)

    pipelined: Annotated[bool, Flag()] = Field(
        False, description="async, ssp, localsgd, diloco: workers compute the next step while the exchange is in flight"
    )
    min_workers: int = Field(1, ge=1, description="training holds until this many workers are live")
    weighting: Literal["samples", "equal"] = Field("samples", description="weight of a worker in a mean")
    aggregation: Annotated[str, AfterValidator(AGGREGATIONS.check)] = Field(
        "mean",
        description="sync, diloco: how a round's gradients or deltas become one: mean, or median or trimmed_mean, "
        "which withstand some that lie and hold those of every worker in memory",
    )
    trim: int = Field(1, ge=1, description="trimmed_mean: values left out at each end, of every element")

    def options(self, mode: str) -> Any:
        """The options of a mode, an instance of its policy's `Options`: as set, or their defaults."""
        kind = MODES.load(mode).Options
        given = self.model_extra or {}
        return kind(**{name: given[name] for name in kind.model_fields if name in given})

    def option(self, name: str, default: Any = None) -> Any:
        """The value that an option of any mode was set to; `default` where it was not."""
        return (self.model_extra or {}).get(name, default)


def mode_options(modes: Iterable[str] = ()) -> dict[str, type[BaseModel]]:
    """What each mode declares, `modes` first: the class of its options. UsageError for one that does not go."""
    found = {mode: MODES.load(mode).Options for mode in dict.fromkeys([*modes, *MODES.names()])}
    for mode, options in found.items():
        for name, info in options.model_fields.items():
            if name in PolicyConfig.model_fields:
                raise UsageError(f"mode {mode}: its option {name} is a setting of every mode", fix="name it otherwise")
            if info.is_required():
                raise UsageError(f"mode {mode}: its option {name} has no default", fix="give it one: Field(1, ...)")
    return found


def own_modes(own: "Config", told: Mapping[str, Any]) -> dict[str, Any]:
    """The section `run` as another process told it, with a mode in a file where that file is here.

    Raises UsageError for one that this process was not given itself: nobody else says what code it runs.
    """
    mine = {mode_anywhere(mode): mode for mode in own.run.modes if is_in_file(mode)}

    def here(mode: str) -> str:
        name = mode_anywhere(mode)
        if is_in_file(mode) and name not in mine:
            raise UsageError(
                f"the run's mode is {mode}, which this process was not given: a file is never taken from another",
                fix=f"--mode {name} on its own command line",
            )
        return mine[name] if is_in_file(mode) else mode

    others = tuple(here(str(mode)) for mode in told.get("other_modes", ()))
    return {**told, "mode": here(str(told["mode"])), "other_modes": others}


def _checked_options(given: Mapping[str, Any], modes: Iterable[str]) -> dict[str, Any]:
    """The options as the modes' classes take them: each as the first of `modes` that declares it says, else as any
    other that does. Raises ValidationError, and ValueError for one that no mode has."""
    checked: dict[str, Any] = {}
    for kind in mode_options(modes).values():
        own = {name: given[name] for name in kind.model_fields if name in given and name not in checked}
        options = kind.model_validate(own)
        checked |= {name: getattr(options, name) for name in own}
    unknown = ", ".join(sorted(given.keys() - checked.keys()))
    if unknown:
        raise ValueError(f"no mode has the option {unknown}")
    return checked


class StoreConfig(Section):
    buffers: Literal["average", "lowest_rank", "keep"] = Field(
        "average", description="BatchNorm statistics and the like: averaged, of the lowest rank, or untouched"
    )
    polyak: float | None = Field(None, gt=0, lt=1, description="decay of a moving average of the weights")
    on_nonfinite: Literal["reject", "skip", "clip", "halt"] = Field(
        "reject",
        description="a contribution with NaN or Inf: computed again, counted but not applied, "
        "taken with those values as 0, or the end of the run",
    )
    max_nonfinite: int = Field(
        10, ge=1, description="contributions of one worker rejected in a row that end the run (exit 16)"
    )
    clip_norm: Annotated[float | None, Flag(Panel.OPTIMIZER)] = Field(
        None,
        gt=0,
        description="sync: cap on the 2-norm of the mean gradient, as clip_grad_norm_ in one process; diloco: of the "
        "mean delta; none: any",
    )
    max_norm: float | None = Field(
        None, gt=0, description="cap on the 2-norm of each worker's gradient, or delta, before the mean; none: any"
    )
    on_large: Literal["reject", "skip", "clip", "halt"] = Field(
        "clip", description="a gradient beyond store.max_norm: as on_nonfinite; clip scales it down to the cap"
    )


class OptimizerConfig(Section):
    """An elementwise optimizer of torch.optim by its lower-case name; other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, Flag(Panel.OPTIMIZER, metavar="NAME")] = Field(
        "sgd", description="sgd, adam, adamw, rmsprop, ... of torch.optim"
    )
    lr: Annotated[float, Flag(Panel.OPTIMIZER)] = Field(0.1, gt=0, description="learning rate")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the torch class: `lr` and every extra key."""
        return {"lr": self.lr, **(self.model_extra or {})}


_LR_GAMMA = 0.1  # torch's


class TrainConfig(Section):
    """How a task is trained; a script decides that itself. The server's word counts for all workers."""

    lr_schedule: Annotated[Literal["constant", "cosine", "linear", "step"], Flag(Panel.OPTIMIZER, metavar="NAME")] = (
        Field("constant", description="of the learning rate: constant, cosine, linear or step, as in torch")
    )
    warmup: Annotated[int, Flag(Panel.OPTIMIZER, metavar="STEPS")] = Field(
        0, ge=0, description="training steps in which the rate first rises to --lr, in equal parts"
    )
    min_lr: Annotated[float, Flag(Panel.OPTIMIZER)] = Field(
        0.0, ge=0, description="cosine, linear: the rate at the end of the run"
    )
    lr_step_size: Annotated[int | None, Flag(Panel.OPTIMIZER, metavar="STEPS")] = Field(
        None, ge=1, description="step: training steps between two falls of the rate"
    )
    lr_gamma: Annotated[float, Flag(Panel.OPTIMIZER)] = Field(
        _LR_GAMMA, gt=0, le=1, description="step: what each fall multiplies the rate with"
    )
    accumulate: Annotated[int, Flag(Panel.OPTIMIZER, metavar="N")] = Field(
        1, ge=1, le=1 << 16, description="batches a training step is made of: as one N times as large, in less memory"
    )
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Flag(Panel.OPTIMIZER, metavar="fp32|bf16|fp16")] = Field(
        "fp32", description="of the computation (autocast; fp16 with a loss scaler); weights and gradients stay fp32"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        is_step = self.lr_schedule == "step"
        if is_step != (self.lr_step_size is not None):
            raise ValueError("lr_schedule step and lr_step_size go together: after how many steps the rate falls")
        if self.lr_gamma != _LR_GAMMA and not is_step:
            raise ValueError("lr_gamma is of lr_schedule step, and nothing else reads it")
        if self.min_lr and self.lr_schedule not in ("cosine", "linear"):
            raise ValueError("min_lr is of lr_schedule cosine and linear, and nothing else reads it")
        return self


class LoaderConfig(Section):
    """Options of the DataLoader of a task; each worker's own, as machines differ. None: as torch has it."""

    num_workers: Annotated[int | None, Flag(Panel.RUN, (WORKER, LAUNCHER), name="loader-workers", metavar="N")] = Field(
        None, ge=0, description="processes that load batches beside each worker; none: the worker itself does"
    )
    prefetch_factor: int | None = Field(None, ge=1, description="batches that each of them loads ahead")
    persistent_workers: bool | None = Field(None, description="they stay from epoch to epoch")
    timeout: float | None = Field(None, ge=0, description="seconds to wait for a batch of theirs; 0: any")
    pin_memory: bool | None = Field(None, description="batches in memory from which copies to a GPU need not wait")

    @model_validator(mode="after")
    def _needs_processes(self) -> Self:
        for name in ("prefetch_factor", "persistent_workers", "timeout"):
            if getattr(self, name) and not self.num_workers:
                raise ValueError(f"{name} is for loader processes, and there are none: set num_workers")
        return self

    def options(self) -> dict[str, Any]:
        """Those that were set, as keyword arguments of a DataLoader."""
        return {name: value for name, value in self if value is not None}


class ServerConfig(Section):
    listen: Annotated[Listening, Flag(Panel.RUN, (SERVER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT; port 0 takes a free one"
    )
    insecure: Annotated[bool, Flag(Panel.SECURITY)] = Field(
        False, description="allow an address other machines can reach, in the clear"
    )
    shards: Annotated[int, Flag(Panel.HOSTS, metavar="S")] = Field(
        1, ge=1, le=256, description="server processes the model is divided among, by bytes"
    )
    shard: Annotated[int, Flag(Panel.HOSTS, (SERVER,), metavar="I")] = Field(
        0, ge=0, description="which of them this one is; 0 coordinates, and is what workers are told"
    )
    coordinator: Annotated[Reached, Flag(Panel.HOSTS, (SERVER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT of shard 0, for the other shards"
    )
    advertise: Annotated[Reached | None, Flag(Panel.HOSTS, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT at which workers reach this shard; none: where the coordinator sees it"
    )
    metrics: Annotated[Listening | None, Flag(Panel.OUTPUT, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT at which Prometheus reads metrics; none: nowhere"
    )
    max_staged: int = Field(4, ge=1, description="uploads held in memory at once; more wait in flow control")
    max_replies: int = Field(4, ge=1, description="versions of the weights on their way to workers at once")
    shared_memory: bool = Field(True, description="exchange tensors with workers on this host through shared memory")
    direct: bool = Field(True, description="a second port, where workers exchange without gRPC between")
    direct_port: int = Field(0, ge=0, le=65535, description="its number; 0: any, as of shards that ps-launch starts")
    status_interval_s: float = Field(1.0, gt=0, description="seconds between status events")
    absent_s: float = Field(
        15.0, ge=0, description="how long the end of a run waits for a worker that was lost before its last step"
    )
    join_timeout_s: float = Field(30.0, gt=0, description="a connection that does not join by then is closed")
    lease_s: float = Field(5.0, ge=0.5, description="a worker that is not heard of for so long is let go")
    drain_s: float = Field(5.0, gt=0, description="seconds a stopping server lets its workers leave")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.shard >= self.shards:
            raise ValueError(f"shard is {self.shard}: with shards {self.shards} it is 0..{self.shards - 1}")
        return self


class WorkerConfig(Section):
    server: Annotated[ReachedOrNone, Flag(Panel.RUN, (WORKER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT of the server; 'none' trains alone"
    )
    rank: Annotated[int | None, Flag(Panel.RUN, (WORKER,))] = Field(
        None, ge=0, description="0..N-1; none: the server gives a free one"
    )
    local_rank: int | None = Field(
        None, ge=0, description="which of its host's workers this one is: the cuda device that `auto` takes"
    )
    device: Annotated[str, Flag(Panel.RUN, (WORKER, LAUNCHER), metavar="auto|cpu|cuda[:I]")] = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:I"
    )
    threads: int | None = Field(None, ge=1, description="torch threads; none: torch's default")
    codec: Codec = Field(
        "raw",
        description="how contributions are encoded: bf16 and fp16 halve them, int8 and q4 are 3.9 and 7.8 times less",
    )
    momentum: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="gradients are added up with it before worker.codec encodes them; the server's SGD then has none",
    )
    answer_codec: Codec = Field(
        "raw",
        description="the same of the weights that come back: workers compute on rounded ones, the server on its own",
    )
    lanes: tuple[Lane, ...] = Field(
        ("shared", "direct", "grpc"),
        description="how tensors travel, the best first: shared memory with a server on this host, a connection to its "
        "direct port, gRPC, which is always there",
    )
    shared_memory: bool = Field(True, description="older: false takes shared out of worker.lanes")
    overlap: bool | None = Field(
        None,
        description="gradients leave while backward runs, weights come while the next forward pass does; "
        "none: in ps-worker yes, in scripts of your own no",
    )
    evaluate: Annotated[bool, Flag(Panel.RUN, (WORKER,))] = Field(
        False, description="train nothing: evaluate the run's weights while the workers of the run train"
    )
    give_up_s: float = Field(60.0, gt=0, description="seconds without a server before exit 15")

    @field_validator("lanes", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """`direct,grpc` is a list as well."""
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    @field_validator("lanes")
    @classmethod
    def _are_possible(cls, lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        if "grpc" not in lanes:
            raise ValueError("grpc must be among them: a worker that can have none of the others goes over it")
        if len(set(lanes)) < len(lanes):
            raise ValueError(f"each once, got {', '.join(lanes)}")
        return lanes

    @property
    def wanted_lanes(self) -> tuple[Lane, ...]:
        """Down to the one that is always there."""
        lanes = self.lanes[: self.lanes.index("grpc") + 1]
        return lanes if self.shared_memory else tuple(lane for lane in lanes if lane != "shared")


class CheckpointConfig(Section):
    """Snapshots of the whole run, from which a server that was killed goes on."""

    dir: Annotated[str | None, Flag(Panel.SNAPSHOTS, name="checkpoint-dir", metavar="DIR")] = Field(
        None, description="keep snapshots there, and go on from the newest; of several modes in DIR-MODE each"
    )
    every_steps: Annotated[int | None, Flag(Panel.SNAPSHOTS, name="checkpoint-every", metavar="STEPS")] = Field(
        None, ge=1, description="training steps between two snapshots"
    )
    every_s: float | None = Field(None, gt=0, description="seconds between two; 30 when neither is given")
    keep: int = Field(3, ge=1, description="how many are kept; older ones are removed")
    resume: Annotated[str | None, Flag(Panel.SNAPSHOTS, metavar="latest|never|PATH")] = Field(
        None,
        description="a snapshot, a directory of them, 'latest' or 'never'; none: the newest in checkpoint.dir, if any",
    )

    @model_validator(mode="after")
    def _has_directory(self) -> Self:
        if self.dir is None and (self.every_steps is not None or self.every_s is not None):
            raise ValueError("every_steps and every_s need checkpoint.dir: where snapshots are kept")
        if self.dir is None and self.resume == "latest":
            raise ValueError("resume: latest needs checkpoint.dir: where snapshots are kept")
        return self


class SecurityConfig(Section):
    """Encryption and identity; `ps-certs init` makes the files. The token itself is never a setting."""

    ca: Annotated[str | None, Flag(Panel.SECURITY, EVERY, metavar="FILE.pem")] = Field(
        None, description="PEM: certificates the other side's must be signed by"
    )
    cert: Annotated[str | None, Flag(Panel.SECURITY, EVERY, metavar="FILE.pem")] = Field(
        None, description="PEM: this program's own certificate; a server with one speaks TLS"
    )
    key: Annotated[str | None, Flag(Panel.SECURITY, EVERY, metavar="FILE.pem")] = Field(
        None, description="PEM: the key of security.cert"
    )
    mutual: bool = Field(False, description="server: workers and other shards need a certificate signed by security.ca")
    token_file: Annotated[str | None, Flag(Panel.SECURITY, EVERY, metavar="FILE")] = Field(
        None, description="file with the token all share; or PS_TOKEN in the environment"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("security.cert and security.key go together")
        if self.mutual and self.ca is None:
            raise ValueError("security.mutual needs security.ca: whose certificates are trusted")
        return self


class LimitsConfig(Section):
    """What a server puts up with from whoever can reach it."""

    workers: int = Field(1024, ge=1, description="live workers, where run.workers sets no number")
    model_bytes: int = Field(1 << 36, ge=1, description="size of a model that a worker may bring")
    state_bytes: int = Field(1 << 30, ge=1, description="size of what one worker's script remembers (session.state)")
    joins_per_s: float = Field(500.0, gt=0, description="joins taken in a second; more wait")
    upload_bytes_per_s: float | None = Field(None, gt=0, description="of one worker; none: any")
    progress_s: float = Field(30.0, gt=0, description="an upload or an answer that does not move for so long is ended")


class SlowdownConfig(Section):
    """Delays added to a worker's steps, to try unequal machines on equal ones. Seconds are per step."""

    base_s: float = Field(0.0, ge=0, description="added to every step of every worker")
    jitter_s: float = Field(0.0, ge=0, description="plus a uniform random 0..jitter_s")
    straggler_rank: int | None = Field(None, ge=0, description="the rank that is slow; none: any")
    straggler_every: int | None = Field(None, ge=1, description="it is slow every Nth step")
    straggler_factor: float = Field(5.0, ge=1, description="a slow step takes this many times the step")
    straggler_probability: float = Field(0.0, ge=0, le=1, description="chance of any step of any worker")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.straggler_rank is None) != (self.straggler_every is None):
            raise ValueError("straggler_rank and straggler_every go together: which rank, and every how many steps")
        return self


class OutputConfig(Section):
    save: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.safetensors", is_for_alone=True)] = Field(
        None, description="final weights; of several modes FILE-MODE.safetensors each"
    )
    save_averaged: bool = Field(False, description="save the Polyak average (store.polyak) instead")
    best_weights: str | None = Field(
        None, description="weights of the best evaluation; none: best.safetensors beside output.save"
    )
    curve: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.csv|.jsonl", is_for_alone=True)] = Field(
        None, description="all evaluations; of several modes FILE-MODE each"
    )
    summary: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.json", is_for_alone=True)] = Field(
        None, description="results as JSON"
    )
    history: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.jsonl")] = Field(
        None,
        description="what was applied when (a worker: sent and answered), for ps-launch check; "
        "of several modes FILE-MODE.jsonl each",
    )

    @property
    def tables(self) -> str | None:
        """Where tables of rows go, beside the weights."""
        return None if self.save is None else f"{self.save.removesuffix('.safetensors')}-tables.safetensors"

    @property
    def best(self) -> str | None:
        """Where the weights of the best evaluation go."""
        beside = None if self.save is None else str(PurePath(self.save).with_name("best.safetensors"))
        return self.best_weights or beside

    @field_validator("curve")
    @classmethod
    def _is_curve(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith((".csv", ".jsonl")):
            raise ValueError("evaluations are written as CSV or JSON lines: let the name end in .csv or .jsonl")
        return value

    @field_validator("save", "best_weights")
    @classmethod
    def _is_safetensors(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".safetensors"):
            raise ValueError("weights are written as safetensors: let the name end in .safetensors")
        return value


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level shown")
    format: Annotated[
        Literal["text", "json"], Flag(Panel.OUTPUT, (LAUNCHER,), name="log-format", metavar="text|json")
    ] = Field("text", description="text for people, json for programs")


class LaunchConfig(Section):
    backend: Annotated[str, Flag(Panel.HOSTS, (LAUNCHER,), metavar="NAME")] = Field(
        "local", description="where processes start: local, slurm, or ssh, which launch.hosts means"
    )
    hosts: Annotated[str | None, Flag(Panel.HOSTS, (LAUNCHER,), metavar="FILE.yaml")] = Field(
        None, description="YAML file of the machines to use, see docs/remote.md"
    )
    colocate: Annotated[bool, Flag(Panel.HOSTS, (LAUNCHER,))] = Field(
        False, description="each host that has workers carries one server shard"
    )
    sync_code: Annotated[bool, Flag(Panel.HOSTS, (LAUNCHER,))] = Field(
        False, description="copy the task file or script to every host that has workers"
    )
    ssh: str = Field("ssh", min_length=1, description="the ssh command, with options of your own")
    connect_s: float = Field(10.0, gt=0, description="seconds a host has to answer")
    lost_after_s: float = Field(
        20.0, ge=5, description="a host not heard of for so long is lost, and ends what runs there by itself"
    )
    script: Annotated[str | None, Flag(Panel.RUN, (LAUNCHER,), metavar="FILE.py")] = Field(
        None, description="your own training script as each worker; its arguments follow --"
    )
    torch_variables: Annotated[bool, Flag(Panel.OTHER, (LAUNCHER,))] = Field(
        False,
        description="a script is given RANK and WORLD_SIZE too; trainers take them for a process group of their own",
    )
    port: Annotated[int | None, Flag(Panel.OTHER, (LAUNCHER,))] = Field(
        None, ge=0, le=65535, description="server port; none: a free one"
    )
    status_interval_s: float = Field(2.0, gt=0, description="seconds between status lines without a terminal")
    grace_s: float = Field(
        10.0, gt=0, description="seconds from Ctrl-C until children are killed, servers ten times as long"
    )
    max_restarts: Annotated[int, Flag(Panel.SNAPSHOTS, (LAUNCHER,), metavar="N")] = Field(
        3, ge=0, description="of each process, before the job ends with exit code 17; 0: its first failure ends the job"
    )
    backoff_s: float = Field(0.5, ge=0, description="before a first restart; doubles up to 10 s")


class Config(Section):
    """Everything a program can be told; each program reads its own sections."""

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

    @field_validator("policy")
    @classmethod
    def _known_options(cls, policy: PolicyConfig, info: ValidationInfo) -> PolicyConfig:
        run: RunConfig | None = info.data.get("run")  # None where that section is wrong itself
        checked = _checked_options(policy.model_extra or {}, run.modes if run is not None else ())
        return policy.model_copy(update=checked)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        workers = self.run.workers
        if workers is not None:
            if self.policy.min_workers > workers:
                raise ValueError(f"policy.min_workers is {self.policy.min_workers}, but run.workers is {workers}")
            backup_workers = self.policy.option("backup_workers", 0)
            if backup_workers >= workers:
                raise ValueError(f"policy.backup_workers is {backup_workers}: it must be below run.workers, {workers}")
            most = workers - backup_workers
            if self.policy.aggregation == "trimmed_mean" and most <= 2 * self.policy.trim:
                raise ValueError(
                    f"policy.trim is {self.policy.trim}: a round needs more than {2 * self.policy.trim} contributions "
                    f"to leave out that many at each end, and has {most}"
                )
            if self.worker.rank is not None and self.worker.rank >= workers:
                raise ValueError(
                    f"worker.rank is {self.worker.rank}: with run.workers {workers} it is 0..{workers - 1}"
                )
        if (steps := self.run.task_steps) is not None and self.train.warmup >= steps:
            raise ValueError(f"train.warmup is {self.train.warmup}: it must be below run.steps, {steps}")
        if self.train.min_lr > self.optimizer.lr:
            raise ValueError(
                f"train.min_lr is {self.train.min_lr:g}: it must not exceed optimizer.lr, {self.optimizer.lr:g}"
            )
        if self.output.save_averaged and self.store.polyak is None:
            raise ValueError("output.save_averaged needs store.polyak, e.g. 0.999")
        return self
