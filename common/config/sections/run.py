"""What is trained, how long and by how many."""

# No `from __future__ import annotations`: see __init__.py.
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from ...registry import TASKS, canonical_mode
from ...user_code import is_in_file
from ..conditions import condition, every
from ..option import EVERY, LAUNCHER, WORKER, Flag, Panel, Section


def _readable(read: Callable[[str], object]) -> Callable[[str], str]:
    """Text that `read` understands."""

    def check(text: str) -> str:
        read(text)
        return text

    return check


TASK_STEPS = 500  # of a task, where nobody has said how long it is to be trained


Mode = Annotated[str, AfterValidator(canonical_mode)]
Interval = Annotated[str, BeforeValidator(lambda value: str(value)), AfterValidator(_readable(every))]
Until = Annotated[str, AfterValidator(_readable(condition))]


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
    best: Annotated[str | None, Flag(Panel.RUN, EVERY, metavar="METRIC", is_for_alone=True)] = Field(
        None, description="the metric that decides what is best; none: accuracy where there is one, else loss"
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
    def ends_by_metrics(self) -> bool:
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
