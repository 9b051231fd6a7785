"""The optimizer a training loop steps: behind `step()` lies whatever the run's mode needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.optim.optimizer as optimizer_hooks
from torch.autograd import profiler

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.clipping import check_max_norm
from ...common.tensors.optimizers import Hyperparameters, current_hyperparameters, plain_step
from ..session import Progress
from .position.steps import Steps
from .rows import refuse_scaler

log = get_logger()

_PLACE = "paramserver"  # in a saved state: where the rest of it is


class ExchangeOptimizer(torch.optim.Optimizer):
    """Stands in for the optimizer it is made from, and shares its parameter groups and state, so schedulers work on it
    as on any other: the current hyperparameters go with every contribution. Where gradients are contributed the server
    steps; where weights or deltas are, the given optimizer does, here.
    """

    def __init__(self, inner: torch.optim.Optimizer, steps: Steps) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._steps = steps
        self.inner = inner  # where the server steps, without state
        self._steps_here = steps.strategy.kind.worker_steps  # otherwise the server steps
        self._share()
        inner.register_load_state_dict_post_hook(lambda _: self._share())
        inner.register_step_pre_hook(self._before_inner_step)
        self._is_stepping, self._plain_step = False, plain_step(type(inner))
        self._clip_norm = 0.0  # of the next step; 0: any
        self._last_values: list[list[Any]] = []
        self._hyperparameters: list[Hyperparameters] = []
        steps.parts.append(self)

    def _share(self) -> None:
        """The same dicts, not copies: what a scheduler changes here, the inner optimizer sees."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _before_inner_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise UsageError(
                "step() of the optimizer that session.optimizer() was given: the run would never hear of it",
                fix="step the one it returned: optimizer = session.optimizer(model, optimizer)",
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, for torch to load. Where the server steps, what its optimizer remembers is fetched, as of its
        newest version. UnreachableError."""
        found: dict[str, Any] = super().state_dict()
        if not self._steps_here:
            found["state"] = self._steps.strategy.optimizer_state(self.parameters)
            found[_PLACE] = {"run": self.progress.run, "steps": self.progress.position}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Where the server steps, hyperparameters only; a warning says when that loses anything: the
        server's moments are those of its own steps."""
        if not self._steps_here:
            position = {"run": self.progress.run, "steps": self.progress.position}
            if state_dict["state"] and state_dict.get(_PLACE) != position:
                log.warning(
                    "optimizer_state_not_loaded",
                    meaning="hyperparameters are taken; moments are the server's and stay as they are: in a new run "
                    "they begin anew, with ps-server --checkpoint-dir it goes on with them",
                )
            state_dict = {**state_dict, "state": {}}
        self.inner.load_state_dict(state_dict)

    @property
    def progress(self) -> Progress:
        return self._steps.progress

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One training step, or this optimizer's part of it. Blocks while the run's mode makes this worker wait
        (delayed_update: for the step before).

        Raises the errors of `common/errors.py`, e.g. UnreachableError when the server is gone for good.
        """
        is_watched = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _are_all_watched()
        return self._watched_step(closure) if is_watched else self._take_step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for hooks and profilers, of which there are few

    def _take_step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self._steps.may_step(self):
            return closure() if closure is not None else None
        loss = self._step(closure)
        self._steps.stepped(self)
        self._clip_norm = 0.0  # of this step, also where it was computed once more and not sent
        return loss

    _watched_step = torch.optim.Optimizer.profile_hook_step(_take_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for table in self._steps.tables:
            table.drop()

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip the gradient that the next step() is along, as torch.nn.utils.clip_grad_norm_ clips a script's own: to
        be called in its place, between backward() and step(), in every step.

        What is clipped is the mean (or sum) over all workers, as in one process with the union batch. In modes that
        step along each contribution by itself it is that contribution, in modes with local steps the local gradient.
        UsageError for a norm that is no bound, and before the first backward().
        """
        check_max_norm(max_norm)
        has_any = any(parameter.grad is not None for parameter in self.parameters) or any(
            table.is_used for table in self._steps.tables
        )
        if not (has_any or self._steps.has_stepped):
            raise UsageError(
                "optimizer.clip_grad_norm() before the first backward(): it clips the gradient of one step",
                fix="call it between backward() and step(), in every step",
            )
        self._clip_norm = 0.0 if math.isinf(max_norm) else float(max_norm)
        if self._is_stepping:  # in the closure of a local step
            self._clip_here()

    def take_clip_norm(self) -> float:
        clip_norm, self._clip_norm = self._clip_norm, 0.0
        return clip_norm

    def _clip_here(self) -> None:
        if clip_norm := self.take_clip_norm():
            torch.nn.utils.clip_grad_norm_(self.parameters, clip_norm)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks before it looks for infinities: step() follows unless there are any."""
        self._steps.memory.is_tried = True
        if not self._steps.strategy.may_skip:
            message = "a GradScaler in a worker that is several processes: each would leave out other steps"
            raise UsageError(message, fix="bf16, which needs none; or wrap the model in DistributedDataParallel")
        return refuse_scaler(self._steps.tables)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """What of a step is done here; returns the closure's loss."""
        if self._steps_here and not self._steps.strategy.kind.has_peers:  # there when all have the mean
            self._clip_here()
            return self.step_inner(closure)
        self.inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler made for it asks
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def step_inner(self, closure: Callable[[], Any] | None = None) -> Any:
        self._is_stepping = True
        try:
            return self._plain_step(self.inner, closure) if self._is_unseen() else self.inner.step(closure)
        finally:
            self._is_stepping = False

    def _is_unseen(self) -> bool:
        """What torch wraps around the inner step would do nothing, but import the compiler (2.3 s, four at once on two
        cores at 2.6 GHz)."""
        inner = self.inner
        return not (
            "torch._dynamo" in sys.modules
            or "step" in vars(inner)
            or not type(inner).__module__.startswith("torch.optim.")
            or len(inner._optimizer_step_pre_hooks) > 1  # the one that is ours
            or inner._optimizer_step_post_hooks
            or any(group.get("differentiable") for group in inner.param_groups)
            or _are_all_watched()
        )

    def hyperparameters(self) -> list[Hyperparameters]:
        """Of every group; worked out anew only when a value has changed, which schedulers do now and then."""
        values = [[_as_number(value) for key, value in group.items() if key != "params"] for group in self.param_groups]
        if values != self._last_values:
            self._last_values = values
            self._hyperparameters = [current_hyperparameters(group) for group in self.param_groups]
        return self._hyperparameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_steps"):
            raise UsageError(
                "the run's parameter groups are fixed once session.optimizer() has been called",
                fix="add the group to the optimizer before (its parameters may stay without gradients until later)",
            )
        super().add_param_group(param_group)


def _are_all_watched() -> bool:
    """Every optimizer's steps, by a profiler or a hook."""
    hooks = optimizer_hooks._global_optimizer_pre_hooks or optimizer_hooks._global_optimizer_post_hooks
    return bool(profiler._is_profiler_enabled or hooks)


def _as_number(value: Any) -> Any:
    """A learning rate may be a tensor that a scheduler fills in place."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
