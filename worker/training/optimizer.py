"""The optimizer that a training loop steps, and the training steps of a session, of one optimizer or several.

`ExchangeOptimizer.step()` does what the run's mode needs. `Steps` counts it, and makes contributions of the steps.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.optim.optimizer as optimizer_hooks
from torch.autograd import profiler

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.optimizers import (
    IN_WORKERS,
    Hyperparameters,
    check_max_norm,
    current_hyperparameters,
    plain_step,
)
from ...common.wire.records import Contribution, Counts, FirstInfo, Outcome, Timing, TrainingInfo
from ..conversation.messages import Begun, Outgoing, RowGradients
from ..ownership import Owner
from .batches import digest_of
from .evaluation import Evaluation
from .position.memory import Memory, Restarted, rates_of
from .readings import Readings
from .rows import Rows, refuse_scaler
from .server_state import ServerState, state_is_the_servers
from .slowdown import Slowdown

log = get_logger()

_PLACE = "paramserver"  # key in a saved state: the run and the training step that it is from

# ---- steps -------------------------------------------------------------------------------------------


class Scaling:
    """The scalers of one session. `num_steps` grows with each step() of an optimizer."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.skipped: Callable[[Any], None] = lambda _: None  # called with the optimizer whose step is not taken
        self._has_any = False

    def watch(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """Let a scaler tell about skipped steps. A foreign one is refused by name (`check`)."""
        step = scaler.step
        self._has_any = True

        def watched(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            before = self.num_steps
            result = step(optimizer, *args, **options)
            if self.num_steps == before:
                self.skipped(optimizer)
            return result

        scaler.step = watched  # type: ignore[method-assign]
        return scaler

    def check(self) -> None:
        """Raises UsageError if the scaler that asks is not the session's: the session has none."""
        if not self._has_any:
            raise UsageError(
                "torch.amp.GradScaler on the optimizer of session.optimizer(): the run would not know of the steps "
                "that it skips",
                fix="scaler = session.scaler(...), with the arguments of your GradScaler; bfloat16 needs no scaler",
            )


class Steps:
    """The training steps of all optimizers of a session; `parts` holds the optimizers."""

    def __init__(
        self,
        memory: Memory,
        slowdown: Slowdown | None,
        tables: Sequence[Rows] = (),
        evaluation: Evaluation | None = None,
        restarted: Restarted | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self.memory, self.data, self._slowdown = memory, memory.data, slowdown
        self.strategy, self.progress = self.data.strategy, self.data.progress
        self.tables, self._evaluation = tables, evaluation or Evaluation()
        self._restarted, self.scaling = restarted or Restarted(), scaling or Scaling()
        self.scaling.skipped = self.skip_step
        self._owner = Owner()
        self._first_rates: tuple[float, ...] | None = None  # learning rates at the first training step of this process
        self.parts: list[torch.optim.Optimizer] = []
        self.readings: Readings | None = None  # what the process measures
        self.work: Callable[[], str] = str  # what the process runs, as JSON
        self.notice: Callable[[], bool] | None = None  # called after each step until it returns True
        self._iteration = 0  # training steps that this process began, taken or not: where its schedules are
        self._begins = True  # whether the current step() begins a training step
        self._newest_step = -1  # number of the newest training step that began, or that was skipped as void
        self._after_newest: int | None = None  # the step after the newest one that began; None: none began
        self._looked_at = -1  # `num_starts` when the script was compared with the rank
        # The optimizer that began the newest training step; None: this process has not taken a step.
        self.newest: torch.optim.Optimizer | None = None
        self._unsent: torch.optim.Optimizer | None = None  # one that has stepped since the newest contribution
        self._began: Begun | None = None  # where the newest training step's contribution began
        self._num_starts = -1
        self._replays_left = 0  # contributions that count already, of the training step that is replayed
        self._skips_step = False  # the current step() belongs to a training step that the run rejected, or moved from
        self._num_samples = 0
        self._step_samples = 0  # of the newest training step
        self._losses: list[float] = []
        self._fresh_samples, self._fresh_losses = 0, list[float]()  # since the last step
        self._hyperparameters: tuple[Hyperparameters, ...] = ()
        self._last_values: list[Any] = []  # of which they were computed
        self._sent_first_for = self._digest_for = -1  # `num_starts` when FirstInfo was sent, and the digest made
        self._digest = 0  # of the gradients of the first step after the newest start
        self._resumed_at = time.perf_counter()
        self._compute_s = 0.0
        if self.data.is_parted:  # a process may take over in the middle of a training step
            self.data.use()

    @property
    def step(self) -> int:
        """The training step in hand: that of the void batches in hand, although the run is elsewhere by now."""
        return self._newest_step + 1 if self.data.is_void else self.progress.position

    def record(self, num_samples: int = 0, loss: float | None = None) -> None:
        """Count samples, instead of those of its batches, and a loss to show, towards the next step."""
        self._fresh_samples += num_samples
        if loss is not None:
            self._losses.append(loss)
            self._fresh_losses.append(loss)

    def prepare_step(self, part: torch.optim.Optimizer) -> bool:
        """Called before a step(). False: the step is to be skipped. Raises UsageError after the end of the run."""
        self._owner.check()
        progress = self.progress
        self._begins = not self.data.is_parted or self.data.begins(part)
        if self._num_starts != progress.num_starts:
            self._num_starts, self._replays_left = progress.num_starts, max(1, progress.row.part)
            self._skips_step = progress.row.part > 0
        self._skips_step &= not self._begins
        if self._skips_step:
            return False
        num_samples = self._fresh_samples
        if self._begins:
            if self._is_void():
                self._skips_step = self.data.is_parted
                return False
            data = self.data
            self._newest_step = progress.position
            if self._looked_at != progress.num_starts:
                self._looked_at = progress.num_starts
                self._restarted.look(progress, self._after_newest)
            self._after_newest = self._newest_step + 1
            if self._first_rates is None:
                self._first_rates = rates_of(self._restarted.optimizers)
            data.has_begun = True
            if data.is_sent:
                self.memory.note()
            if self._evaluation.every is not None:
                self._evaluation.begin(progress, data)
            if data.uses_shard:
                num_samples = data.prepare_step(num_samples)
        self.strategy.before_step(num_samples, self._fresh_losses, part.param_groups)
        self._fresh_losses = []
        return True

    def _is_void(self) -> bool:
        """Whether the step uses batches from before the run moved, or from after its end. Then it is not taken."""
        data = self.data
        if data.is_void:
            data.skip_step()
            self._newest_step += 1
            self._iteration += 1
        elif not self.progress.is_done:
            return False
        elif data.has_in_hand:  # the step uses batches that were fetched before the end was known
            data.skip_step()
        else:
            raise UsageError(
                f"step() after the end of the run, which has {self.progress.total_steps} training steps (run.steps)",
                fix="end the loop when session.is_done, or loop over session.shard(...); or give the run as many steps "
                "as the loop takes (--steps)",
            )
        del self._losses[len(self._losses) - len(self._fresh_losses) :]
        self._fresh_samples, self._fresh_losses = 0, []
        for table in self.tables:
            table.drop()
        if not data.is_void:
            self.strategy.restore()
        return True

    def skip_step(self, part: torch.optim.Optimizer) -> None:
        """A step is not taken, because a scaler found infinities. Other optimizers may step on the same batches."""
        if self.data.is_parted and (part is not self.parts[-1] or not self.data.begins(part)):
            return
        self.data.apply_start()
        self.data.skip_step()
        self._iteration += 1
        self._fresh_samples = 0
        self.memory.skipped()

    def stepped(self, part: torch.optim.Optimizer, clip_norm: float) -> None:
        """Called after this worker's part of a step(). Contributes if a contribution is complete.

        `clip_norm`: the norm to which the script clips this step; 0: none.
        """
        if self._begins:
            self.newest = part
            # The first gradients after a start have a digest. Batches of `session.shard()` need none.
            if self._digest_for != self.progress.num_starts and not self.progress.is_replaying:
                self._digest_for = self.progress.num_starts
                gradients = [parameter.grad for parameter in parameters_of(part) if parameter.grad is not None]
                self._digest = 0 if self.data.uses_shard else digest_of(gradients)
            if self.readings is not None and time.perf_counter() >= self.readings.note_at:
                self.readings.note_step(part.param_groups)
            self._iteration += 1
            drawn = self.data.step()
            self._fresh_samples = self._fresh_samples or drawn
        self._num_samples, self._fresh_samples = self._num_samples + self._fresh_samples, 0
        if self.notice is not None and self.notice():
            self.notice = None
        now = time.perf_counter()
        if self._slowdown is not None:  # the whole step counts as compute time
            time.sleep(self._slowdown.delay_s(self._newest_step + 1, now - self._resumed_at))
            now = time.perf_counter()
        self._compute_s += now - self._resumed_at
        if self._begins:
            is_due = self.progress.took_step()
        else:
            # With local steps, the other optimizers' steps go with the next contribution. After the last training step
            # there is none, so they are sent now.
            is_due = not self.strategy.kind.worker_steps or self.progress.is_last
        if is_due:
            if not self.progress.is_replaying:
                self._contribute(part, clip_norm)
            else:
                self._replays_left -= 1
                if not self._replays_left:
                    self.data.replayed()
                    if self._evaluation.every is not None:  # an evaluation that was due then has taken place
                        self._evaluation.is_due(self.progress, self.data)
                self._begin_anew()
                self.strategy.note()
        else:
            if self._begins:
                self.strategy.went_on()
            else:
                self._unsent = part
            self.strategy.note()
        self._resumed_at = time.perf_counter()

    def _contribute(self, part: torch.optim.Optimizer, clip_norm: float = 0.0) -> None:
        self._unsent = None
        num_samples = self._num_samples if self._begins else self._num_samples or self._step_samples
        if self.data.uses_shard:
            # A batch with a discarded gradient has weight 0, which would mean "unknown" in a message.
            num_samples = max(1, num_samples)
        hyperparameters = self._current_hyperparameters()
        is_due = False
        if self._begins:
            self._began = self.memory.take() if self.data.is_sent else None
            if self._evaluation.every is not None:
                is_due = self.strategy.agreed(self._evaluation.is_due(self.progress, self.data))
            elif self._evaluation.is_missing:
                self._evaluation.say_missing()
        number = self.parts.index(part) + 1 if self.data.is_parted else 0
        num_steps = self.progress.local_steps if self._begins else 0  # else the previous part has counted it
        num_batches = self.data.take_reported() if self._begins and self.data.uses_shard else num_steps
        began = self._began
        contribution = Contribution(
            kind=self.strategy.kind,
            counts=Counts(num_samples, num_steps, num_batches, number),
            timing=Timing(self._compute_s),
            training=TrainingInfo(hyperparameters, clip_norm, _mean(self._losses), True, is_due, self._iteration),
            first=self._first() if self._sent_first_for != self.progress.num_starts else None,
            position=began.position if began is not None else None,
        )
        rows = self._take_rows() if self.tables else ()
        outgoing = Outgoing(contribution, began.payload if began is not None else None, rows)
        num_counted = self.progress.row.seq
        self.strategy.contribute(outgoing, parameters_of(part) if number else None)
        if self._begins and self.progress.outcome is Outcome.REJECTED and self.progress.row.seq == num_counted:
            self._skips_step = self.data.is_parted  # the other optimizers' parts would count to the step before
        self._begin_anew()
        # A loop without `shard()` and `mark()` goes on with the batch it has.
        if self.data.is_sent and self.memory.has_moved and not (self.data.uses_shard or self.data.is_marked):
            self.memory.move(may_replay=self.data.is_parted)
        if self.data.is_void or (self.progress.is_done and self.data.has_in_hand):
            self.strategy.pause()
        if is_due and not self.progress.is_done:  # at the end `session.finish()` evaluates the final weights
            self._evaluation.run()
            self.strategy.note()

    def _take_rows(self) -> tuple[RowGradients, ...]:
        """The gradients of the tables' rows for this contribution."""
        found = [(at, table.take()) for at, table in enumerate(self.tables)]
        return tuple(RowGradients(at, *taken) for at, taken in found if taken is not None)

    def _begin_anew(self) -> None:
        if self._begins:
            self._step_samples = self._num_samples
        self._num_samples, self._losses, self._compute_s = 0, [], 0.0
        for table in self.tables:
            table.drop()

    def finish(self) -> None:
        """No training step follows: contribute local steps that were not sent yet, of all optimizers."""
        self.strategy.restore()
        if self.progress.is_replaying:
            self.data.replayed()
        if self.newest is not None and self.strategy.kind.worker_steps and self.strategy.cut_short():
            self._begins = True
            self._contribute(self.newest)
        elif self._unsent is not None and not self.progress.is_done:
            self._begins = False
            self._contribute(self._unsent)

    def _current_hyperparameters(self) -> tuple[Hyperparameters, ...]:
        """Hyperparameters of all groups, then of all tables. They are computed only when a value changes."""
        values: list[Any] = [table.lr for table in self.tables] if self.tables else []
        for optimizer in self.data.optimizers:
            for group in optimizer.param_groups:
                for key, value in group.items():
                    if key != "params":  # a learning rate may be a tensor that a scheduler changes in place
                        values.append(value.tolist() if isinstance(value, torch.Tensor) else value)
        if values != self._last_values:
            self._last_values = values
            groups = [group for optimizer in self.data.optimizers for group in optimizer.param_groups]
            of_tables = [{} if table.lr is None else {"lr": float(table.lr)} for table in self.tables]
            self._hyperparameters = (*map(current_hyperparameters, groups), *of_tables)
        return self._hyperparameters

    def _first(self) -> FirstInfo:
        """Facts about the data for the first contribution after each start, as a restarted server lost them."""
        self._sent_first_for = self.progress.num_starts
        data = self.data
        num_samples = 0 if data.accepts_other_data else data.num_samples
        return FirstInfo(num_samples, self._digest, data.run_steps, self._first_rates or (), self.work())


def parameters_of(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all their groups."""
    return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


# ---- optimizer -----------------------------------------------------------------------------------------


class NoAttributeError(UsageError, AttributeError):
    """An attribute that the optimizer of a session does not have. So `hasattr` works."""


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
        self._server_state = None if self._steps_here else ServerState(parameters_of(self), steps.strategy)
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
            raise state_is_the_servers()
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
