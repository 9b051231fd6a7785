"""Sections of the task and the run: length, workers, seeds and evaluations."""

# No `from __future__ import annotations`: see __init__.py.
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ...registry import TASKS, canonical_mode
from ...user_code import is_in_file
from ..conditions import condition, every
from ..option import EVERY, LAUNCHER, SERVE, WORKER, Flag, Panel, Section, checked_by

TASK_STEPS = 500  # default number of training steps of a task


Mode = Annotated[str, AfterValidator(canonical_mode)]
Interval = Annotated[str, Field(coerce_numbers_to_str=True), checked_by(every)]
Until = Annotated[str, checked_by(condition)]


class TaskConfig(Section):
    """The model, data and loss that ps-worker trains."""

    name: Annotated[str, Flag(Panel.RUN, (*EVERY, SERVE), metavar="NAME|FILE.py:NAME")] = Field(
        "digits", description="a built-in task, or FILE.py:NAME (never taken from the server)"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task")
    init: Annotated[str | None, Flag(Panel.RUN, (WORKER, LAUNCHER), metavar="FILE.safetensors")] = Field(
        None, description="file of initial weights for a new run; every worker needs the file"
    )

    @field_validator("name")
    @classmethod
    def _known_task(cls, value: str) -> str:
        if value.endswith(".py"):
            raise ValueError(f"'{value}' is a file: add the name of its task, {value}:NAME")
        return value if is_in_file(value) else TASKS.check(value)


class RunConfig(Section):
    """Mode, length and workers of a run."""

    mode: Annotated[Mode, Flag(metavar="MODE")] = Field(
        "sync",
        description="sync, async, ssp, localsgd, diloco, ..., an alias, or FILE.py:NAME (never from another process); "
        "ps-launch compares several (MODE,MODE), and also has single: one process without a server, on the union batch",
    )
    steps: Annotated[int | None, Flag(Panel.RUN, EVERY, is_for_alone=True)] = Field(
        None, ge=1, description="training steps (batches) per worker; none: 500 for a task, no limit for a script"
    )
    epochs: Annotated[int | None, Flag(Panel.RUN, EVERY, is_for_alone=True)] = Field(
        None, ge=1, description="passes of all workers together through the data set, instead of run.steps"
    )
    eval_every: Annotated[Interval | None, Flag(Panel.RUN, EVERY, "", "", "N|30s|1epoch", is_for_alone=True)] = Field(
        None, description="interval between evaluations, in training steps, seconds or epochs"
    )
    best: Annotated[str | None, Flag(Panel.RUN, EVERY, metavar="METRIC[:max|:min]", is_for_alone=True)] = Field(
        None, description="metric that chooses the best evaluation, such as reward:max; none: accuracy, else loss"
    )
    stop_when: Annotated[Until | None, Flag(Panel.RUN, EVERY, "", "", "'loss < 0.1'", is_for_alone=True)] = Field(
        None, description="end the run when an evaluation meets this condition, e.g. 'accuracy >= 0.98'"
    )
    patience: Annotated[int | None, Flag(Panel.RUN, EVERY, metavar="N", is_for_alone=True)] = Field(
        None, ge=1, description="end the run after N evaluations in a row without improvement"
    )
    workers: Annotated[int | None, Flag(Panel.RUN, short="n")] = Field(
        None, ge=1, le=4096, description="workers of the run; none: any number (ps-server), 2 (ps-launch)"
    )
    batch_size: Annotated[int, Flag(Panel.RUN, EVERY)] = Field(
        32, ge=1, description="samples per worker and step; a worker uses the server's value unless it has its own"
    )
    other_modes: Annotated[tuple[Mode, ...], Flag(name="mode", programs=())] = Field(
        (), description="other modes in files, whose options the section policy accepts; ps-launch sets it"
    )
    seed: Annotated[int, Flag(Panel.RUN)] = Field(0, ge=0, lt=2**31, description="seed of first weights and data order")

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps is {self.steps} and epochs is {self.epochs}: a run has one length, so leave one out"
            )
        return self

    @property
    def ends_by_metrics(self) -> bool:
        """Whether an evaluation may end the run."""
        return self.stop_when is not None or self.patience is not None

    @property
    def task_steps(self) -> int | None:
        """Training steps of a run whose workers train a task; None if `epochs` gives the length."""
        return self.steps if self.steps is not None or self.epochs is not None else TASK_STEPS

    @property
    def modes(self) -> tuple[str, ...]:
        """The run's mode and the other modes whose options the section policy accepts, besides the built-in modes."""
        return (self.mode, *self.other_modes)
