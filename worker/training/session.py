"""`Session`: a training loop's rank, data and end of the run. `remote.py` trains, `alone.py` without a server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ...common.combinations import Choices, check
from ...common.config.schema import Config
from ...common.errors import UsageError, shown
from ...common.reporting.log import get_logger
from ...common.reporting.pictures.notebook import Card, Losses, Shown
from ...common.tensors.optimizers import Reduction, TableSpec
from ...common.tensors.tables import make_spec
from ..conversation.messages import Settings
from ..ownership import Owner
from ..session import Length, Progress
from ..tensors.transfer import together
from .batches import Batches, Stated, check_count, read_options
from .data import Shares
from .evaluation import Evaluation, Measure
from .pipeline import Example, LossFn, Pipeline, check_weights, layers_of, loss_of, on_meta
from .position.data import DataPosition
from .position.loaders import Source, source_of
from .position.memory import Memory, stateful
from .readings import Readings, number_of
from .rows import Pull, Rows
from .scaler import Scaling
from .tasks.init import load_weights
from .work import Work

log = get_logger()

Part = tuple[nn.Module, torch.optim.Optimizer]


class Offer(NamedTuple):
    """A model, its optimizers, and how the run averages buffers and gradients."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    averaged_buffers: Collection[str]
    reduction: Reduction


def _check_part(model: object, optimizer: object) -> None:
    """Raises UsageError unless these are a model and an optimizer."""
    if not isinstance(model, nn.Module):
        message = f"session.optimizer(model, optimizer): the model is a {type(model).__name__}, not a torch.nn.Module"
        raise UsageError(message, fix="torch.nn.ModuleList([...]) of several; a module that has a tensor as Parameter")
    if not hasattr(optimizer, "param_groups"):
        message = f"session.optimizer(model, optimizer): {shown(str(optimizer))} is not an optimizer"
        raise UsageError(message, fix="give it one optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1)")


class Session:
    """What sessions of workers and of evaluators have in common."""

    settings: Settings
    _inner = (0, 1)  # group rank, and the size of the replica group
    _data_share = (0, 1)  # the same of this worker's batches; all processes of a pipeline have whole batches

    def __init__(self, config: Config) -> None:
        self._worker = config.worker
        self._owner = Owner()
        self.work = Work(config)  # the record of what this process runs
        self.metrics: dict[str, float] = {}
        self.length = Length()
        self._choices = Choices(mode="", kind=None)  # what the run and this script chose so far
        self._tables: list[Rows] = []
        self._has_finished = False  # the script has called `finish()`
        self._is_told = False  # whether the warning about no batches was logged
        self.evaluation = Evaluation()
        self._scaling = Scaling()
        self._here = Progress()  # the progress without a server
        self._data: DataPosition | None = None  # set by `optimizer()`
        self._memory: Memory | None = None  # set by `optimizer()`; an evaluator has none
        self._names: tuple[str, ...] = ()  # names of the parts, if there are several
        self.losses = Losses()
        self.readings = Readings()
        self._shown = Shown(self._card)

    @property
    def rank(self) -> int:
        """This worker's rank, 0 to N-1."""
        return 0

    @property
    def num_workers(self) -> int:
        """The number of workers that share the data."""
        return 1

    @property
    def group_rank(self) -> int:
        """This process's number in its replica group (worker.group). Group rank 0 talks to the server."""
        return self._inner[0]

    @property
    def step(self) -> int:
        """Training steps of this rank, over all processes that have had the rank.

        While a loop uses up batches that it had fetched before the run moved, it is the step that those were for.
        """
        return self._position

    @property
    def _position(self) -> int:
        return self._progress.position

    @property
    def _progress(self) -> Progress:
        """This rank's progress in the run."""
        return self._here

    @property
    def epoch(self) -> int:
        """The epoch of this rank's data, from 0: that of the loop over `epochs()`, or of the next batch."""
        return self._joined().epoch_now

    @property
    def has_moved(self) -> bool:
        """Whether the server went back, or on without this worker, in a loop that does not use `shard`.

        The loop is then at another step than the run. Loops over `shard` go on at the run's position by themselves.
        """
        data = self._joined()
        data.apply_start()
        return data.has_moved

    @property
    def resumed(self) -> bool:
        """Whether this process resumes its rank instead of starting at step 0."""
        return False

    @property
    def run_name(self) -> str:
        """The run's name, which the server chose; empty without a server. Raises UsageError before `optimizer()`."""
        return self._joined().progress.run

    @property
    def is_done(self) -> bool:
        """Whether the run's steps are all taken, the run was stopped, or this worker has finished."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether the loop needs no more batches. If `is_done`, it waits for all workers and loads the final weights.

        Returns False if the server went back to a snapshot, so that steps have to be taken again.
        """
        return self.is_done

    @property
    def has_stages(self) -> bool:
        """Whether the task's model is a pipeline (worker.pipeline)."""
        return self._worker.pipeline

    def divided(self, model: nn.Module, loss: LossFn, example: Example, init: str | None) -> nn.Module:
        """Returns the task's model, as a pipeline if worker.pipeline is set.

        `init`: a file with initial weights that are not yet in the model.
        """
        return self._make_pipeline(model, loss, example, init) if self.has_stages else model

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
        if self._data is not None:
            message = "session.pipeline() was called after session.optimizer(), which already took the model"
            raise UsageError(message, fix="call session.pipeline() first, and create the optimizer with its parameters")
        loss = loss_of(loss_fn)
        return self._make_pipeline(layers, loss, (lambda _: example) if example is not None else None, init)

    def _make_pipeline(
        self, layers: nn.Module | Sequence[nn.Module], loss: LossFn, example: Example | None, init: str | None
    ) -> Pipeline:
        module, found = layers_of(layers)
        check_weights(module, init)
        if init is not None:
            if on_meta(module):
                module.to_empty(device="cpu" if self._worker.device == "auto" else self._worker.device)
            load_weights(module, init)
        return Pipeline(module, found, loss, self._worker.microbatches or 2)

    def optimizer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
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
        return self._begin(Offer(model, [optimizer], averaged_buffers, reduction))[0]

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
        return self._begin(Offer(whole, optimizers, averaged_buffers, reduction))

    def _begin(self, offer: Offer) -> tuple[Any, ...]:
        """Join the run with a model and its optimizers; returns the optimizers to step."""
        raise NotImplementedError

    def _check_first(self, reduction: Reduction) -> None:
        """Raises UsageError for a second `optimizer()`, and for an unknown `reduction`."""
        self._owner.check()
        if self._data is not None:
            raise UsageError(
                "a second session.optimizer(): a run gets its model and optimizers once",
                fix="with several optimizers: session.optimizers(generator=(g, g_optimizer), critic=(d, d_optimizer)); "
                "to train in phases, give one optimizer all parameters, then change requires_grad and its groups' lr",
            )
        if reduction not in get_args(Reduction):
            words = " or ".join(map(repr, get_args(Reduction)))
            message = f"session.optimizer(..., reduction={reduction!r}): use {words}"
            raise UsageError(message, fix="'sum' if the loss is a sum over its batch, else 'mean'")

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
        if any(table.spec.name == name for table in self._tables):
            raise UsageError(f"a second table '{name}'", fix="give every table a name of its own")
        self._chooses(has_rows=True)
        spec = make_spec(name, num_rows, dim, str(dtype).removeprefix("torch."), init_std, optimizer, hyperparameters)
        self._tables.append(Rows(spec, self._make_rows(spec)))
        return self._tables[-1]

    def _chooses(self, **more: Any) -> None:
        """Note what the script chooses. Raises UsageError for capabilities that exclude each other."""
        self._choices = replace(self._choices, **more)
        check(self._choices)

    def _make_rows(self, spec: TableSpec) -> Pull:
        raise NotImplementedError

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
        data = self._joined()
        steps = data.progress.total_steps
        if steps is not None and data.progress.row.steps >= steps and not self._is_told:  # the loop gets no batches
            self._is_told = True
            log.warning("no_batches", reason=f"all {steps} training steps of the run (run.steps) are taken")
        check_count("shard(accumulate=", accumulate, 1)
        check_count("shard(prefetch=", prefetch)
        if epochs is not None:
            check_count("shard(epochs=", epochs, 1)
        if epochs is not None and epochs > 1:
            self.length.own_epochs = max(epochs, self.length.own_epochs or 0)
        source = source_of(Source(dataset, batch_size, shuffle, drop_last, sampler, loader_options))
        settings, num = self.settings, source.batch_size
        size = check_count("shard(batch_size=", settings.batch_size if num is None else num, 1)
        self.work.add_batch_size(size)
        if size % self._data_share[1]:
            raise UsageError(
                f"a batch of {size} samples cannot be divided among the {self._data_share[1]} processes of this worker",
                fix=f"a batch size that is a multiple of {self._data_share[1]}",
            )
        size //= self._data_share[1]
        shares = Shares(source.dataset, size, settings.seed, source.shuffle, pad, source.drop_last, source.sampler)
        stated = Stated(accumulate, prefetch, epochs, self.settings.ends_by_metrics)
        end = (lambda: self.is_done), self.is_over
        position = data, self._memory
        return Batches(shares, position, end, read_options(source.options), stated, self._data_share)

    def skip(self) -> None:
        """Say that no step uses the batch that the script computes now, as in a loop that goes on with `continue`."""
        self._joined().skip()

    def skip_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Say that a step is not taken: the batches that it would use are used up, and count for nothing."""
        self._scaling.skipped(optimizer)

    def scaler(self, *args: Any, **options: Any) -> torch.amp.GradScaler:
        """Return a torch.amp.GradScaler that tells the session about the steps that it skips.

        It takes the arguments of GradScaler. The batches of a skipped step are used up, and the run does not count it.
        """
        return self.watched(torch.amp.GradScaler(*args, **options))

    def watched(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """Let a trainer's own GradScaler tell the session about the steps that it skips."""
        self._scaling.watch(scaler)
        return scaler

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
        data = self._joined()
        memory = self._memory
        num = check_count("epochs(", num)
        self.length.own_epochs = max(num, self.length.own_epochs or 0)
        if data.epoch is None:
            if memory is not None:
                memory.use()
            data.start_epochs()
        while not self.is_over():
            if memory is not None and memory.has_moved:
                memory.move()
            if data.epoch_now >= num:
                return
            yield data.epoch_now
            if memory is None or not memory.has_moved:
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
        found = stateful(objects, rng)
        self._joined()
        if self._memory is not None:
            self._memory.add(found)

    def mark(self) -> None:
        """Tell the session that a batch begins, in a loop that does not use `shard()`: it saves `state()` now.

        Without this call, the session saves the state in `step()`.
        """
        if self._memory is not None:
            self._memory.mark()

    def _joined(self) -> DataPosition:
        """This rank's position in the data. Raises UsageError before `optimizer()`."""
        self._owner.check()
        if self._data is None:
            message = "session.shard(), epochs() or state() was called before session.optimizer()"
            raise UsageError(message, fix="call session.optimizer(model, ...) first: it gives this rank its position")
        if self._has_finished:
            message = "session.shard(), epochs() or state() after session.finish(), which ends this worker's training"
            raise UsageError(message, fix="call session.finish() once, after all loops")
        return self._data

    def record(self, *, loss: float | None = None, num_samples: int = 0, **metrics: float) -> None:
        """Record the loss of a step, its number of samples (instead of those of its batches), and your own metrics.

        The newest value of each metric reaches the server with the next heartbeat (a quarter of `server.lease_s`), and
        from there the dashboard, the run store and trackers. UsageError for a value that is no number.
        """
        self.readings.record(metrics)
        if loss is not None:
            self.losses.note(self._position, loss)
        self._shown.look_again()

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
        from ...common.reporting.pictures.cards import of_session

        has_begun = self._memory is not None or self.losses.points
        where = (self.rank, self.num_workers, self._position, self.is_done) if has_begun else None
        return of_session(self._mode, where, self.losses.points, self.metrics)

    @property
    def _mode(self) -> str:
        return self.settings.mode

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The card as a notebook displays it."""
        return self._card().bundle()

    def finish(self) -> bool:
        """Take no more steps, wait for the other workers and load the final weights. True: this worker evaluates them.

        Before the end of the run this worker leaves, and the others go on without it.
        """
        return True

    def _say_early(self) -> None:
        """Warn if the script's loops have read all their passes before the run has its steps."""
        step, total = self._progress.position, self._progress.total_steps
        if total is None:
            log.routine("finished", step=step)
        elif self._data is None or not self._data.has_read_all:
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
        raise NotImplementedError

    def evaluate(self, fn: Measure, every: str | int | None = None) -> None:
        """Evaluate with `fn(model)`, which returns a dict of metrics, during the run and after it.

        `every`: training steps (100), seconds ("30s") or epochs ("1epoch", the default). The run's run.eval_every
        overrides it. One worker evaluates, in `step()`, on the server's weights of one version (in localsgd after the
        next average). The worker that evaluates the final weights calls `fn` in `finish()` and `report`s the metrics.

        Meanwhile the model is in evaluation mode. Afterwards its mode, its buffers and the generators of torch, Python
        and NumPy are restored. An exception in `fn` ends the run as failed. Raises UsageError for an invalid interval.
        """
        self.evaluation.set(fn, every)

    def averaged(self, *models: nn.Module) -> bool:
        """Write the run's Polyak average into the model, or into the models of all parts in their order.

        Returns False if the run does not keep an average.
        """
        return False

    def report(self, **metrics: float) -> None:
        """Add metrics of the final evaluation to the run's summary."""
        self.metrics.update({name: number_of(value, f"session.report({name}=...)") for name, value in metrics.items()})
        self._shown.look_again(is_last=True)

    def close(self) -> None:
        """Leave the run; the other workers go on without this one.

        It is also called at the end of a `with` block and of the script. After an exception or a nonzero exit code the
        worker leaves as failed.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self.close()
