"""What contributions do to the weights, and how a task is trained."""

# No `from __future__ import annotations`: see __init__.py.
import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..option import LAUNCHER, NOT_FINITE, WORKER, Flag, Panel, Section


class StoreConfig(Section):
    buffers: Literal["average", "lowest_rank", "keep"] = Field(
        "average", description="running statistics of normalisation: averaged, the lowest live rank's, or untouched"
    )
    polyak: float | None = Field(None, gt=0, lt=1, description="decay of a moving average of the weights")
    on_nonfinite: Literal["reject", "skip", "clip", "halt"] = Field(
        "reject", description="NaN or Inf in a contribution: compute it again, skip it, take 0 instead, or end the run"
    )
    max_nonfinite: int = Field(10, ge=1, description="rejected in a row, of one worker, that end the run (exit 16)")
    clip_norm: Annotated[float | None, Flag(Panel.OPTIMIZER)] = Field(
        None, gt=0, description="cap on the 2-norm of the mean gradient (sync) or mean delta (diloco); none: any"
    )
    max_norm: float | None = Field(None, gt=0, description="cap on the 2-norm of each worker's gradient or delta")
    on_large: Literal["reject", "skip", "clip", "halt"] = Field(
        "clip", description="a gradient beyond store.max_norm: as on_nonfinite; clip scales it down to the cap"
    )


def _finite(value: Any) -> Any:
    """An argument of an optimizer: of any kind, but no NaN and no infinity."""
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise PydanticCustomError(NOT_FINITE, "Input should be a finite number")
    return value


class OptimizerConfig(Section):
    """An elementwise optimizer of torch.optim by its lower-case name; other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_finite)]]

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
