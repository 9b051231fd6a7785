"""The optimizer that a training loop steps. Its `step()` does what the run's mode needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
import torch.optim.optimizer as optimizer_hooks
from torch.autograd import profiler

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.optimizers import IN_WORKERS, check_max_norm, plain_step
from .position.steps import Steps, parameters_of
from .rows import refuse_scaler

log = get_logger()

_PLACE = "paramserver"  # key in a saved state: the run and the training step that it is from


class NoAttributeError(UsageError, AttributeError):
    """An attribute that the optimizer of a session does not have. So `hasattr` works."""


class ServerState(MutableMapping[torch.Tensor, Mapping[str, Any]]):
    """The state of the server's optimizer, fetched when the script reads it. A script cannot change it."""

    def __init__(self, parameters: list[torch.Tensor], steps: Steps) -> None:
        self._parameters, self._steps = parameters, steps
        self._fetched_at: tuple[int, ...] = ()
        self.is_read = False  # the script has read the state
        self._found: dict[torch.Tensor, Mapping[str, Any]] = {}
        self._versions: list[int] = []

    def _fetch(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        progress = self._steps.progress
        if self._fetched_at != (now := (progress.num_received, progress.row.seq, progress.position)):
            found = self._steps.strategy.optimizer_state(self._parameters)
            self._found = {self._parameters[index]: MappingProxyType(state) for index, state in found.items()}
            self._versions, self._fetched_at, self.is_read = self._count(), now, True
        return self._found

    def _count(self) -> list[int]:
        """How often each tensor was changed in place."""
        values = [value for state in self._found.values() for value in state.values()]
        return [value._version for value in values if isinstance(value, torch.Tensor)]

    def forget(self) -> None:
        """The next reading fetches again."""
        self._fetched_at = ()

    def check(self) -> None:
        """Raises UsageError if the script has changed the state."""
        if self._versions != self._count():
            raise _state_is_the_servers()

    def __getitem__(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        return self._fetch().get(parameter, MappingProxyType({}))  # torch's state has no missing keys, too

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Accepts the state that is there: a trainer at its end writes each back, after it moved it to another device.

        Raises UsageError for another state."""
        known = self[parameter]
        if known.keys() != state.keys() or not all(_is_equal(state[key], value) for key, value in known.items()):
            raise _state_is_the_servers()

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise _state_is_the_servers()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())


def _is_equal(value: Any, known: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return torch.equal(value.to(known.device), known)
    return bool(value == known)


def _state_is_the_servers() -> UsageError:
    return UsageError(
        "the state of the optimizer was changed, but the server keeps it and would not see the change",
        fix=f"leave it as it is; or {IN_WORKERS}",
    )


class ExchangeOptimizer(torch.optim.Optimizer):
    """Replaces the script's optimizer and has its parameter groups, so schedulers work as usual.

    The current hyperparameters go with every contribution. If workers send gradients, the server runs the optimizer. If
    they send weights or deltas, the inner optimizer takes the steps on this worker. Then its state is here, too, and
    its other attributes are reached.
    """

    def __init__(self, inner: torch.optim.Optimizer, steps: Steps) -> None:
        if "_optimizer_step_pre_hooks" not in vars(inner):  # a class that does not call torch's constructor
            inner.__setstate__({"defaults": getattr(inner, "defaults", {})})
        self.inner = inner  # has no state if the server runs the optimizer
        self._steps_here = steps.strategy.kind.worker_steps  # False: the server runs the optimizer
        hooks = {key: hooks for key, hooks in vars(inner).items() if "state_dict_" in key and key.endswith("_hooks")}
        self.__setstate__({"defaults": dict(inner.defaults), **hooks})
        self._steps, self.progress = steps, steps.progress
        self._server_state = None if self._steps_here else ServerState(parameters_of(self), steps)
        for item in (inner, *(part for part in vars(inner).values() if isinstance(part, torch.optim.Optimizer))):
            item.register_step_pre_hook(self._before_inner_step)
        self._is_stepping, self._plain_step = False, plain_step(type(inner))
        self._clip_norm = 0.0  # for the next step; 0: no limit
        steps.parts.append(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The state by parameter. If the server runs the optimizer, this fetches it as of the newest version."""
        return self.inner.state if self._server_state is None else self._server_state

    @state.setter
    def state(self, state: Any) -> None:
        if self._server_state is not None:
            raise _state_is_the_servers()
        self.inner.state = state

    def __getattr__(self, name: str) -> Any:
        """Reach the other attributes of an optimizer that runs in this worker."""
        inner = vars(self).get("inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(name)
        if self._steps_here and hasattr(inner, name):
            return getattr(inner, name)
        kind = type(inner).__name__
        if hasattr(inner, name):
            message = f"{kind}.{name} has no effect in a run in which the server runs the optimizer"
            raise NoAttributeError(message, fix=IN_WORKERS)
        message = f"{kind} has no attribute '{name}'"
        raise NoAttributeError(message, fix="use what the class of the optimizer has, or a step of its own")

    def _before_inner_step(self, *_: Any) -> None:

        if not self._is_stepping:
            raise UsageError(
                "step() was called on the optimizer that was given to session.optimizer(), or on one within it: the "
                "run would not see it",
                fix="step the returned optimizer: optimizer = session.optimizer(model, optimizer); if a step has "
                "several parts (first_step and second_step of SAM, say), call step(closure), which does all of them",
            )

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's `state_dict` has it, for torch to load.

        If the server runs the optimizer, this fetches its state as of the newest version. Raises UnreachableError.
        """
        if self._server_state is None:
            return self.inner.state_dict()
        self._server_state.forget()
        found = super().state_dict()
        found["state"] = {index: dict(state) for index, state in found["state"].items()}
        return {**found, _PLACE: self._saved_at()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as torch does. If the server runs the optimizer, load hyperparameters only.

        The moments on the server belong to its own steps. If the saved moments are lost, a warning says so.
        """
        if not self._steps_here:
            if state_dict["state"] and state_dict.get(_PLACE) != self._saved_at():
                log.warning(
                    "optimizer_state_not_loaded",
                    meaning="only hyperparameters are loaded: the server keeps its own moments; a new run begins "
                    "without moments, and ps-server --checkpoint-dir resumes with them",
                )
            state_dict = {**state_dict, "state": {}}
        self.inner.load_state_dict(state_dict)

    def _saved_at(self) -> dict[str, Any]:
        return {"run": self.progress.run, "steps": self.progress.position}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one training step, or this optimizer's part of it. Returns the closure's loss.

        The call blocks while the mode makes this worker wait. With delayed_update it waits for the previous step.
        Raises the errors of `common/errors.py`, for example UnreachableError when the server does not come back.
        """
        is_watched = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _are_all_watched()
        return self._watched_step(closure) if is_watched else self._take_step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for hooks and profilers, which are rare

    def _take_step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._server_state is not None and self._server_state.is_read:
            self._server_state.check()
        self._steps.scaling.num_steps += 1
        if not self._steps.prepare_step(self):
            return closure() if closure is not None else None
        loss = None
        if not self._steps.strategy.kind.steps_along_mean_gradient:  # with peers, clip after averaging
            if self._clip_norm:
                self._clip_here()
            loss = self.step_inner(closure)
        else:
            self.inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler made for it checks this
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        clip_norm, self._clip_norm = self._clip_norm, 0.0
        self._steps.stepped(self, clip_norm)
        return loss

    _watched_step = torch.optim.Optimizer.profile_hook_step(_take_step)

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        self.inner.zero_grad(*arguments, **options)
        for table in self._steps.tables:
            table.drop()

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip the gradient of the next step() to a 2-norm of `max_norm`.

        Call it instead of torch.nn.utils.clip_grad_norm_, between backward() and step(), in every step. It clips the
        mean (or sum) of all workers' gradients, as one process with the union batch would. In modes that apply each
        contribution by itself it clips that contribution. In modes with local steps it clips the local gradient. Raises
        UsageError for an invalid norm, and before the first backward().
        """
        check_max_norm(max_norm)
        has_any = any(parameter.grad is not None for parameter in parameters_of(self)) or any(
            table.used for table in self._steps.tables
        )
        if not has_any and self._steps.newest is None:
            message = "optimizer.clip_grad_norm() before the first backward(): it clips the gradient of one step"
            raise UsageError(message, fix="call it between backward() and step(), in every step")
        self._clip_norm = 0.0 if math.isinf(max_norm) else float(max_norm)
        if self._is_stepping and self._clip_norm:  # inside the closure of a local step
            self._clip_here()

    def _clip_here(self) -> None:
        self._steps.strategy.clip(parameters_of(self), self._clip_norm)
        self._clip_norm = 0.0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Called by a GradScaler before it looks for infinities."""
        if not self._steps.strategy.may_skip:
            message = "a GradScaler in a replica group (--group): each process would skip other steps"
            raise UsageError(message, fix="use bf16, which needs none; or wrap the model in DistributedDataParallel")
        self._steps.scaling.check()
        return refuse_scaler(self._steps.tables)

    def step_inner(self, closure: Callable[[], Any] | None = None) -> Any:
        self._is_stepping = True
        try:
            # torch's wrapper around the inner step() is skipped where it would have no effect, which avoids the import
            # of the compiler (2.3 s, four at once on two cores at 2.6 GHz).
            inner = self.inner
            if not (
                "torch._dynamo" in sys.modules
                or "step" in vars(inner)
                or not type(inner).__module__.startswith("torch.optim.")
                or len(inner._optimizer_step_pre_hooks) > 1  # more than our own hook
                or inner._optimizer_step_post_hooks
                or any(group.get("differentiable") for group in inner.param_groups)
                or _are_all_watched()
            ):
                return self._plain_step(self.inner, closure)
            return self.inner.step() if closure is None else self.inner.step(closure)  # some take no closure
        finally:
            self._is_stepping = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError(
            "the run's parameter groups are fixed once session.optimizer() has been called",
            fix="add the group to the optimizer before that (parameters may get their first gradients later)",
        )


def _are_all_watched() -> bool:
    """Whether a profiler or a global hook watches the steps of all optimizers."""
    hooks = optimizer_hooks._global_optimizer_pre_hooks or optimizer_hooks._global_optimizer_post_hooks
    return bool(profiler._is_profiler_enabled or hooks)
