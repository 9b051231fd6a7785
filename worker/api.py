"""A user's own training script, three lines changed.

    session = paramserver.connect("10.0.0.1:50051", rank=0)
    optimizer = session.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in session.shard(dataset, batch_size=32):
        ...; optimizer.zero_grad(); loss.backward(); optimizer.step()

Without a server (no address here, none in PS_SERVER) the same script trains alone.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import structlog
import torch
from torch import nn
from torch.utils.data import Dataset

from ..common.config.cli import report
from ..common.config.schema import Config
from ..common.config.sources import load_config
from ..common.errors import ParamServerError, UnreachableError, UsageError
from ..common.reporting.log import get_logger, setup_logging
from ..common.tensors.optimizers import describe_optimizer
from .conversation.exchange import Exchange
from .conversation.messages import Final, Goodbye, Settings
from .conversation.security import worker_credentials
from .session import Progress
from .strategies.pipelined import make_strategy
from .tensors.transfer import ModelTensors
from .training.batches import Batches, Taken, read_options
from .training.data import Shares
from .training.ending import Ending, ending_of, ending_of_process, one_line, watch_exit
from .training.optimizer import ExchangeOptimizer
from .training.slowdown import Slowdown

log = get_logger()


class Session:
    """A worker's place in a run, or a run of its own (`AloneSession`). What a run of one does is done here."""

    settings: Settings

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self._is_told = False  # that it has no more batches

    @property
    def rank(self) -> int:
        """0..N-1."""
        return 0

    @property
    def num_workers(self) -> int:
        """Workers the data is divided among."""
        return 1

    @property
    def is_done(self) -> bool:
        """All steps of the run are taken, or it was stopped, or this worker has finished."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer to step. Joins the run with this model, whose weights become the run's."""
        raise NotImplementedError

    def shard(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        pad: bool = False,
        drop_last: bool = False,
        **loader_options: Any,
    ) -> Batches:
        """This worker's batches (samples that no other rank sees in the epoch), ending with the run: when all
        workers have taken all their steps and the model has the final weights. Its length is the number of batches
        left; a loop may fetch ahead.

        The batches of all ranks at a step make up what one process with batches of num_workers * batch_size would
        train on, also where the data does not divide; `pad` repeats samples instead, so that all batches are of
        one size. `loader_options` are DataLoader's. UsageError for what cannot be divided.

        Torch's generator is seeded before each batch, from the run's seed, the rank and the batch's place: what is
        drawn for it (dropout, augmentation) is the same in a run that was killed and resumed.
        """
        progress, taken = self._place()
        self._say_length(progress().training_steps)
        shares = Shares(dataset, batch_size or self.settings.batch_size, self.settings.seed, shuffle, pad, drop_last)
        return Batches(shares, taken, progress, self.settings.steps, self._is_over, read_options(loader_options))

    def _place(self) -> tuple[Callable[[], Progress], Taken]:
        """Where this rank is in the run and in its data. UsageError before `optimizer()`."""
        raise NotImplementedError

    def _say_length(self, num_steps: int) -> None:
        """Once, where a loop gets fewer batches than its author may expect."""
        steps = self.settings.steps
        if num_steps >= steps and not self._is_told:
            self._is_told = True
            log.warning("no_batches", reason=f"all {steps} training steps of the run (run.steps) are taken")

    def _is_over(self) -> bool:
        """No batch is needed any more."""
        return self.is_done

    def record(self, *, loss: float | None = None, num_samples: int = 0) -> None:
        """Tell the run the loss of a step, and its samples where `shard` did not count them."""
        raise NotImplementedError

    def finish(self) -> bool:
        """Take no more steps, wait for the others and take the final weights; True when this worker is to evaluate
        them. Before the end of the run this worker is out: nobody waits for it, and the others go on."""
        return True

    def stop(self, reason: str) -> None:
        """End the run for all. Said with this worker's next step, or when it finishes or leaves: in sync and localsgd
        the open round is the last, in other modes everyone's contribution under way. `is_done` and `shard` tell."""
        raise NotImplementedError

    def averaged(self, model: nn.Module) -> bool:
        """Write the run's Polyak average into `model`; False when the run keeps none."""
        return False

    def report(self, **figures: float) -> None:
        """Figures of the final evaluation, for the run's summary."""
        self.figures.update({name: float(value) for name, value in figures.items()})

    def close(self) -> None:
        """Leave the run in good order: the others go on without this worker. Also called at the end of a `with` block
        and of the script; with an exception or an exit code that is not 0 it leaves as a process that has failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self.close()


class RemoteSession(Session):
    """A session with a server."""

    def __init__(self, config: Config, overlap: bool = False) -> None:
        super().__init__()
        may_overlap = config.worker.overlap if config.worker.overlap is not None else overlap
        self._exchange = Exchange(config.worker, config.worker.rank, config.output.history, worker_credentials(config))
        self._config = config
        self._optimizer: ExchangeOptimizer | None = None
        self._strategy = make_strategy(self._exchange, may_overlap and config.worker.codec == "raw")
        self._final: Final | None = None
        self._is_closed = False
        self.settings = self._exchange.settings
        atexit.register(lambda: self._close(ending_of_process()))  # for scripts that just end

    @property
    def rank(self) -> int:
        return self._progress.rank or 0

    @property
    def num_workers(self) -> int:
        return max(1, self._progress.num_workers)

    @property
    def is_done(self) -> bool:
        return self._final is not None or self._progress.is_done

    @property
    def _progress(self) -> Progress:
        """The training thread's; the exchange's own may be another thread's for the moment."""
        return self._strategy.progress

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> ExchangeOptimizer:
        if self._optimizer is not None:
            raise UsageError(
                "a second session.optimizer(): a run has one model and one optimizer",
                fix="put the models into one torch.nn.ModuleDict and their parameters into groups of one optimizer",
            )
        tensors = ModelTensors(model)
        self._strategy.start(tensors, describe_optimizer(optimizer, tensors.names))
        slowdown = Slowdown(self._config.slowdown, self.rank, self.settings.seed)
        self._optimizer = ExchangeOptimizer(optimizer, self._strategy, slowdown)
        return self._optimizer

    def _place(self) -> tuple[Callable[[], Progress], Taken]:
        if self._optimizer is None:
            raise _too_early()
        return lambda: self._progress, self._optimizer.taken

    def _is_over(self) -> bool:
        """All steps are taken, everyone else's too, and the model has the final weights."""
        while self.is_done:
            if self._wait_for_final() is not None:
                return True
        return False

    def _wait_for_final(self) -> Final | None:
        if self._final is None:
            self._final = self._strategy.finish(can_evaluate=True)
        return self._final

    def record(self, *, loss: float | None = None, num_samples: int = 0) -> None:
        if self._optimizer is None:
            raise UsageError("session.record() before session.optimizer()", fix="call session.optimizer() first")
        self._optimizer.record(num_samples, loss)

    def stop(self, reason: str) -> None:
        self._strategy.stop(one_line(reason))

    def finish(self) -> bool:
        if not self.is_done:
            log.info("finished_early", step=self._progress.training_steps, of=self.settings.steps)
        final = self._wait_for_final()
        if final is None:
            raise UnreachableError(
                f"the server was lost and went back to step {self._progress.training_steps}, and this loop had ended",
                fix="start the script again: it goes on from there; or let session.shard() say when the loop ends",
            )
        return final.evaluate

    def averaged(self, model: nn.Module) -> bool:
        if not self.settings.polyak:
            return False
        self._exchange.pull_averaged(ModelTensors(model))
        return True

    def close(self) -> None:
        self._close(Ending())

    def _close(self, ending: Ending) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        is_through = self._final is not None
        if ending.failure and not is_through:
            self._strategy.drop()  # as a process that was killed: another one may take its place
            return
        finished = self._optimizer is not None and not is_through and not ending.is_interrupted
        goodbye = Goodbye(self.figures, finished, ending.failure, ending.exit_code)
        self._strategy.leave(goodbye, ending.is_interrupted)

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self._close(ending_of(error))


class AloneSession(Session):
    """The same session without a server: the given optimizer steps, the data is not divided. `has_length`: somebody has
    said how many steps there are to be."""

    def __init__(self, config: Config, has_length: bool = True) -> None:
        super().__init__()
        self._has_length = has_length
        self.settings = Settings(
            mode="single",
            source="weights",
            num_workers=1,
            steps=config.run.steps,
            batch_size=config.run.batch_size,
            seed=config.run.seed,
            task=config.task.name,
            task_args=config.task.args,
            optimizer=config.optimizer.name,
            optimizer_args=config.optimizer.arguments(),
        )
        self.num_steps = 0
        self.num_samples = 0
        self._progress = Progress()
        self._taken: Taken | None = None
        self.loss = float("nan")
        self.started_at = time.perf_counter()
        self.ended_by = ""  # why it was stopped

    @property
    def is_done(self) -> bool:
        return bool(self.ended_by) or self.num_steps >= self.settings.steps

    def stop(self, reason: str) -> None:
        self.ended_by = f"stopped: {one_line(reason)}"

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.started_at = time.perf_counter()
        if self._taken is None:
            self._taken = Taken(lambda: self._progress, optimizer)
            optimizer.register_step_post_hook(self._stepped)
        return optimizer

    def _place(self) -> tuple[Callable[[], Progress], Taken]:
        if self._taken is None:
            raise _too_early()
        return lambda: self._progress, self._taken

    def _say_length(self, num_steps: int) -> None:
        super()._say_length(num_steps)
        if not self._has_length:
            self._has_length = True
            told = f"session.shard() ends after {self.settings.steps} training steps, the default of run.steps"
            log.warning("length", reason=told, fix="PS_RUN__STEPS=N in the environment sets another")

    def _stepped(self, *_: Any) -> None:
        self.num_steps += 1
        self._progress.training_steps = self.num_steps
        assert self._taken is not None
        self.num_samples += self._taken.step()[1]

    def record(self, *, loss: float | None = None, num_samples: int = 0) -> None:
        self.num_samples += num_samples
        if loss is not None:
            self.loss = loss


def _too_early() -> UsageError:
    fix = "call session.optimizer(model, ...) first: it says where in the data this rank goes on"
    return UsageError("session.shard() before session.optimizer()", fix=fix)


def connect(address: str | None = None, rank: int | None = None) -> Session:
    """Join the run at `address` (or PS_SERVER) as `rank` (or RANK); without an address, train alone.

    Waits for the server up to worker.give_up_s, then raises UnreachableError. Every setting can be
    given as PS_SECTION__KEY in the environment.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _explain
        watch_exit()
    resolved = load_config(None, {"worker.server": address, "worker.rank": rank}, [], os.environ)
    if not structlog.is_configured():
        setup_logging(resolved.config.log, "script")
    if not resolved.was_set("worker.server"):
        return AloneSession(resolved.config, has_length=resolved.was_set("run.steps"))
    return open_session(resolved.config)


def _explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """An error of ours that a script does not catch ends it like our programs: explained, with its exit code."""
    if isinstance(error, KeyboardInterrupt):  # where it came is no news, as a rule it is in the middle of a wait
        print("paramserver: interrupted", file=sys.stderr)
        return
    if not isinstance(error, ParamServerError):
        sys.__excepthook__(kind, error, traceback)
        return
    code = report("paramserver", error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def open_session(config: Config, overlap: bool = False) -> Session:
    """A session for a resolved configuration; `worker.server: none` trains alone too.

    `overlap` is what worker.overlap means where it is not set: true only for a loop that leaves
    gradients as backward left them.
    """
    if config.worker.server == "none":
        return AloneSession(config)
    return RemoteSession(config, overlap)
