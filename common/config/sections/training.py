"""Sections for the server's step, the optimizer, and the training of a task."""

# No `from __future__ import annotations`: see __init__.py.
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..option import LAUNCHER, NOT_FINITE, WORKER, Flag, Panel, Section
from ..plain import meant


class StoreConfig(Section):
    """How the server handles buffers, averages, and contributions that are not finite or too large."""

    buffers: Literal["average", "lowest_rank", "keep"] = Field(
        "average", description="running statistics of normalisation: average them, copy the lowest live rank's, or keep"
    )
    polyak: float | None = Field(None, gt=0, lt=1, description="decay of a moving average of the weights")
    master_weights: bool = Field(True, description="with local steps, keep 16-bit weights in float32 for small means")
    on_nonfinite: Literal["reject", "skip", "clip", "halt"] = Field(
        "reject",
        description="on NaN or Inf in a contribution: the worker repeats it, skip it, use 0 instead, or end the run",
    )
    max_nonfinite: int = Field(10, ge=1, description="rejections of one worker in a row that end the run (exit 16)")
    clip_norm: Annotated[float | None, Flag(Panel.OPTIMIZER)] = Field(
        None, gt=0, description="cap on the 2-norm of the mean gradient (sync) or mean delta (diloco); none: any"
    )
    max_norm: float | None = Field(None, gt=0, description="cap on the 2-norm of each worker's gradient or delta")
    on_large: Literal["reject", "skip", "clip", "halt"] = Field(
        "clip", description="on a norm above store.max_norm: as on_nonfinite, but clip scales it down to the cap"
    )


def _argument(value: Any) -> Any:
    """Refuse an optimizer's argument that is no finite number, no switch and no list of them: torch would take text."""
    value = meant(value)
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, float) and not math.isfinite(item):
            raise PydanticCustomError(NOT_FINITE, "Input should be a finite number")
        if not isinstance(item, int | float | None) or (item is not value and isinstance(item, bool)):
            raise ValueError(f"is a number, true, false or a list of numbers, got {item!r}")
    return value


class OptimizerConfig(Section):
    """An elementwise optimizer of torch.optim, by its lower-case name. Other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Annotated[Any, BeforeValidator(_argument)]]

    name: Annotated[str, Flag(Panel.OPTIMIZER, metavar="NAME")] = Field(
        "sgd", description="optimizer of torch.optim: sgd, adam, adamw, rmsprop, ..."
    )
    lr: Annotated[float, Flag(Panel.OPTIMIZER)] = Field(0.1, gt=0, description="learning rate")

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the torch class: `lr` and every extra key."""
        return {"lr": self.lr, **(self.model_extra or {})}


_LR_GAMMA = 0.1  # torch's default


class TrainConfig(Section):
    """Training of a task, for all workers as the server's settings say. A script decides these things itself."""

    lr_schedule: Annotated[Literal["constant", "cosine", "linear", "step"], Flag(Panel.OPTIMIZER, metavar="NAME")] = (
        Field("constant", description="schedule of the learning rate: constant, cosine, linear or step, as in torch")
    )
    warmup: Annotated[int, Flag(Panel.OPTIMIZER, metavar="STEPS")] = Field(
        0, ge=0, description="training steps in which the learning rate first rises linearly to --lr"
    )
    min_lr: Annotated[float, Flag(Panel.OPTIMIZER)] = Field(
        0.0, ge=0, description="learning rate at the end of the run (schedules cosine, linear)"
    )
    lr_step_size: Annotated[int | None, Flag(Panel.OPTIMIZER, metavar="STEPS")] = Field(
        None, ge=1, description="training steps between two reductions of the learning rate (schedule step)"
    )
    lr_gamma: Annotated[float, Flag(Panel.OPTIMIZER)] = Field(
        _LR_GAMMA, gt=0, le=1, description="factor of each reduction of the learning rate (schedule step)"
    )
    accumulate: Annotated[int, Flag(Panel.OPTIMIZER, metavar="N")] = Field(
        1, ge=1, le=1 << 16, description="batches per training step; equals one batch N times as large, in less memory"
    )
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Flag(Panel.OPTIMIZER, metavar="fp32|bf16|fp16")] = Field(
        "fp32", description="precision of autocast (fp16 with a loss scaler); weights and gradients stay fp32"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        is_step = self.lr_schedule == "step"
        if is_step != (self.lr_step_size is not None):
            raise ValueError("lr_schedule step and lr_step_size need each other")
        if self.lr_gamma != _LR_GAMMA and not is_step:
            raise ValueError("lr_gamma needs lr_schedule step: no other schedule reads it")
        if self.min_lr and self.lr_schedule not in ("cosine", "linear"):
            raise ValueError("min_lr needs lr_schedule cosine or linear: no other schedule reads it")
        return self


class LoaderConfig(Section):
    """DataLoader options of a task. Each worker has its own, as machines differ. None: torch's default."""

    num_workers: Annotated[int | None, Flag(Panel.RUN, (WORKER, LAUNCHER), name="loader-workers", metavar="N")] = Field(
        None, ge=0, description="processes of each worker that load batches; none: the worker loads them itself"
    )
    prefetch_factor: int | None = Field(None, ge=1, description="batches that each loader process loads ahead")
    persistent_workers: bool | None = Field(None, description="keep the loader processes from epoch to epoch")
    timeout: float | None = Field(None, ge=0, description="seconds to wait for a loader's batch; 0: no limit")
    pin_memory: bool | None = Field(None, description="load batches into pinned memory, for faster copies to a GPU")

    @model_validator(mode="after")
    def _needs_processes(self) -> Self:
        for name in ("prefetch_factor", "persistent_workers", "timeout"):
            if getattr(self, name) and not self.num_workers:
                raise ValueError(f"{name} needs loader processes: set num_workers")
        return self

    def options(self) -> dict[str, Any]:
        """Return the options that were set, as keyword arguments of a DataLoader."""
        return {name: value for name, value in self if value is not None}
