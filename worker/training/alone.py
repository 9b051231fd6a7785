"""A session without a server. It writes the same events, summary and files as a server."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.combinations import Choices
from ...common.config.schema import Config
from ...common.errors import OutputError, ParamServerError, UsageError
from ...common.kinds import ContributionKind
from ...common.reporting.curve import Curve, Point, metric_fields
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_best, write_curve, write_results
from ...common.reporting.status import RECORDED, Status, WorkerStatus
from ...common.reporting.summary import Cost, Summary
from ...common.reporting.view import EvaluatedPoint, Tick
from ...common.runstore.ran import Ran, label_of, optimizer_settings, settings_of
from ...common.runstore.record import Record
from ...common.tensors.clipping import check_max_norm, clip
from ...common.tensors.optimizers import TableSpec, describe_optimizers, load_compiler
from ...common.tensors.statistics import statistics_of
from ...common.tensors.tables import Table
from ...common.user_code import UserCodeError
from ..conversation.interrupts import uninterrupted
from ..conversation.messages import Settings
from ..session import Length
from ..tensors.transfer import ModelTensors, named_tensors
from .ending import ending_of, one_line
from .evaluation import Evaluation
from .position.data import DataPosition
from .position.steps import after_the_end
from .rows import Pull, refuse_scaler
from .session import Offer, Session

log = get_logger()


class AloneSession(Session):
    """A session without a server: the given optimizer takes the steps, and the data is not divided."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = Settings(
            mode="single",
            kind=ContributionKind.WEIGHTS,
            num_workers=1,
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
        self._begins = True  # whether the current step() begins a training step
        self._choices = Choices(mode="sync", kind=ContributionKind.GRADIENT, has_rounds=True)  # the same promises
        self._made: list[Table] = []  # the tables that a server would otherwise keep
        self.num_samples = 0
        self._fresh_samples = 0  # recorded since the last step
        self._lacks_sample_counts = False  # True once a step came without a number of samples
        self._here.total_steps = config.run.steps
        self.length = Length(config.run.epochs)
        self.evaluation = Evaluation(config.run.eval_every, config.run.ends_by_metrics)
        self.curve = Curve(config.run.best, config.run.stop_when, config.run.patience)
        self._output = config.output
        self._model: nn.Module | None = None
        self._described: dict[str, Any] | None = None  # the optimizers
        self._optimizer: torch.optim.Optimizer | None = None  # the first
        self._averaged_buffers: Collection[str] = ()
        self.loss = float("nan")
        self.started_at = time.perf_counter()
        self.stepped_at = (0.0, 0.0)  # when the first and the newest step ended, in seconds of perf_counter
        self.first_samples = 0  # samples of the first step
        self.ended_by = ""  # why the run ended early; empty: it did not
        self.summary: Summary | None = None  # set when the run is over

    @property
    def is_done(self) -> bool:
        total = self._progress.total_steps
        return bool(self.ended_by) or (total is not None and self.step >= total)

    @property
    def known_samples(self) -> int | None:
        """Samples so far; None where neither the script nor `shard` gave the number of samples of a step."""
        return None if self._lacks_sample_counts else self.num_samples

    def stop(self, reason: str) -> None:
        self.ended_by = f"stopped: {one_line(reason)}"

    def _begin(self, offer: Offer) -> tuple[torch.optim.Optimizer, ...]:
        model, optimizers, averaged_buffers, reduction = offer
        self._check_first(reduction)
        # raises UsageError for wrong names, as with a server
        statistics_of(model, named_tensors(model), averaged_buffers)
        self._averaged_buffers = averaged_buffers
        load_compiler(optimizers)
        spec = describe_optimizers(optimizers, ModelTensors(model).names)
        self._described = optimizer_settings(spec.name, [group.hyperparameters for group in spec.groups])
        self.started_at = time.perf_counter()
        self._data = data = DataPosition(lambda: self._progress, optimizers, self.length)
        self._scaling.skipped = lambda _: data.skip_step()
        for optimizer in optimizers:
            self._scaling.guard(optimizer, lambda: refuse_scaler(self._tables))
            optimizer.register_step_pre_hook(lambda part, *_: self._check_step(part))
            optimizer.register_step_post_hook(lambda part, *_: self._stepped(part) if self._begins else None)
            optimizer.clip_grad_norm = partial(self._clip_grad_norm, optimizer)  # type: ignore[attr-defined]
            if self._tables:
                optimizer.zero_grad = self._forgetting(optimizer.zero_grad)  # type: ignore[method-assign]
        self._optimizer = optimizers[0]
        self._follow(optimizers[0])
        self._model = model
        self.evaluation.run = lambda: self._evaluate(model)
        return tuple(optimizers)

    def _make_rows(self, spec: TableSpec) -> Pull:
        self._made.append(table := Table(spec, self.settings.seed))
        return table.rows

    def _check_step(self, part: torch.optim.Optimizer) -> None:
        self._owner.check()
        assert self._data is not None
        self._scaling.num_steps += 1
        self._begins = self._data.begins(part)
        if not self._begins:
            return
        total = self._progress.total_steps
        if total is not None and self.step >= total and not self._data.has_in_hand:
            raise after_the_end(self._progress)
        _ = self._data.next_step_samples  # raises UsageError for other batches than were stated

    def _stepped(self, part: torch.optim.Optimizer) -> None:
        if float(getattr(part, "found_inf", None) or 0):  # a fused optimizer has skipped the step itself
            self._scaling.skipped(part)
            return
        for table, rows in zip(self._made, self._tables, strict=True):
            if (taken := rows.take()) is not None:
                table.set_lr(rows.lr)
                table.step(*taken)
        assert self._data is not None
        self.evaluation.begin(self._progress, self._data)
        drawn = self._data.step()
        self.num_samples += self._fresh_samples or drawn
        self._lacks_sample_counts |= not (drawn or self._fresh_samples or self._data.uses_shard)
        self._fresh_samples = 0
        row = self._progress.row
        self._progress.row = row._replace(steps=row.steps + 1)
        if self._optimizer is not None:
            self.readings.note_step(self._optimizer.param_groups)
        now = time.perf_counter()
        self.stepped_at = now if self.step == 1 else self.stepped_at[0], now
        self.first_samples = self.num_samples if self.step == 1 else self.first_samples
        if self.evaluation.is_due(self._progress, self._data) and not self.is_done:
            self.evaluation.run()

    def finish(self) -> bool:
        if not self.is_done and self._progress.total_steps is not None:
            self._say_early()
        if self.evaluation.comes_last and self._model is not None and not self.metrics:
            self.report(**self.evaluation.metrics(self._model))
            self.measured(self.metrics, named_tensors(self._model))
        return True

    def _evaluate(self, model: nn.Module) -> None:
        self.measured(self.evaluation.metrics(model), named_tensors(model))
        if (why := self.curve.why_enough) and not self.ended_by:
            self.ended_by = f"stopped: {why}"
            log.info("run_stopped", reason=why, step=self.step)

    def measured(self, metrics: dict[str, float], tensors: dict[str, torch.Tensor]) -> None:
        """Record an evaluation of the model after the newest step, and save the weights if it is the best so far."""
        if self.curve.points and self.curve.points[-1].step == self.step:
            return
        step, elapsed_s = self.step, round(time.perf_counter() - self.started_at, 3)
        is_best = self.curve.add(Point(step=step, version=step, elapsed_s=elapsed_s, metrics=metrics))
        if len(self.curve.points) == 1 and (unclear := self.curve.unclear())[0]:
            if self.curve.patience is not None or self.curve.best_of is not None:
                raise UsageError(f"run.patience and run.best need a best evaluation; {unclear[0]}", fix=unclear[1])
            log.info("no_best", reason=unclear[0], fix=unclear[1])
        log.info("evaluated", step=step, best=is_best, **metric_fields(self.curve.points[-1].metrics))
        if self._output.curve is not None:
            write_curve(self._output.curve, self.curve.points)
        if is_best and self._output.best is not None:
            write_best(self._output.best, tensors, {"mode": "single", "version": str(step)})

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model's layout, as a server computes it; empty before there is a model."""
        if self._model is None:
            return ""
        return ModelTensors(self._model, (), self._averaged_buffers).layout.fingerprint

    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's tensors by name."""
        assert self._model is not None
        return named_tensors(self._model)

    def _clip_grad_norm(self, part: torch.optim.Optimizer, max_norm: float) -> None:
        check_max_norm(max_norm)
        gradients = [param.grad for group in part.param_groups for param in group["params"] if param.grad is not None]
        gradients += [tensor for rows in self._tables for tensor in rows.gathered()]
        clip(gradients, max_norm)

    def _forgetting(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        def forget(*args: Any, **options: Any) -> None:
            zero_grad(*args, **options)
            for rows in self._tables:
                rows.drop()

        return forget

    def record(self, *, loss: float | None = None, num_samples: int = 0, **metrics: float) -> None:
        self._fresh_samples += num_samples
        if loss is not None:
            self.loss = loss
        super().record(loss=loss, num_samples=num_samples, **metrics)

    def ran(self, config: Config) -> Ran:
        """What runs, as a server would record it."""
        work = self.work.sections
        return Ran(label_of(work), settings_of(config, "single", {}, self._described, work))

    def status(self) -> Status:
        """The run as a server would show it."""
        elapsed_s, samples = time.perf_counter() - self.started_at, self.known_samples
        taken = self.readings.taken()
        recorded = {name.removeprefix(RECORDED): value for name, value in taken.items() if name.startswith(RECORDED)}
        worker = WorkerStatus(
            rank=0,
            state="computing",
            step=self.step,
            loss=self.loss if math.isfinite(self.loss) else None,
            samples=samples,
            samples_per_s=None if samples is None else round(samples / elapsed_s, 1) if elapsed_s else 0.0,
            compute_s=elapsed_s,
            recorded=recorded,
            **{name: value for name, value in taken.items() if not name.startswith(RECORDED)},
        )
        return Status(
            mode="single",
            version=self.step,
            elapsed_s=round(elapsed_s, 2),
            step=self.step,
            steps=self._progress.total_steps or 0,
            num_workers=1,
            workers=[worker],
            recorded=recorded,
        )


@contextmanager
def reporting(session: AloneSession, config: Config) -> Iterator[None]:
    """While the session trains: emit `status` events if the log is JSON, and keep the run's record up to date."""
    stop = threading.Event()
    thread = threading.Thread(target=_report_until, args=(stop, session, config), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _report_until(stop: threading.Event, session: AloneSession, config: Config) -> None:
    """Write status events and the record until `stop` is set. Runs in a thread, because a write may wait for a disk.

    A counter that this thread reads may be one step old. A record without a summary means that the run crashed.
    """
    record = Record(config, run=secrets.token_hex(6), mode="single") if config.output.store else None
    num_points, is_last = 0, False
    while not is_last:
        is_last = stop.wait(config.server.status_interval_s)
        status = session.status()
        if config.log.format == "json" and not is_last:
            log.info("status", **status.fields())
        if record is None:
            continue
        points, best = session.curve.points[num_points:], session.curve.best
        num_points += len(points)
        record.writer.model, record.writer.ran = session.fingerprint, session.ran(config)
        evaluations = [EvaluatedPoint(**point.model_dump(), is_best=point is best) for point in points]
        tick = Tick(at=time.time(), status=status, evaluations=evaluations, is_over=is_last)
        if is_last and session.summary is not None:
            record.end(tick, session.summary, session.ended_by)
        else:
            record.writer.add(tick)
            record.flush()


@contextmanager
def kept_if_it_fails(session: AloneSession, config: Config) -> Iterator[None]:
    """Save weights and summary, with the reason, if training fails inside. A server does the same."""
    try:
        yield
    except (UserCodeError, ParamServerError) as error:
        if session.step:
            session.ended_by = f"failed at step {session.step}: {ending_of(error).failure}"
            try:
                write_alone(session, config)
            except OutputError as unsaved:
                log.error("not_saved", reason=unsaved.message)
        raise


def write_alone(session: AloneSession, config: Config) -> None:
    """Save weights and summary where the configuration says, and show or log the summary.

    Signals wait until it returns.
    """
    with uninterrupted:
        model_tensors = session.tensors()
        if session.metrics and session.curve.points:
            session.measured(session.metrics, model_tensors)
        steps, samples = session.step, session.known_samples
        first, last = session.stepped_at
        # from the first weights to the last training step, as a server measures it
        wall_s = max(0.0, last - session.started_at)
        worker = WorkerStatus(
            rank=0, training_steps=steps, contributions=steps, samples=samples, compute_s=round(wall_s, 3)
        )
        summary = Summary(
            mode="single", version=session.step, wall_s=round(wall_s, 3),
            ended_by=session.ended_by, final=session.metrics, workers=[worker], curve=session.curve.points,
            best=session.curve.best, step_s=(last - first) / max(1, steps - 1), steady_s=round(last - first, 6),
            steady_samples=session.num_samples - session.first_samples, steady_steps=max(0, steps - 1),
        )  # fmt: skip
        if (rate := config.cost.rate) is not None:
            summary.cost = Cost.of(config.cost.currency, rate, summary.wall_s, 0.0, None)
        session.summary = summary
        tensors = {}
        if config.output.save is not None:
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in model_tensors.items()}
        write_results(config, summary, tensors, {"mode": "single", "version": str(session.step)})
