"""`RunMember`: a process's part in a run, from the join to the end. `session.py` adds what a training loop calls."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import nn

from ...common.combinations import WITHIN_WORKER, Choices, check
from ...common.config.schema import Config
from ...common.errors import UnreachableError, UsageError, shown
from ...common.reporting.log import get_logger
from ...common.reporting.pictures.notebook import Card, Losses, Shown
from ..conversation.channel import worker_credentials
from ..conversation.exchange import Exchange
from ..conversation.messages import Final, Goodbye, Settings
from ..ownership import Owner, at_exit, unmark
from ..session import Length, Progress
from ..strategies.base import Exchanger, Strategy
from ..strategies.choice import make_strategy
from ..tensors.transfer import ModelTensors, together
from .ending import Ending, ending_of, ending_of_process, one_line
from .evaluation import Evaluation, Measure
from .optimizer import Steps
from .readings import Readings, number_of
from .work import Work

log = get_logger()


class Conversation(Exchanger, Protocol):
    """What a session needs of the run beside its strategy: `Exchange` with a server, `Alone` in this process."""

    def pull_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table, [n, dim], for distinct and ascending ids."""


class RunMember:
    """A process that takes part in a run: it joins, evaluates, waits for the end, and leaves."""

    _inner = (0, 1)  # group rank, and the size of the replica group
    _data_share = (0, 1)  # the same of this worker's batches; all processes of a pipeline have whole batches
    _mode = ""  # as it is shown; empty: as the server says
    _model: nn.Module  # set by `optimizer()`

    def __init__(self, config: Config, overlap: bool = False) -> None:
        self._config, self._worker = config, config.worker
        self._owner = Owner()
        self.work = Work(config)  # the record of what this process runs
        self.metrics: dict[str, float] = {}
        self.losses, self.readings = Losses(), Readings()
        self._shown = Shown(self._card)
        self._names: tuple[str, ...] = ()  # names of the parts, if there are several
        self._steps: Steps | None = None  # set by `optimizer()`; an evaluator has none
        self._exchange: Conversation | None = None  # in a replica group only group rank 0 has it
        self._final: Final | None = None
        self._has_finished = False  # the script has called `finish()`
        self._is_closed = False
        self.resumed = False  # this process resumes its rank instead of starting at step 0; set by `optimizer()`
        check(choices_of(config))
        self._strategy = self._open(self._worker.overlap if self._worker.overlap is not None else overlap)
        self.settings = self._strategy.settings
        self._choices = choices_of(config, self.settings)  # what the run and this script chose so far
        self.length = Length(self.settings.epochs)
        self.evaluation = Evaluation(self.settings.eval_every, self.settings.ends_by_metrics)
        at_exit(lambda: self._close(ending_of_process()))  # for scripts that end without `close`

    # ---- joining ------------------------------------------------------------------------------

    def _open(self, may_overlap: bool) -> Strategy:
        """Open the conversation, and return a strategy for it."""
        worker = self._worker
        if not worker.group:
            return self._connect(may_overlap)[1]
        # One of the group's processes. Gradients leave the worker when they are the mean of all processes.
        from ..replica_group.strategy import Grouped, chosen_device, join  # loads torch.distributed

        if worker.zero == WITHIN_WORKER:
            from torch.distributed import fsdp  # noqa: F401  (takes seconds, and must be loaded before a server waits)
        if worker.pipeline:
            from ..replica_group.pipeline import load

            load(worker.schedule, torch.device(chosen_device(worker)))
        group = join(self._config)
        self._inner = self._data_share = group.rank, group.size
        return Grouped(group, partial(self._connect, may_overlap=False), self._config)

    def _connect(self, may_overlap: bool) -> tuple[Exchange, Strategy]:
        config, size = self._config, self._inner[1]
        worker = config.worker
        if worker.group:  # The replica group itself handles stage 3, so the server must not see it.
            changes = {"device": f"{worker.device} x {size}"} if size > 1 else {}
            worker = worker.model_copy(update={**changes, "zero": worker.zero % WITHIN_WORKER})
        self._exchange = exchange = Exchange(worker, worker.rank, config.output.history, worker_credentials(config))
        check(choices_of(config, exchange.settings))
        exchange.trace(config.output.traces)
        exchange.heartbeat.measure = self.readings.taken
        return exchange, make_strategy(exchange, may_overlap)

    @property
    def rank(self) -> int:
        """This worker's rank, 0 to N-1."""
        return self._progress.rank or 0

    @property
    def num_workers(self) -> int:
        """The number of workers that share the data."""
        return max(1, self._progress.num_workers)

    @property
    def group_rank(self) -> int:
        """This process's number in its replica group (worker.group). Group rank 0 talks to the server."""
        return self._inner[0]

    @property
    def is_done(self) -> bool:
        """Whether the run's steps are all taken, the run was stopped, or this worker has finished."""
        return self._final is not None or self._strategy.progress.is_done

    @property
    def _progress(self) -> Progress:
        """The progress as the training thread sees it. Another thread may use the exchange's own at the moment."""
        return self._strategy.progress

    # ---- evaluations, and what is shown -------------------------------------------------------

    def evaluate(self, fn: Measure, every: str | int | None = None) -> None:
        """Evaluate with `fn(model)`, which returns a dict of metrics, during the run and after it.

        `every`: training steps (100), seconds ("30s") or epochs ("1epoch", the default). The run's run.eval_every
        overrides it. One worker evaluates, in `step()`, on the server's weights of one version (in localsgd after the
        next average). The worker that evaluates the final weights calls `fn` in `finish()` and `report`s the metrics.

        Meanwhile the model is in evaluation mode. Afterwards its mode, its buffers and the generators of torch, Python
        and NumPy are restored. An exception in `fn` ends the run as failed. Raises UsageError for an invalid interval.
        """
        self.evaluation.set(fn, every)

    def _evaluate(self) -> None:
        version = self._strategy.settle()
        if self.is_done or (self._strategy.takes_whole and self.group_rank):
            return
        try:
            version = self._strategy.show_exact(version)
            self._strategy.measured(version, self.evaluation.metrics(self._model))
        except Exception as error:  # the server must learn the reason before this process ends
            _, failure, exit_code = ending_of(error)
            self._strategy.measured(version, {}, failure, exit_code)
            self._is_closed = True
            self._strategy.leave(Goodbye(final_metrics=self.metrics, finished=True), is_interrupted=False)
            raise

    def averaged(self, *models: nn.Module) -> bool:
        """Write the run's Polyak average into the model, or into the models of all parts in their order.

        Returns False if the run does not keep an average.
        """
        self._owner.check()
        if not (self.settings.polyak and isinstance(self._exchange, Exchange) and self._strategy.takes_whole):
            return False
        whole = together(dict(zip(self._names, models, strict=True))) if self._names else models[0]
        self._exchange.pull_averaged(ModelTensors(whole))
        return True

    def report(self, **metrics: float) -> None:
        """Add metrics of the final evaluation to the run's summary."""
        self.metrics.update({name: number_of(value, f"session.report({name}=...)") for name, value in metrics.items()})
        self._shown.look_again(is_last=True)

    def config(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Record the script's own hyperparameters, such as `vars(args)`, before the first step.

        The run's record has them as `config.NAME`, beside the script, its arguments and commit, and the optimizer.
        Runs are listed, filtered and compared by them. Of several workers the lowest rank's count.
        """
        if values is not None and not isinstance(values, Mapping):
            message = f"session.config({shown(str(values))}): a dict of names and values is expected"
            raise UsageError(message, fix="session.config(vars(args)), or session.config(width=64)")
        self.work.add_config({**(values or {}), **more})

    def show(self) -> None:
        """Show this worker's progress: a live card in a notebook, elsewhere a line of text.

        Losses are those of `record`.
        """
        self._shown.show()

    def _card(self) -> Card:
        from ...common.reporting.pictures.notebook import of_session

        has_begun = self._steps is not None or self.losses.points
        where = (self.rank, self.num_workers, self._progress.position, self.is_done) if has_begun else None
        return of_session(self._mode or self.settings.mode, where, self.losses.points, self.metrics)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The card as a notebook displays it."""
        return self._card().bundle()

    # ---- the end ------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether the loop needs no more batches. If `is_done`, it waits for all workers and loads the final weights.

        Returns False if the server went back to a snapshot, so that steps have to be taken again.
        """
        self._owner.check()
        while self.is_done:
            if self._wait_for_final() is not None:
                return True
        return False

    def _wait_for_final(self) -> Final | None:
        if self._final is None:
            changes = self._strategy.changes()
            if self._steps is not None:
                self._steps.finish()
            self._final = self._strategy.finish()
            unmark()  # this process trains no more
            if changes and self._final is not None:
                self._evaluate_last(self._final)
                self._strategy.keep(changes)
        return self._final

    def _evaluate_last(self, final: Final) -> None:
        if final.is_asked and self.evaluation.is_final_too and self.evaluation.every is not None and not self.metrics:
            self.report(**self.evaluation.metrics(self._model))

    def finish(self) -> bool:
        """Take no more steps, wait for the other workers and load the final weights. True: this worker evaluates them.

        Before the end of the run this worker leaves, and the others go on without it.
        """
        self._owner.check()
        if self._steps is None:
            if sys.exc_info()[0] is not None:  # in a `finally`: the error on its way says more
                return False
            raise UsageError("session.finish() before session.optimizer()", fix="call session.optimizer() first")
        if self._progress.is_replaying:
            self._steps.data.replayed()
        if not self.is_done:
            self._say_early()
        final = self._wait_for_final()
        if final is None:
            message = f"the server was lost and went back to step {self._progress.row.steps} after this loop had ended"
            raise UnreachableError(message, fix="start the script again: it resumes at that step (ps-launch does)")
        self._evaluate_last(final)
        self._has_finished = True
        return final.is_asked

    def _say_early(self) -> None:
        """Warn if the script's loops have read all their passes before the run has its steps."""
        step, total = self._progress.position, self._progress.total_steps
        if total is None:
            log.routine("finished", step=step)
        elif self._steps is None or not self._steps.data.has_read_all:
            log.info("finished_early", step=step, of=total)
        else:
            reason = f"the script's loops ended after {step} training steps, and the run has {total}"
            fix = (
                f"session.shard(..., epochs=None) goes on until the run ends, epochs=N for N passes; or --steps {step}"
            )
            log.warning("finished_early", step=step, of=total, reason=reason, fix=fix)

    def stop(self, reason: str) -> None:
        """End the run for all workers. The request goes with this worker's next step, or when it finishes or leaves.

        In sync and localsgd the open round is the last one. In other modes each worker's open contribution is its last
        one. `is_done` and `shard` show the end.
        """
        self._owner.check()
        self._strategy.stop(one_line(reason))

    @property
    def is_open(self) -> bool:
        return not self._is_closed and self._owner.is_here

    def close(self) -> None:
        """Leave the run; the other workers go on without this one.

        It is also called at the end of a `with` block and of the script. After an exception or a nonzero exit code the
        worker leaves as failed.
        """
        self._close(Ending())

    def _close(self, ending: Ending) -> None:
        if not self.is_open:
            return
        self._is_closed = True
        unmark()
        is_interrupted, failure, exit_code = ending
        is_through = self._final is not None
        if failure and not is_through:
            self._strategy.drop()  # like a killed process: another one may take its rank
            return
        steps = None if is_through or is_interrupted else self._steps
        if steps is not None:
            steps.finish()
        goodbye = Goodbye(final_metrics=self.metrics, finished=steps is not None, failure=failure, exit_code=exit_code)
        self._strategy.leave(goodbye, is_interrupted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self._close(ending_of(error))


def choices_of(config: Config, settings: Settings | None = None) -> Choices:
    """Return what a worker's configuration chooses, and its run's settings once they are known."""
    worker = config.worker
    mine = Choices(
        mode="",
        kind=None,
        codec=worker.codec,
        reply_codec=worker.reply_codec,
        zero=worker.zero,
        is_grouped=worker.group,
        pipeline=worker.pipeline,
        evaluates=worker.evaluate,
        precision=config.train.precision,
    )
    if settings is None:
        return mine
    names = ("mode", "kind", "polyak", "delayed_update", "fragments", "in_region")
    same = {name: getattr(settings, name) for name in names}
    return replace(
        mine,
        **same,
        has_rounds=settings.union_batch,
        staleness=settings.outstanding,
        precision=settings.train.precision,
    )
