"""`Session`: what a training loop calls. Its data, its optimizers, and its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ...common.combinations import check
from ...common.config.schema import Config, SlowdownConfig
from ...common.errors import UsageError, shown
from ...common.reporting.log import get_logger
from ...common.tensors.optimizers import Reduction, check_is_plain, describe_optimizers
from ...common.tensors.statistics import batch_norms, has_batch_norm
from ...common.tensors.tables import make_spec
from ..strategies.base import divided_tensor
from ..tensors.transfer import together
from .batches import Batches, check_count
from .data import Shares
from .member import RunMember
from .optimizer import ExchangeOptimizer, Scaling, Steps, parameters_of
from .pipeline import Example, LossFn, Pipeline, check_weights, layers_of, loss_of, on_meta
from .position.data import DataPosition
from .position.memory import Memory, Restarted, stateful
from .position.sources import source_of
from .readings import number_of
from .rows import Rows
from .slowdown import Slowdown
from .tasks.init import load_weights

log = get_logger()

Part = tuple[nn.Module, Optimizer]
_NUM_NAMED = 4
_BATCH_NORM = (
    "BatchNorm uses the statistics of each process' own batch, so the run differs from one process with the union "
    "batch, and fails on a batch of one sample (drop_last=True); GroupNorm and LayerNorm do not differ; "
    "torch.nn.SyncBatchNorm helps only in a replica group (--group)"
)


def _check_part(model: object, optimizer: object) -> None:
    """Raises UsageError unless these are a model and an optimizer."""
    if not isinstance(model, nn.Module):
        message = f"session.optimizer(model, optimizer): the model is a {type(model).__name__}, not a torch.nn.Module"
        raise UsageError(message, fix="torch.nn.ModuleList([...]) of several; a module that has a tensor as Parameter")
    if not hasattr(optimizer, "param_groups"):
        message = f"session.optimizer(model, optimizer): {shown(str(optimizer))} is not an optimizer"
        raise UsageError(message, fix="give it one optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1)")


class Session(RunMember):
    """A training loop's session with a run, which may also be in this process (`alone.py`)."""

    def __init__(self, config: Config, overlap: bool = False) -> None:
        self._memory: Memory | None = None  # set by `optimizer()`
        self._tables: list[Rows] = []
        self._is_told = False  # whether the warning about no batches was logged
        self._scaling = Scaling()
        self._restarted = Restarted(accepts=config.worker.accept_restarted_schedule)
        super().__init__(config, overlap)

    @property
    def step(self) -> int:
        """Training steps of this rank, over all processes that have had the rank.

        While a loop uses up batches that it had fetched before the run moved, it is the step that those were for.
        """
        self._restarted.knows_step = True
        return self._progress.position if self._steps is None else self._steps.step

    @property
    def epoch(self) -> int:
        """The epoch of this rank's data, from 0: that of the loop over `epochs()`, or of the next batch."""
        return self._joined().data.epoch_now

    @property
    def has_moved(self) -> bool:
        """Whether the server went back, or on without this worker, in a loop that does not use `shard`.

        The loop is then at another step than the run. Loops over `shard` go on at the run's position by themselves.
        """
        data = self._joined().data
        data.apply_start()
        return data.has_moved

    @property
    def run_name(self) -> str:
        """The run's name, which the server chose; empty without a server. Raises UsageError before `optimizer()`."""
        return self._joined().data.progress.run

    @property
    def has_stages(self) -> bool:
        """Whether the task's model is a pipeline (worker.pipeline)."""
        return self._worker.pipeline

    def divided(self, model: nn.Module, loss: LossFn, example: Example, init: str | None) -> nn.Module:
        """Returns the task's model, as a pipeline if worker.pipeline is set.

        `init`: a file with initial weights that are not yet in the model.
        """
        return self._strategy.divided(self._make_pipeline(model, loss, example, init) if self.has_stages else model)

    def pipeline(
        self,
        layers: nn.Module | Sequence[nn.Module],
        loss_fn: Callable[..., torch.Tensor],
        example: tuple[Any, ...] | None = None,
        init: str | None = None,
    ) -> Pipeline:
        """Returns a model whose layers are pipeline stages in this worker's processes (worker.group):

            model = session.pipeline(layers, loss_fn)
            optimizer = session.optimizer(model, torch.optim.AdamW(model.parameters()))
            for inputs, target in session.shard(dataset, batch_size=64):
                optimizer.zero_grad(); loss = model(inputs, target); optimizer.step()

        `model(inputs, target)` computes the loss and gradients of a batch in worker.microbatches microbatches.
        `model(inputs)` returns the outputs. With one process, all layers run in it. Call this before `optimizer()`.

        `layers`: an nn.Sequential, a list, or a model with a method `pipeline()` that returns its layers. Each layer
        takes one tensor and returns one tensor. `loss_fn(output, target)`: the mean loss of its samples. `example`:
        (inputs, target) of a microbatch. If given, the layers are measured and the stages take equal time. Otherwise
        the stages have equal numbers of parameters. `init`: a file with initial weights. The layers may then be on the
        meta device, and each process reads only its own layers. Raises UsageError if the layers cannot be cut.
        """
        if self._memory is not None:
            message = "session.pipeline() was called after session.optimizer(), which already took the model"
            raise UsageError(message, fix="call session.pipeline() first, and create the optimizer with its parameters")
        loss = loss_of(loss_fn)
        return self._make_pipeline(layers, loss, (lambda _: example) if example is not None else None, init)

    def _make_pipeline(
        self, layers: nn.Module | Sequence[nn.Module], loss: LossFn, example: Example | None, init: str | None
    ) -> Pipeline:
        from ..replica_group.strategy import Grouped

        strategy = self._strategy
        if isinstance(strategy, Grouped):
            self._chooses(pipeline=True)
            self._data_share = (0, 1)
        module, found = layers_of(layers)
        check_weights(module, init)
        if isinstance(strategy, Grouped):
            return strategy.pipeline(module, found, loss, example, init)
        if init is not None:
            if on_meta(module):
                module.to_empty(device="cpu" if self._worker.device == "auto" else self._worker.device)
            load_weights(module, init)
        return Pipeline(module, found, loss, self._worker.microbatches or 2)

    def optimizer(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        averaged_buffers: Collection[str] = (),
        reduction: Reduction = "mean",
    ) -> Any:
        """Join the run with this model and return the optimizer to step. The first worker's weights become the run's.

        `averaged_buffers`: names, as in the model's state_dict, of running statistics of your own layers. The run
        averages them over its workers, like those of BatchNorm and InstanceNorm. All other buffers follow the lowest
        live rank. Raises UsageError for a name that is not a buffer.

        `reduction`: how the run combines the gradients of all workers. "mean" weights them by samples and suits a loss
        that is a mean over its batch. "sum" suits a loss that is a sum, such as `cross_entropy(..., reduction="sum")`.
        All workers must use the same value. Raises UsageError for another value, and for "sum" in modes that do not
        sum.

        The returned optimizer has `clip_grad_norm(max_norm)`, which clips the combined gradient. Call it instead of
        `torch.nn.utils.clip_grad_norm_`, which would clip only this worker's gradient.
        """
        _check_part(model, optimizer)
        return self._begin(model, [optimizer], averaged_buffers, reduction)[0]

    def optimizers(
        self, *, averaged_buffers: Collection[str] = (), reduction: Reduction = "mean", **parts: Part
    ) -> tuple[Any, ...]:
        """Join the run with several models or optimizers that step by turns, and return the optimizers to step:

            g_optimizer, d_optimizer = session.optimizers(generator=(g, g_optimizer), critic=(d, d_optimizer))

        All weights become the run's. Their names in saved files and in `averaged_buffers` begin with these names.
        `optimizer` describes `averaged_buffers` and `reduction`.

        A training step is one batch, whichever optimizers step on it. In a loop over `shard` the first step() after a
        batch was requested begins a training step. In other loops each step() of the first optimizer begins one. Each
        parameter belongs to one optimizer.

        Raises UsageError for parts that the run cannot step.
        """
        if not all(isinstance(part, tuple) and len(part) == 2 for part in parts.values()) or not parts:
            raise UsageError("session.optimizers() takes NAME=(model, optimizer) for each part")
        for part in parts.values():
            _check_part(*part)
        optimizers = [optimizer for _, optimizer in parts.values()]
        self._chooses(num_optimizers=len(optimizers))
        self._names = tuple(parts)
        whole = together({name: model for name, (model, _) in parts.items()})
        return self._begin(whole, optimizers, averaged_buffers, reduction)

    def _begin(
        self, model: nn.Module, optimizers: list[Optimizer], averaged_buffers: Collection[str], reduction: Reduction
    ) -> tuple[Any, ...]:
        """Join the run with a model and its optimizers; returns the optimizers to step."""
        self._check_first(reduction)
        self._chooses(sharded=divided_tensor(model) or "")
        if self._worker.pipeline and not isinstance(model, Pipeline):
            message = "worker.pipeline is set, and the model of this script is whole in each process"
            raise UsageError(message, fix="model = session.pipeline(layers, loss_fn) before the optimizer is made")
        strategy, kind = self._strategy, self._strategy.kind
        if not kind.worker_steps:
            for part in optimizers:
                check_is_plain(part, self.settings.mode)
        strategy.wraps(model)
        if kind.steps_along_mean_gradient:
            for name, module in model.named_modules():
                if getattr(module, "max_norm", None) is not None:  # forward() changes weights, which the server owns
                    raise UsageError(
                        f"embedding '{name}' has a max_norm, so each lookup changes its rows: the server, which owns "
                        "the weights, would not see these changes",
                        fix="leave max_norm out (weight decay also bounds rows), or use --mode localsgd, which sends "
                        "weights",
                    )
        tensors = strategy.tensors(model, parameters_of(*optimizers), averaged_buffers)
        tables = tuple(table.spec for table in self._tables)
        described = replace(describe_optimizers(optimizers, tensors.names), tables=tables, reduction=reduction)
        self._chooses(optimizers=described.each)
        strategy.start(tensors, described, is_parted=len(optimizers) > 1)
        self._model, self.resumed = model, self._progress.row.steps > 0
        self._memory = Memory(DataPosition(strategy, optimizers, self.length))
        self._memory.data.accepts_other_data = self._worker.accept_other_data
        strategy.num_samples_now = self._memory.data.num_samples_now
        self._restarted.optimizers = optimizers
        if self.resumed and not kind.steps_along_mean_gradient and isinstance(model, Pipeline) and not self.group_rank:
            meaning = "each stage has its weights from the server; moments begin anew, as workers of this mode step"
            log.warning("optimizer_state_anew", step=self._progress.position, meaning=meaning)
        slows = self._config.slowdown != SlowdownConfig()
        slowdown = Slowdown(self._config.slowdown, self.rank, self.settings.seed) if slows else None
        others = (self._tables, self.evaluation, self._restarted, self._scaling)
        self._steps = steps = Steps(self._memory, slowdown, *others)
        if self._exchange is not None:  # of several processes of a worker the first
            steps.readings = self.readings
            steps.work = lambda: self.work.text(self._inner[1])
        self.evaluation.run = self._evaluate
        for table in self._tables:
            table.follow(optimizers[0])
        if has_batch_norm(model) and not (self.group_rank or self.resumed):  # once per run, not in each process
            steps.notice = self._notice_batch_norm
        found = tuple(ExchangeOptimizer(optimizer, steps) for optimizer in optimizers)
        strategy.ready(optimizers[0], found[0].step_inner)
        strategy.began()
        return found

    def _check_first(self, reduction: Reduction) -> None:
        """Raises UsageError for a second `optimizer()`, and for an unknown `reduction`."""
        self._owner.check()
        if self._memory is not None:
            raise UsageError(
                "a second session.optimizer(): a run gets its model and optimizers once",
                fix="with several optimizers: session.optimizers(generator=(g, g_optimizer), critic=(d, d_optimizer)); "
                "to train in phases, give one optimizer all parameters, then change requires_grad and its groups' lr",
            )
        if reduction not in get_args(Reduction):
            words = " or ".join(map(repr, get_args(Reduction)))
            message = f"session.optimizer(..., reduction={reduction!r}): use {words}"
            raise UsageError(message, fix="'sum' if the loss is a sum over its batch, else 'mean'")

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

    def rows(
        self,
        name: str,
        num_rows: int,
        dim: int,
        *,
        optimizer: str = "adagrad",
        init_std: float = 0.01,
        dtype: torch.dtype = torch.float32,
        **hyperparameters: Any,
    ) -> Rows:
        """Create a table of rows for embeddings, which the server stores.

        `table(ids)` returns rows with a gradient. `step()` sends the gradients of the rows that were used. Call `rows`
        before `optimizer()`, with the same arguments on every worker.

        `optimizer` updates the rows that have a gradient. It is sgd, adagrad or sparse_adam, as torch applies them to
        sparse gradients, or rowwise_adagrad. `hyperparameters` are its arguments, such as lr. Schedules of the model's
        optimizer scale `lr`. Rows begin with mean 0 and standard deviation `init_std`, in float32 or float64. Raises
        UsageError for invalid arguments, and in modes that exchange weights.
        """
        if self._steps is not None:
            raise UsageError("session.rows() after session.optimizer()", fix="call session.rows() first")
        if any(table.spec.name == name for table in self._tables):
            raise UsageError(f"a second table '{name}'", fix="give every table a name of its own")
        self._chooses(has_rows=True)
        spec = make_spec(name, num_rows, dim, str(dtype).removeprefix("torch."), init_std, optimizer, hyperparameters)
        number = len(self._tables)

        def pull(ids: torch.Tensor) -> torch.Tensor:
            if self._steps is None:
                raise UsageError("rows before session.optimizer()", fix="call session.optimizer(model, ...) first")
            assert self._exchange is not None
            return self._exchange.pull_rows(number, ids)

        self._tables.append(Rows(spec, pull))
        return self._tables[-1]

    def _chooses(self, **more: Any) -> None:
        """Note what the script chooses. Raises UsageError for capabilities that exclude each other."""
        self._choices = replace(self._choices, **more)
        check(self._choices)

    def shard(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        accumulate: int = 1,
        prefetch: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        pad: bool = False,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        **loader_options: Any,
    ) -> Batches:
        """Return this worker's batches. No other rank gets these samples in the same pass over the data.

        One loop over the result is one pass, as with a DataLoader. With `epochs=N` one loop has N passes; with None it
        goes on until the run ends. `len()` is the number of batches in a loop; `remaining` is how many are left of it.
        --steps and --epochs only end the run earlier. In a process that takes over a rank, loops that lie behind the
        rank yield nothing.

        `accumulate`: a step uses so many batches, in the order in which they were yielded. The last step of a pass may
        use fewer. It may be set between steps (`batches.accumulate = 4`). `prefetch`: the loop may fetch so many
        batches before it uses them. `step()` raises UsageError if it does not find the batches that this says. Call
        `session.skip()` for a batch that no step uses, and `session.scaler()` for a GradScaler.

        At each step the ranks' batches together equal the batch of one process with num_workers * batch_size samples.
        This also holds if the data does not divide evenly. `pad` repeats samples instead, so that all batches have one
        size. `loader_options` are those of DataLoader. Raises UsageError for data that cannot be divided.

        `sampler` gives the order of the samples of all ranks instead of `shuffle`, for example a WeightedRandomSampler.
        Each rank draws from it with equally seeded generators of torch. If it has `set_epoch`, that is called.

        For a data set without a length (IterableDataset) each rank reads all samples and keeps every num_workers-th
        one. After a resume it reads from the beginning up to the rank's position. The run must have a number of steps.

        If `dataset` is a DataLoader, its data set, batch size, sampler, `drop_last` and other options are used. Its
        batch is the batch of one rank. Raises UsageError for a DataLoader with a batch_sampler or its own iteration.

        Before each batch torch's generator is seeded from the run's seed, the rank and the position. So random numbers
        for the batch (dropout, augmentation) are the same in a run that was killed and resumed.
        """
        memory, settings = self._joined(), self.settings
        progress = memory.data.progress
        steps = progress.total_steps
        if steps is not None and progress.row.steps >= steps and not self._is_told:  # the loop gets no batches
            self._is_told = True
            log.warning("no_batches", reason=f"all {steps} training steps of the run (run.steps) are taken")
        check_count("shard(accumulate=", accumulate, 1)
        check_count("shard(prefetch=", prefetch)
        if epochs is not None and check_count("shard(epochs=", epochs, 1) > 1:
            self.length.own_epochs = max(epochs, self.length.own_epochs or 0)
        given = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "sampler": sampler}
        source, found = source_of(dataset, given | loader_options)
        num = found.pop("batch_size")
        size = check_count("shard(batch_size=", settings.batch_size if num is None else num, 1)
        self.work.add_batch_size(size)
        if size % self._data_share[1]:
            raise UsageError(
                f"a batch of {size} samples cannot be divided among the {self._data_share[1]} processes of this worker",
                fix=f"a batch size that is a multiple of {self._data_share[1]}",
            )
        order = {name: found.pop(name) for name in ("shuffle", "drop_last", "sampler")}
        shares = Shares(source, size // self._data_share[1], settings.seed, pads=pad, **order)
        end = (lambda: self.is_done), self.is_over
        return Batches(shares, memory, end, found, accumulate, prefetch, epochs, self._data_share)

    def skip(self) -> None:
        """Say that no step uses the batch that the script computes now, as in a loop that goes on with `continue`."""
        memory = self._joined()
        memory.data.skip()
        memory.skipped()

    def skip_step(self, optimizer: Optimizer) -> None:
        """Say that a step is not taken: the batches that it would use are used up, and count for nothing."""
        self._scaling.skipped(optimizer)

    def scaler(self, *args: Any, **options: Any) -> torch.amp.GradScaler:
        """Return a torch.amp.GradScaler that tells the session about the steps that it skips.

        It takes the arguments of GradScaler. The batches of a skipped step are used up, and the run does not count it.
        """
        return self.watched(torch.amp.GradScaler(*args, **options))

    def watched(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """Let a trainer's own GradScaler tell the session about the steps that it skips."""
        return self._scaling.watch(scaler)

    def expect(self, steps: int) -> None:
        """Tell the session how many training steps this script takes. If the run is shorter, a warning says so."""
        self.length.own_steps = check_count("expect(", steps)

    def epochs(self, num: int) -> Iterator[int]:
        """Yield epoch numbers up to `num`, from 0, or after a resume from the rank's current epoch.

        A loop over `shard()` inside is the pass of the epoch, also if the script left an earlier one. The loop over
        epochs ends early if the run ends.

        A process that takes over a rank begins at the rank's last step and computes it again without sending it. So the
        script repeats its work between two steps, including its work at the end of an epoch.
        """
        self._restarted.has_epochs = True
        memory = self._joined()
        data, num = memory.data, check_count("epochs(", num)
        self.length.own_epochs = max(num, self.length.own_epochs or 0)
        if data.epoch is None:
            data.use()
            data.start_epochs()
        while not self.is_over():
            if memory.has_moved:
                memory.move()
            if data.epoch_now >= num:
                return
            yield data.epoch_now
            if not memory.has_moved:
                data.next_epoch()

    def state(self, *, rng: bool = False, **objects: Any) -> None:
        """Save these objects with each contribution and in snapshots, and restore them after a resume.

        An object has state_dict() and load_state_dict(), or is a torch.Generator. Each has a name (scheduler=...,
        scaler=..., ema=...). `rng`: also save the generators of torch, Python and NumPy. The hyperparameters of the
        optimizer's groups are saved too.

        Call it after `optimizer()` and before the first batch. If this rank has a saved state, this call restores it,
        and the last step is computed again (see `epochs`). Raises UsageError for a state that is not tensors and JSON,
        or that does not fit.
        """
        inner = {name: item.inner if isinstance(item, ExchangeOptimizer) else item for name, item in objects.items()}
        found = stateful(inner, rng)
        self._joined().add(found)
        self._restarted.has_state = True

    def mark(self) -> None:
        """Tell the session that a batch begins, in a loop that does not use `shard()`: it saves `state()` now.

        Without this call, the session saves the state in `step()`.
        """
        if self._memory is not None:
            self._memory.mark()

    def _joined(self) -> Memory:
        """This rank's position in the data and its script's state. Raises UsageError before `optimizer()`."""
        self._owner.check()
        if self._memory is None:
            message = "session.shard(), epochs() or state() was called before session.optimizer()"
            raise UsageError(message, fix="call session.optimizer(model, ...) first: it gives this rank its position")
        if self._has_finished:
            message = "session.shard(), epochs() or state() after session.finish(), which ends this worker's training"
            raise UsageError(message, fix="call session.finish() once, after all loops")
        return self._memory

    def record(self, *, loss: float | None = None, num_samples: int = 0, **metrics: float) -> None:
        """Record the loss of a step, its number of samples (instead of those of its batches), and your own metrics.

        The newest value of each metric reaches the server with the next heartbeat (a quarter of `server.lease_s`), and
        from there the dashboard, the run store and trackers. UsageError for a value that is no number.
        """
        self._owner.check()
        if self._steps is None:
            raise UsageError("session.record() before session.optimizer()", fix="call session.optimizer() first")
        num_samples = check_count("record(num_samples=", num_samples)
        loss = None if loss is None else number_of(loss, "session.record(loss=...)")
        self._steps.record(num_samples, loss)
        if metrics:
            self.readings.record(metrics)
        if loss is not None:
            self.losses.note(self._strategy.progress.position, loss)
        self._shown.look_again()
