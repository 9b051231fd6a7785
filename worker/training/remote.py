"""A session that trains with a server."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from ...common.combinations import WITHIN_WORKER, Choices, check
from ...common.config.schema import Config, SlowdownConfig
from ...common.errors import UnreachableError, UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.optimizers import TableSpec, check_is_plain, describe_optimizers
from ...common.tensors.statistics import batch_norms
from ..conversation.exchange import Exchange
from ..conversation.messages import Final, Goodbye, Settings
from ..conversation.security import worker_credentials
from ..ownership import at_exit, unmark
from ..session import Length, Progress
from ..strategies.base import Exchanger, Strategy, divided_tensor
from ..strategies.choice import make_strategy
from ..tensors.transfer import ModelTensors, together
from .ending import Ending, ending_of, ending_of_process, one_line
from .evaluation import Evaluation
from .optimizer import ExchangeOptimizer
from .pipeline import Example, LossFn, Pipeline, check_weights, layers_of
from .position.data import DataPosition
from .position.memory import Memory
from .position.restarted import Restarted
from .position.steps import Steps
from .readings import number_of
from .rows import Pull
from .session import Offer, Session
from .slowdown import Slowdown

log = get_logger()

_NUM_NAMED = 4
_BATCH_NORM = (
    "BatchNorm uses the statistics of each process' own batch, so the run differs from one process with the union "
    "batch; GroupNorm and LayerNorm do not differ; torch.nn.SyncBatchNorm helps only in a replica group (--group)"
)


class Conversation(Exchanger, Protocol):
    """What a session needs of the run beside its strategy: `Exchange` with a server, `Alone` in this process."""

    def pull_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table, [n, dim], for distinct and ascending ids."""

    def pull_averaged(self, model: ModelTensors) -> None:
        """Write the run's Polyak average into the model."""


class RemoteSession(Session):
    """A worker's session with a run."""

    def __init__(self, config: Config, overlap: bool = False) -> None:
        super().__init__(config)
        may_overlap = config.worker.overlap if config.worker.overlap is not None else overlap
        self._config = config
        self._exchange: Conversation | None = None  # in a replica group only group rank 0 has it
        self._steps: Steps | None = None
        self._restarted = Restarted(accepts=config.worker.accept_restarted_schedule)
        check(choices_of(config))
        if config.worker.group:
            # One of the group's processes. Gradients leave the worker when they are the mean of all processes.
            from ..replica_group.strategy import Grouped, chosen_device, join  # loads torch.distributed

            if self._config.worker.zero == WITHIN_WORKER:
                from torch.distributed import fsdp  # noqa: F401  (takes seconds, and must be loaded before a server waits)
            if self._worker.pipeline:
                from ..replica_group.pipeline import load

                load(self._worker.schedule, torch.device(chosen_device(self._worker)))
            group = join(self._config)
            self._inner = self._data_share = group.rank, group.size
            self._strategy: Strategy = Grouped(group, partial(self._connect, may_overlap=False), self._config)
        else:
            self._strategy = self._open(may_overlap)
        self._final: Final | None = None
        self._is_closed = self._was_before = False
        self.settings = self._strategy.settings
        self._choices = choices_of(config, self.settings)
        self.length = Length(self.settings.epochs)
        self.evaluation = Evaluation(self.settings.eval_every, self.settings.ends_by_metrics)
        at_exit(lambda: self._close(ending_of_process()))  # for scripts that end without `close`

    def _open(self, may_overlap: bool) -> Strategy:
        """Open the conversation, and return a strategy for it."""
        return self._connect(may_overlap)[1]

    def _connect(self, may_overlap: bool) -> tuple[Exchange, Strategy]:
        config, size = self._config, self._inner[1]
        worker = config.worker
        if worker.group:  # The replica group itself handles stage 3, so the server must not see it.
            changes = {"device": f"{worker.device} x {size}"} if size > 1 else {}
            worker = worker.model_copy(update={**changes, "zero": worker.zero % WITHIN_WORKER})
        self._exchange = exchange = Exchange(worker, worker.rank, config.output.history, worker_credentials(config))
        check(choices_of(config, exchange.settings))
        exchange.trace(config.output.traces)
        exchange.measures(self.readings.taken)
        return exchange, make_strategy(exchange, may_overlap)

    @property
    def rank(self) -> int:
        return self._progress.rank or 0

    @property
    def num_workers(self) -> int:
        return max(1, self._progress.num_workers)

    @property
    def step(self) -> int:
        self._restarted.knows_step = True
        return self._position if self._steps is None else self._steps.step

    @property
    def resumed(self) -> bool:
        return self._was_before

    @property
    def is_done(self) -> bool:
        return self._final is not None or self._progress.is_done

    @property
    def _progress(self) -> Progress:
        """The progress as the training thread sees it. Another thread may use the exchange's own at the moment."""
        return self._strategy.progress

    def divided(self, model: nn.Module, loss: LossFn, example: Example, init: str | None) -> nn.Module:
        return self._strategy.divided(super().divided(model, loss, example, init))

    def _make_pipeline(
        self, layers: nn.Module | Sequence[nn.Module], loss: LossFn, example: Example | None, init: str | None
    ) -> Pipeline:
        from ..replica_group.strategy import Grouped

        if not isinstance(self._strategy, Grouped):
            return super()._make_pipeline(layers, loss, example, init)
        self._chooses(pipeline=True)
        self._data_share = (0, 1)
        module, found = layers_of(layers)
        check_weights(module, init)
        return self._strategy.pipeline(module, found, loss, example, init)

    def _begin(self, offer: Offer) -> tuple[ExchangeOptimizer, ...]:
        model, optimizers, averaged_buffers, reduction = offer
        self._check_first(reduction)
        self._chooses(sharded=divided_tensor(model) or "")
        if self._worker.pipeline and not isinstance(model, Pipeline):
            message = "worker.pipeline is set, and the model of this script is whole in each process"
            raise UsageError(message, fix="model = session.pipeline(layers, loss_fn) before the optimizer is made")
        if not self._strategy.kind.worker_steps:
            for part in optimizers:
                check_is_plain(part, self.settings.mode)
        self._strategy.wraps(model)
        if self._strategy.kind.steps_along_mean_gradient:
            for name, module in model.named_modules():
                if getattr(module, "max_norm", None) is not None:  # forward() changes weights, which the server owns
                    raise UsageError(
                        f"embedding '{name}' has a max_norm, so each lookup changes its rows: the server, which owns "
                        "the weights, would not see these changes",
                        fix="leave max_norm out (weight decay also bounds rows), or use --mode localsgd, which sends "
                        "weights",
                    )
        stepped = [param for part in optimizers for group in part.param_groups for param in group["params"]]
        tensors = self._strategy.tensors(model, stepped, averaged_buffers)
        described = replace(
            describe_optimizers(optimizers, tensors.names),
            tables=tuple(table.spec for table in self._tables),
            reduction=reduction,
        )
        self._chooses(optimizers=described.each)
        self._strategy.start(tensors, described, is_parted=len(optimizers) > 1)
        slows = self._config.slowdown != SlowdownConfig()
        slowdown = Slowdown(self._config.slowdown, self.rank, self.settings.seed) if slows else None
        self._was_before = self._progress.row.steps > 0
        self._data = data = DataPosition(self._progress, optimizers, self.length)
        data.accepts_other_data = self._config.worker.accept_other_data
        self._strategy.num_samples_now = data.num_samples_now
        self._memory = Memory(self._strategy, data, optimizers)
        self._restarted.optimizers = optimizers
        steps_alone = self._strategy.kind.worker_steps and not self._strategy.kind.has_peers
        if self._was_before and steps_alone and isinstance(model, Pipeline) and not self._inner[0]:
            meaning = "each stage has its weights from the server; moments begin anew, as workers of this mode step"
            log.warning("optimizer_state_anew", step=self._position, meaning=meaning)
        others = (self._tables, self.evaluation, self._restarted, self._scaling)
        self._steps = Steps(self._strategy, slowdown, data, self._memory, *others)
        if self._exchange is not None:  # of several processes of a worker the first
            self._steps.readings = self.readings
            self._steps.work = lambda: self.work.text(self._inner[1])
        self._model = model
        self.evaluation.run = lambda: self._evaluate(model)
        for table in self._tables:
            table.follow(optimizers[0])
        if not (self._inner[0] or self._was_before):  # once per run, not in each process
            self._steps.notice = self._notice_batch_norm
        found = tuple(ExchangeOptimizer(optimizer, self._steps) for optimizer in optimizers)
        self._strategy.ready(optimizers[0], found[0].step_inner)
        self._strategy.began()
        return found

    def _notice_batch_norm(self) -> bool:
        """Warn that normalisation layers see only a part of the union batch.

        False: the number of parts is not known yet.
        """
        progress, group_size = self._progress, self._data_share[1]
        num = progress.num_workers if self.settings.union_batch else 1
        if num * group_size == 1:
            return not self.settings.union_batch
        if progress.worker_index:
            return True
        # Within a replica group SyncBatchNorm sees all samples, but between workers only one worker's.
        is_own = group_size == 1 and torch.distributed.is_available() and torch.distributed.is_initialized()
        if names := batch_norms(self._model, with_synchronized=num > 1 and not is_own):
            rest = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            log.warning("batch_norm", layers=", ".join(names[:_NUM_NAMED]) + rest, meaning=_BATCH_NORM)
        return True

    def _make_rows(self, spec: TableSpec) -> Pull:
        if self._steps is not None:
            raise UsageError("session.rows() after session.optimizer()", fix="call session.rows() first")
        number = len(self._tables)

        def pull(ids: torch.Tensor) -> torch.Tensor:
            if self._steps is None:
                raise UsageError("rows before session.optimizer()", fix="call session.optimizer(model, ...) first")
            assert self._exchange is not None
            return self._exchange.pull_rows(number, ids)

        return pull

    def _evaluate(self, model: nn.Module) -> None:
        version = self._strategy.settle()
        if self.is_done or not self._strategy.evaluates:
            return
        try:
            version = self._strategy.show_exact(version)
            self._strategy.measured(version, self.evaluation.metrics(model))
        except Exception as error:  # the server must learn the reason before this process ends
            _, failure, exit_code = ending_of(error)
            self._strategy.measured(version, {}, failure, exit_code)
            self._is_closed = True
            self._strategy.leave(Goodbye(self.metrics, finished=True), is_interrupted=False)
            raise

    def state(self, *, rng: bool = False, **objects: Any) -> None:
        inner = {name: item.inner if isinstance(item, ExchangeOptimizer) else item for name, item in objects.items()}
        super().state(rng=rng, **inner)
        self._restarted.has_state = True

    def epochs(self, num: int) -> Iterator[int]:
        self._restarted.has_epochs = True
        return super().epochs(num)

    def is_over(self) -> bool:
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
            self._final = self._strategy.finish(can_evaluate=True)
            unmark()  # this process trains no more
            if changes and self._final is not None:
                self._evaluate_last(self._final)
                self._strategy.keep(changes)
        return self._final

    def record(self, *, loss: float | None = None, num_samples: int = 0, **metrics: float) -> None:
        self._owner.check()
        if self._steps is None:
            raise UsageError("session.record() before session.optimizer()", fix="call session.optimizer() first")
        if not hasattr(num_samples, "__index__") or (num_samples := operator.index(num_samples)) < 0:
            raise UsageError(f"session.record(num_samples={num_samples!r}): a whole number of at least 0 is expected")
        loss = None if loss is None else number_of(loss, "session.record(loss=...)")
        self._steps.record(num_samples, loss)
        super().record(loss=loss, num_samples=num_samples, **metrics)

    def skip(self) -> None:
        super().skip()
        if self._memory is not None:
            self._memory.skipped()

    def stop(self, reason: str) -> None:
        self._owner.check()
        self._strategy.stop(one_line(reason))

    def finish(self) -> bool:
        self._owner.check()
        if self._progress.is_replaying and self._memory is not None:
            self._memory.replayed()
        if self._steps is None:
            if sys.exc_info()[0] is not None:  # in a `finally`: the error on its way says more
                return False
            raise UsageError("session.finish() before session.optimizer()", fix="call session.optimizer() first")
        if not self.is_done:
            self._say_early()
        final = self._wait_for_final()
        if final is None:
            message = f"the server was lost and went back to step {self._progress.row.steps} after this loop had ended"
            raise UnreachableError(message, fix="start the script again: it resumes at that step (ps-launch does)")
        self._evaluate_last(final)
        self._has_finished = True
        return final.evaluate

    def _evaluate_last(self, final: Final) -> None:
        if final.evaluate and self.evaluation.is_final_too and self.evaluation.every is not None and not self.metrics:
            self.report(**self.evaluation.metrics(self._model))

    def averaged(self, *models: nn.Module) -> bool:
        self._owner.check()
        if not self.settings.polyak or self._exchange is None or not self._strategy.takes_whole:
            return False
        whole = together(dict(zip(self._names, models, strict=True))) if self._names else models[0]
        self._exchange.pull_averaged(ModelTensors(whole))
        return True

    @property
    def is_open(self) -> bool:
        return not self._is_closed and self._owner.is_here

    def close(self) -> None:
        self._close(Ending())

    def _close(self, ending: Ending) -> None:
        if not self.is_open:
            return
        self._is_closed = True
        unmark()
        is_through = self._final is not None
        if ending.failure and not is_through:
            self._strategy.drop()  # like a killed process: another one may take its rank
            return
        finished = self._steps is not None and not is_through and not ending.is_interrupted
        if finished and self._steps is not None:
            self._steps.finish()
        goodbye = Goodbye(self.metrics, finished, ending.failure, ending.exit_code)
        self._strategy.leave(goodbye, ending.is_interrupted)

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
    return replace(
        mine,
        mode=settings.mode,
        kind=settings.kind,
        has_rounds=settings.union_batch,
        polyak=settings.polyak,
        delayed_update=settings.delayed_update,
        fragments=settings.fragments,
        staleness=settings.outstanding,
        is_region=settings.in_region,
        precision=settings.train.precision,
    )
