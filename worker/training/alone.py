"""A run in this process: `Alone` takes the server's place in the conversation of a session without a server.

It steps the model's own parameters, and writes the same events, summary and files as a server.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...common.config.schema import Config
from ...common.errors import OutputError, ParamServerError, UsageError, shown
from ...common.kinds import ContributionKind
from ...common.reporting.curve import Curve, Point, metric_fields
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_best, write_curve, write_results
from ...common.reporting.summary import RECORDED, Cost, EvaluatedPoint, Status, Summary, Tick, WorkerStatus
from ...common.runstore.record import Record, what_ran
from ...common.tensors.judgement import SOUND, Judgement, decide, halted, overflowed, rejected_too_often, unsound_start
from ...common.tensors.layout import Kind
from ...common.tensors.optimizers import JointOptimizer, OptimizerSpec, apply_hyperparameters, clip
from ...common.tensors.tables import Table
from ...common.user_code import UserCodeError
from ...common.wire.json_text import read_json
from ...common.wire.records import NO_ROW, NextWork, Outcome, Reply, Result, WeightsInfo
from ..conversation.messages import Final, Goodbye, Outgoing, Settings
from ..conversation.threads import uninterrupted
from ..session import Progress
from ..strategies.base import BlockingStrategy, Strategy
from ..tensors.transfer import ModelTensors, named_tensors
from .ending import ending_of, one_line
from .session import Session

log = get_logger()

_MODE = "single"  # as records and summaries name a run without a server


class Alone:
    """An `Exchanger` that is itself the run: mode sync with one worker, whose step is taken in this process."""

    begun = None
    replies_lose = False
    _model: ModelTensors  # set by `start`

    def __init__(self, config: Config) -> None:
        self._config = config
        self.settings = Settings(
            mode="sync",
            kind=ContributionKind.GRADIENT,
            num_workers=1,
            union_batch=True,
            steps=config.run.steps,
            epochs=config.run.epochs,
            batch_size=config.run.batch_size,
            seed=config.run.seed,
            task=config.task.name,
            task_args=config.task.args,
            optimizer=config.optimizer.name,
            optimizer_args=config.optimizer.arguments(),
            train=config.train,
            eval_every=config.run.eval_every,
            ends_by_metrics=config.run.ends_by_metrics,
        )
        self.progress = Progress(rank=0)
        self.measured: list[dict[str, Any]] = []
        self.stop_reason = ""
        self.metrics: Mapping[str, float] = {}  # of the final weights
        self.curve = Curve(config.run.best, config.run.stop_when, config.run.patience)
        self.ended_by = ""  # why the run ended early; empty: it did not
        self.summary: Summary | None = None  # set when the run is over
        self.row, self.loss = NO_ROW, math.nan
        self.has_overflowed = False  # the weights are not a valid version
        self._hyperparameters: tuple[dict[str, Any], ...] = ()  # of the newest contribution
        self.started_at = time.perf_counter()
        self.stepped_at = (0.0, 0.0)  # when the first and the newest step ended, in seconds of perf_counter
        self.first_samples = 0  # samples of the first step
        self._num_rejected = 0  # contributions in a row
        self.measure: Callable[[], Mapping[str, float]] = dict  # what it returns is in each status
        self.fingerprint = ""  # of the model's layout, as a server computes it; empty before there is a model
        self._described: OptimizerSpec | None = None
        self._work: dict[str, Any] = {}
        self._after: list[torch.Tensor] = []  # buffers, or at the end of the run all tensors, after the newest step

    # ---- the conversation ---------------------------------------------------------------------

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        tensors = {entry.spec.name: tensor for entry, tensor in zip(model.layout.entries, model.tensors, strict=True)}
        groups = [
            {"params": [tensors[name] for name in group.tensors], **group.hyperparameters} for group in optimizer.groups
        ]
        optimizer.check_known()
        self._optimizer, self._spec = JointOptimizer(optimizer.classes, groups), optimizer
        self._tables = [Table(spec, self.settings.seed) for spec in optimizer.tables]
        self._described = optimizer
        self._model, self.fingerprint, self.started_at = model, model.layout.fingerprint, time.perf_counter()
        if wrong := self._first_unsound(model.tensors[: model.num_trained]):
            raise unsound_start(0, wrong)
        self._keep()
        self.progress.total_steps = self.settings.steps
        reply = self._reply(Outcome.START)
        self.progress.started(reply)

    def contribute(self, outgoing: Outgoing) -> Reply:
        self._take_news()
        contribution = outgoing.contribution
        if contribution.first is not None:
            self._work = read_json(contribution.first.work or "{}")
            self.progress.total_steps = self.settings.steps or contribution.first.run_steps or None
        if contribution.training.hyperparameters is not self._hyperparameters:
            self._change(contribution.training.hyperparameters)
        judgement = self._step(outgoing)
        if judgement.action in ("reject", "halt"):
            return self._rejected(judgement)
        self._num_rejected = 0
        self.row, now = self.row.plus(contribution.counts), time.perf_counter()
        is_first = self.row.steps == 1
        self.stepped_at = now if is_first else self.stepped_at[0], now
        self.first_samples = self.row.samples or 0 if is_first else self.first_samples
        if not math.isnan(contribution.training.loss):
            self.loss = contribution.training.loss
        if judgement.action == "skip":
            self._restore()
            reason = f"{judgement.problem} ({judgement.limit}): counted as a contribution, nothing folded"
            return self._reply(Outcome.REJECTED, reason)
        reply = self._reply(Outcome.APPLIED)
        self._keep()
        return reply

    def _reply(self, outcome: Outcome, reason: str = "") -> Reply:
        total, (seq, steps, *_) = self.progress.total_steps, self.row
        is_over = bool(self.ended_by) or (total is not None and steps >= total)
        work = NextWork(0 if is_over else 1, steps, run_steps=total, is_asked=True)
        reply = Reply(Result(outcome, seq, seq, reason=reason), work, WeightsInfo(0))
        self.progress.replied(reply)
        if outcome is Outcome.REJECTED:
            log.warning("rejected", rank=0, seq=self.progress.next_number, reason=shown(reason, 2_000))
        return reply

    def moved(self) -> None:
        """The model has moved: the optimizer's state follows it."""
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.to(parameter.device)

    def finish(self) -> Final | None:
        self._take_news()
        self._restore()
        return Final(version=self.progress.version, is_asked=True)

    def pull_exact(self, model: ModelTensors) -> int:
        return self.progress.version

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        names, found = self._model.names, {}
        for parameter, state in self._optimizer.state.items():
            if id(parameter) in names:
                tensors = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
                found[names[id(parameter)]] = tensors
        return found

    def pull_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        return self._tables[table].rows(ids)

    def leave(self, goodbye: Goodbye) -> None:
        self.metrics = dict(goodbye.final_metrics)

    def drop(self) -> None: ...

    # ---- a step -------------------------------------------------------------------------------

    def _step(self, outgoing: Outgoing) -> Judgement:
        """Take the optimizer's step along a contribution's gradients, if its judgement is to take it.

        The script's gradients stay as they are.
        """
        training, limits = outgoing.contribution.training, self._config.store
        parameters = self._model.tensors[: self._model.num_trained]
        found = self._model.sources(ContributionKind.GRADIENT, range(len(parameters)))
        pairs = zip(parameters, found, strict=True)
        gradients = {parameter: _like(parameter, item.detach()) for parameter, item in pairs if item is not None}
        rows = [item.gradients for item in outgoing.rows]
        where = self._first_unsound([gradients.get(parameter) for parameter in parameters])
        is_finite = not where and _are_finite(rows)
        norm = float(_norm([*gradients.values()])) if is_finite and limits.max_norm is not None else 0.0
        action, problem, limit = decide(limits, is_finite, norm)
        problem += f" in '{where}'" if where else ""
        if action != "take" and action != "clip":
            return Judgement(action, problem, limit)
        bounds = [training.clip_norm, limits.clip_norm or 0.0]
        if action == "clip":
            bounds.append(limits.max_norm or 0.0)
            gradients = {parameter: torch.nan_to_num(item, 0.0, 0.0, 0.0) for parameter, item in gradients.items()}
            rows = [torch.nan_to_num(item, 0.0, 0.0, 0.0) for item in rows]
            for buffer, saved in zip(
                self._model.tensors[self._model.num_trained : self._model.num_exchanged], self._after, strict=True
            ):
                buffer.data.copy_(torch.where(torch.isfinite(buffer), buffer, saved))
        if bound := min((item for item in bounds if item), default=0.0):
            gradients = {parameter: item.clone() for parameter, item in gradients.items()}
            rows = [item.clone() for item in rows]
            clip([*gradients.values(), *rows], bound)
        before = [parameter.grad for parameter in parameters]
        for adam in self._optimizer.onebit:
            adam.taken = self.progress.version
        with_state = {parameter for parameter in gradients if self._optimizer.state.get(parameter)}
        try:
            # A fused step of torch cannot mix parameters with state and parameters without.
            for stepped in filter(None, (with_state, gradients.keys() - with_state)):
                for parameter in parameters:
                    parameter.grad = gradients[parameter] if parameter in stepped else None
                self._optimizer.step()
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        for item, taken in zip(outgoing.rows, rows, strict=True):
            if where := self._tables[item.table].step(item.ids, taken):
                raise self._overflowed(where)
        if where := self._first_unsound(parameters):
            wrong = next(tensor.detach() for tensor in parameters if self._model.names[id(tensor)] == where)
            raise self._overflowed(f"{wrong[~torch.isfinite(wrong)][0].item()} in '{where}'")
        return SOUND

    def _change(self, hyperparameters: tuple[dict[str, Any], ...]) -> None:
        """Step with these from now on. Raises UsageError for one that the optimizer cannot have."""
        self._spec.check_changes(hyperparameters)
        groups = self._optimizer.param_groups
        for group, changed in zip(groups, hyperparameters, strict=False):
            apply_hyperparameters(group, changed)
        for table, changed in zip(self._tables, hyperparameters[len(groups) :], strict=False):
            table.set_lr(changed.get("lr"))
        self._hyperparameters = hyperparameters

    def _overflowed(self, where: str) -> ParamServerError:
        """The error of a step along finite values that left NaN or Inf in the weights."""
        self.has_overflowed = True
        numbers = {key: float(value) for key, value in self._optimizer.param_groups[0].items() if key in ("lr", "eps")}
        return overflowed(self.progress.version + 1, where, [(0, 0, self.progress.next_number)], numbers)

    def _first_unsound(self, parameters: Sequence[torch.Tensor | None]) -> str:
        """The name of the first of these tensors of parameters, and of the buffers, with NaN or Inf; empty: none."""
        others = self._model.tensors[len(parameters) :]
        found = [
            (entry.spec.name, item.detach())
            for entry, item in zip(self._model.layout.entries, [*parameters, *others], strict=True)
            if item is not None and item.is_floating_point() and entry.spec.kind is not Kind.FROZEN
        ]
        if bool(torch.isfinite(_norm([item for _, item in found]))):
            return ""
        return next((name for name, item in found if not _are_finite([item])), "")

    def _rejected(self, judgement: Judgement) -> Reply:
        """A contribution is not taken: the model gets the run's weights again."""
        number, version, limit = self.progress.next_number, self.progress.version, self._config.store.max_nonfinite
        self._restore()
        if judgement.action == "halt":
            raise halted(0, number, version, judgement)
        self._num_rejected += 1
        if self._num_rejected >= limit:
            raise rejected_too_often(0, self._num_rejected, limit, version, judgement)
        return self._reply(Outcome.REJECTED, f"{judgement.problem}: nothing folded")

    def _keep(self) -> None:
        """Remember what `_restore` puts back: buffers, and the weights too when the run is over."""
        first = 0 if self.progress.is_done else self._model.num_trained
        self._after = [tensor.detach().clone() for tensor in self._model.tensors[first : self._model.num_exchanged]]

    def _restore(self) -> None:
        """Put the run's tensors into the model, as a server sends them."""
        if self._after:
            last = self._model.num_exchanged
            first = last - len(self._after)
            for tensor, saved in zip(self._model.tensors[first:last], self._after, strict=True):
                tensor.data.copy_(saved)

    # ---- evaluations, and what is shown ---------------------------------------------------------

    def _take_news(self) -> None:
        """Record the newest evaluations, of the model as it is, and a script's request to stop."""
        for found in self.measured:
            if not found["failure"]:
                self.evaluated(found["metrics"])
        self.measured.clear()
        if self.stop_reason and not self.ended_by:
            self.ended_by = f"stopped: {one_line(self.stop_reason)}"

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Record an evaluation after the newest step, and save the weights if it is the best so far."""
        step, version, output = self.row.steps, self.progress.version, self._config.output
        if self.curve.points and self.curve.points[-1].step == step:
            return
        elapsed_s = round(time.perf_counter() - self.started_at, 3)
        is_best = self.curve.add(Point(step=step, version=version, elapsed_s=elapsed_s, metrics=dict(metrics)))
        if len(self.curve.points) == 1 and (unclear := self.curve.unclear())[0]:
            if self.curve.patience is not None or self.curve.best_of is not None:
                raise UsageError(f"run.patience and run.best need a best evaluation; {unclear[0]}", fix=unclear[1])
            log.info("no_best", reason=unclear[0], fix=unclear[1])
        log.info("evaluated", step=step, best=is_best, **metric_fields(self.curve.points[-1].metrics))
        if output.curve is not None:
            write_curve(output.curve, self.curve.points)
        if is_best and output.best is not None:
            write_best(output.best, named_tensors(self._model.module), {"mode": _MODE, "version": str(version)})
        if (why := self.curve.why_enough) and not self.ended_by:
            self.ended_by = f"stopped: {why}"
            log.info("run_stopped", reason=why, step=step)

    def status(self) -> Status:
        """The run as a server would show it."""
        elapsed_s, samples, steps = time.perf_counter() - self.started_at, self.row.samples, self.row.steps
        taken = self.measure()
        recorded = {name.removeprefix(RECORDED): value for name, value in taken.items() if name.startswith(RECORDED)}
        worker = WorkerStatus(
            rank=0,
            state="computing",
            step=steps,
            loss=self.loss if math.isfinite(self.loss) else None,
            samples=samples,
            samples_per_s=None if samples is None else round(samples / elapsed_s, 1) if elapsed_s else 0.0,
            compute_s=elapsed_s,
            recorded=recorded,
            **{name: value for name, value in taken.items() if not name.startswith(RECORDED)},
        )
        return Status(
            mode=_MODE,
            version=self.progress.version,
            elapsed_s=round(elapsed_s, 2),
            step=steps,
            steps=self.progress.total_steps or 0,
            num_workers=1,
            workers=[worker],
            recorded=recorded,
        )

    # ---- the record, and the files --------------------------------------------------------------

    @contextmanager
    def recorded(self, metrics: Mapping[str, float]) -> Iterator[None]:
        """Train inside: keep the run's record up to date, and save weights and summary at the end, or if it fails.

        A server does the same. `metrics`: those of the final weights, once they are known.
        """
        stop = threading.Event()
        thread = threading.Thread(target=self._record_until, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        except (UserCodeError, ParamServerError) as error:
            if step := self.row.steps:
                self.ended_by = f"failed at step {step}: {ending_of(error).failure}"
                try:
                    self._write()
                except OutputError as unsaved:
                    log.error("not_saved", reason=unsaved.message)
            raise
        else:
            self.metrics = metrics
            self._write()
        finally:
            stop.set()
            thread.join()

    def _record_until(self, stop: threading.Event) -> None:
        """Emit `status` events if the log is JSON, and write the record, until `stop` is set.

        Runs in a thread, because a write may wait for a disk. A counter that this thread reads may be one step old. A
        record without a summary means that the run crashed.
        """
        config = self._config
        record = Record(config, run=secrets.token_hex(6), mode=_MODE) if config.output.store else None
        num_points, is_last = 0, False
        while not is_last:
            is_last = stop.wait(config.server.status_interval_s)
            status = self.status()
            if config.log.format == "json" and not is_last:
                log.info("status", **status.fields())
            if record is None:
                continue
            points, best = self.curve.points[num_points:], self.curve.best
            num_points += len(points)
            record.model = self.fingerprint
            record.ran = what_ran(config, _MODE, {}, self._described, self._work)
            evaluations = [EvaluatedPoint(**point.model_dump(), is_best=point is best) for point in points]
            tick = Tick(at=time.time(), status=status, evaluations=evaluations, is_over=is_last)
            if is_last and self.summary is not None:
                record.end(tick, self.summary, self.ended_by)
            else:
                record.add(tick)
                record.flush()

    def _write(self) -> None:
        """Save weights and summary where the configuration says, and show or log the summary.

        Signals wait until it returns.
        """
        config, version = self._config, self.progress.version
        with uninterrupted:
            if self.metrics and self.curve.points:
                self.evaluated(self.metrics)
            (seq, steps, samples, *_), (first, last) = self.row, self.stepped_at
            # from the first weights to the last training step, as a server measures it
            wall_s = round(max(0.0, last - self.started_at), 3)
            worker = WorkerStatus(rank=0, training_steps=steps, contributions=seq, samples=samples, compute_s=wall_s)
            self.summary = summary = Summary(
                mode=_MODE, version=version, wall_s=wall_s, ended_by=self.ended_by, final=dict(self.metrics),
                workers=[worker], curve=self.curve.points, best=self.curve.best,
                step_s=(last - first) / max(1, steps - 1), steady_s=round(last - first, 6),
                steady_samples=0 if samples is None else samples - self.first_samples, steady_steps=max(0, steps - 1),
                cost=Cost.of(config.cost, wall_s, 0.0),
            )  # fmt: skip
            tensors = {}
            if config.output.save is not None and self.has_overflowed:
                log.error("not_saved", reason="earlier work on the weights failed, so they are not a valid version")
            elif config.output.save is not None:
                named = named_tensors(self._model.module).items()
                tensors = {name: tensor.detach().cpu().clone() for name, tensor in named}
            write_results(config, summary, tensors, {"mode": _MODE, "version": str(version)})


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The joint 2-norm, without a wait for a GPU for each tensor."""
    norms = [torch.linalg.vector_norm(item.double() if item.dtype == torch.float16 else item) for item in tensors]
    return torch.nn.utils.get_total_norm([norm.float() for norm in norms])


def _like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the memory layout of its parameter: torch's fused steps read both in the order of memory."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no element is NaN or Inf."""
    return all(bool(torch.isfinite(item).all()) for item in tensors)


class AloneSession(Session):
    """A session whose conversation is with a run in this process."""

    _mode = _MODE

    def _open(self, may_overlap: bool) -> Strategy:
        self._exchange = self.alone = Alone(self._config)
        self.alone.measure = self.readings.taken
        return BlockingStrategy(self.alone)
