"""What a training loop holds: a place in a run, its data, its end. With a server: `remote.py`; without: `alone.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.reporting.pictures.notebook import Losses, Shown
from ...common.tensors.optimizers import Reduction, TableSpec
from ...common.tensors.tables import make_spec
from ..conversation.messages import Settings
from ..session import Length, Progress
from ..tensors.transfer import together
from .batches import Batches, read_options
from .data import Shares
from .evaluation import Evaluation, Measure
from .position.loaders import Source, source_of
from .position.memory import Memory, stateful
from .position.taken import Taken
from .rows import Pull, Rows

if TYPE_CHECKING:
    from ...common.reporting.pictures.notebook import Card

log = get_logger()

Part = tuple[nn.Module, torch.optim.Optimizer]


class Offer(NamedTuple):
    """A model, its optimizers, and how the run averages both."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    averaged_buffers: Collection[str]
    reduction: Reduction


class Session:
    """A worker's place in a run, or a run of its own (`AloneSession`). What a run of one does is done here."""

    settings: Settings
    _inner = (0, 1)  # group rank, and of how many

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.length = Length()
        self._tables: list[Rows] = []
        self._is_told = False  # that it has no more batches
        self.evaluation = Evaluation()
        self._here = Progress()  # without a server
        self._taken: Taken | None = None  # once there is an optimizer
        self._memory: Memory | None = None  # likewise
        self._names: tuple[str, ...] = ()  # of the parts, where there are several
        self.losses = Losses()
        self._shown = Shown(self._card)

    @property
    def rank(self) -> int:
        """0..N-1."""
        return 0

    @property
    def num_workers(self) -> int:
        """Workers the data is divided among."""
        return 1

    @property
    def group_rank(self) -> int:
        """Of a worker that is several processes (worker.group), which one this is; 0 has the conversation with the
        server."""
        return self._inner[0]

    @property
    def step(self) -> int:
        """Training steps of this rank that are done, over all processes that had it."""
        return self._position

    @property
    def _position(self) -> int:
        raise NotImplementedError

    @property
    def _progress(self) -> Progress:
        """Where this rank is in the run."""
        return self._here

    @property
    def epoch(self) -> int:
        """Of this rank's data, from 0: the one that the loop over `epochs()` is in, else that of the next batch."""
        return self._joined()[1].epoch_now

    @property
    def resumed(self) -> bool:
        """This process goes on where its rank was (a process before it, or the run it has come to): no first start."""
        return False

    @property
    def run_name(self) -> str:
        """Of the run, given by its server; empty without one. UsageError before `optimizer()`."""
        return self._joined()[0]().run

    @property
    def is_done(self) -> bool:
        """All steps of the run are taken, or it was stopped, or this worker has finished."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """No batch is needed any more: where `is_done`, waits until everyone is, and takes the final weights. False
        where they are not to be had, because the server went back to a snapshot: there are steps to take again."""
        return self.is_done

    def divided(self, model: nn.Module) -> nn.Module:
        """A task's model, divided among the processes of this worker where the run's settings say so."""
        return model

    def optimizer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        averaged_buffers: Collection[str] = (),
        reduction: Reduction = "mean",
    ) -> Any:
        """The optimizer to step. Joins the run with this model, whose weights become the run's.

        `averaged_buffers`: names (as in the model's state_dict) of running statistics that layers of your own keep. The
        run averages these over its workers, as it does those of BatchNorm and InstanceNorm. Every other buffer is that
        of the lowest live rank. UsageError for a name that no buffer has.

        `reduction`: what one gradient is made of those of all workers. "mean", weighted by their samples, for a loss
        that is a mean over its batch; "sum" for one that is a sum, such as `cross_entropy(..., reduction="sum")`. All
        workers say the same. UsageError for another word, and for "sum" in modes that make no sum.

        The returned optimizer has `clip_grad_norm(max_norm)`, which clips that one gradient: to be called in the place
        of `torch.nn.utils.clip_grad_norm_`, which would clip the gradient of this worker alone.
        """
        return self._begin(Offer(model, [optimizer], averaged_buffers, reduction))[0]

    def optimizers(
        self, *, averaged_buffers: Collection[str] = (), reduction: Reduction = "mean", **parts: Part
    ) -> tuple[Any, ...]:
        """The optimizers to step, of a run that trains several models, or one with several optimizers, by turns:

            g_optimizer, d_optimizer = session.optimizers(generator=(g, g_optimizer), critic=(d, d_optimizer))

        All weights become the run's; in what is saved their names begin with these, and so in `averaged_buffers` (see
        `optimizer`, as for `reduction`). A training step is a batch,
        whichever of the optimizers step on it: of a loop over `shard` the first step() after a batch was asked for
        begins one, elsewhere each step() of the optimizer that is stepped first. Each parameter has one optimizer.

        UsageError for what a run cannot step so.
        """
        optimizers = check_parts(parts, self.settings, bool(self._tables))
        self._names = tuple(parts)
        whole = together({name: model for name, (model, _) in parts.items()})
        return self._begin(Offer(whole, optimizers, averaged_buffers, reduction))

    def _begin(self, offer: Offer) -> tuple[Any, ...]:
        """Join the run with a model and its optimizers; returns the optimizers to step."""
        raise NotImplementedError

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let schedules of the first optimizer scale the tables' learning rates."""
        for table in self._tables:
            table.follow(optimizer)

    def _check_first(self, reduction: Reduction) -> None:
        """UsageError for a second `optimizer()`, and for another `reduction` than a mean or a sum."""
        if self._taken is not None:
            raise UsageError(
                "a second session.optimizer(): what a run trains is said once",
                fix="with several optimizers: session.optimizers(generator=(g, g_optimizer), critic=(d, d_optimizer))",
            )
        if reduction not in get_args(Reduction):
            words = " or ".join(map(repr, get_args(Reduction)))
            raise UsageError(
                f"session.optimizer(..., reduction={reduction!r}): it is {words}",
                fix="'sum' where the loss is a sum over its batch, else 'mean'",
            )

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
        """A table of rows for embeddings, which the server makes and keeps: `table(ids)` gives rows with a gradient,
        and `step()` sends the gradients of those that were used. Call it before `optimizer()`, on every worker alike.

        `optimizer` steps the rows that have a gradient: sgd, adagrad, sparse_adam as torch's with sparse gradients, or
        rowwise_adagrad, with `hyperparameters` (lr, ...); schedules of the model's optimizer scale `lr`. Rows begin
        with mean 0 and deviation `init_std`, float32 or float64. UsageError for what cannot be, and in modes that
        exchange weights.
        """
        if any(table.spec.name == name for table in self._tables):
            raise UsageError(f"a second table '{name}'", fix="give every table a name of its own")
        spec = make_spec(name, num_rows, dim, str(dtype).removeprefix("torch."), init_std, optimizer, hyperparameters)
        self._tables.append(Rows(spec, self._make_rows(spec)))
        return self._tables[-1]

    def _make_rows(self, spec: TableSpec) -> Pull:
        raise NotImplementedError

    def shard(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        pad: bool = False,
        drop_last: bool = False,
        epochs: int | None = None,
        sampler: Iterable[int] | None = None,
        **loader_options: Any,
    ) -> Batches:
        """This worker's batches (samples that no other rank sees in the epoch), ending with the run: when all
        workers have taken all their steps and the model has the final weights. Its length is the number of batches
        left; a loop may fetch ahead.

        Where the run has no length (neither run.steps nor run.epochs is set) the script's own loops decide: each loop
        over what this returns is one epoch, as of a DataLoader, or with `epochs` goes on until so many are behind this
        rank, those before a resume included. A run that is shorter than `epochs` says so at the first step.

        The batches of all ranks at a step make up what one process with batches of num_workers * batch_size would
        train on, also where the data does not divide; `pad` repeats samples instead, so that all batches are of
        one size. `loader_options` are DataLoader's. UsageError for what cannot be divided.

        `sampler` gives the order of the samples of all ranks instead of `shuffle` (a WeightedRandomSampler, say). It is
        drawn from on each rank, with torch's generator seeded alike, and told the epoch where it has `set_epoch`. A
        data set without a length (IterableDataset) is read whole by each rank, which keeps every num_workers-th sample,
        and read again from its beginning up to where the rank was after a resume; the run must have a number of steps.

        A DataLoader in the place of `dataset` gives its data set, batch size, sampler, `drop_last` and all its options;
        its batch is that of one rank. UsageError for one with a batch_sampler or an iteration of its own.

        Torch's generator is seeded before each batch, from the run's seed, the rank and the batch's place: what is
        drawn for it (dropout, augmentation) is the same in a run that was killed and resumed.
        """
        progress, taken = self._joined()
        self._say_length(progress())
        if epochs is not None:
            self.length.own_epochs = max(epochs, self.length.own_epochs or 0)
        source = source_of(Source(dataset, batch_size, shuffle, drop_last, sampler, loader_options))
        size, seed = source.batch_size or self.settings.batch_size, self.settings.seed
        if size % self._inner[1]:
            raise UsageError(
                f"a batch of {size} samples cannot be divided among the {self._inner[1]} processes of this worker",
                fix=f"a batch size that is a multiple of {self._inner[1]}",
            )
        size //= self._inner[1]
        shares = Shares(source.dataset, size, seed, source.shuffle, pad, source.drop_last, source.sampler)
        return Batches(shares, taken, progress, self.is_over, read_options(source.options), epochs, self._inner)

    def expect(self, steps: int) -> None:
        """Say how many training steps this script takes by itself: a run that ends before says so at the first."""
        self.length.own_steps = steps

    def epochs(self, num: int) -> Iterator[int]:
        """The numbers of epochs up to `num`, from the one this rank is in: 0, or after a resume the one it was in.
        Loops over `shard()` inside end with the epoch; the loop over epochs ends with the run if that ends first.

        A process that takes a rank begins where its last step began and computes that step once more without sending
        it, so that all the script does between two steps, at the end of an epoch too, is done.
        """
        _, taken = self._joined()
        memory = self._memory
        self.length.own_epochs = max(num, self.length.own_epochs or 0)
        if taken.epoch is None:
            if memory is not None:
                memory.use()
            taken.begin_epochs()
        while not self.is_over():
            if memory is not None and memory.has_moved:
                memory.move()
            if taken.epoch_now >= num:
                return
            yield taken.epoch_now
            if memory is None or not memory.has_moved:
                taken.next_epoch()

    def state(self, *, rng: bool = False, **objects: Any) -> None:
        """What the script remembers beside the model: anything with state_dict() and load_state_dict(), each by a name
        of its own (scheduler=..., scaler=..., ema=...), and generators. `rng`: those of torch, Python and NumPy.

        It travels with each contribution and is in snapshots, and the hyperparameters in the optimizer's groups with
        it. Where this rank has been before, it comes back in this call, and the last step is computed once more (as
        `epochs()` says). To be called after `optimizer()`, before the first batch. UsageError for what holds anything
        but tensors and JSON, or does not take what is remembered.
        """
        found = stateful(objects, rng)
        self._joined()
        if self._memory is not None:
            self._memory.add(found)

    def mark(self) -> None:
        """A batch begins, in a loop that does not ask `shard()` for it: `state()` is taken as it is now. Without this
        it is as it is in `step()`."""
        if self._memory is not None:
            self._memory.mark()

    def _joined(self) -> tuple[Callable[[], Progress], Taken]:
        """Where this rank is in the run and in its data. UsageError before `optimizer()`."""
        if self._taken is None:
            raise UsageError(
                "session.shard() before session.optimizer(), or epochs(), or state()",
                fix="call session.optimizer(model, ...) first: it says where this rank goes on",
            )
        return lambda: self._progress, self._taken

    def _say_length(self, progress: Progress) -> None:
        """Once, where a loop gets fewer batches than its author may expect."""
        steps = progress.total_steps
        if steps is not None and progress.training_steps >= steps and not self._is_told:
            self._is_told = True
            log.warning("no_batches", reason=f"all {steps} training steps of the run (run.steps) are taken")

    def record(self, *, loss: float | None = None, num_samples: int = 0) -> None:
        """Tell the run the loss of a step, and its samples where `shard` did not count them."""
        if loss is not None:
            self.losses.note(self._position, float(loss))
        self._shown.look_again()

    def show(self) -> None:
        """In a notebook: where this worker is, here, live; elsewhere a line of text. Losses are those of `record`."""
        self._shown.show()

    def _card(self) -> Card:
        from ...common.reporting.pictures.cards import of_session

        has_begun = self._memory is not None or self.losses.points
        where = (self.rank, self.num_workers, self._position, self.is_done) if has_begun else None
        return of_session(self.settings.mode, where, self.losses.points, self.metrics)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """For a notebook."""
        return self._card().bundle()

    def finish(self) -> bool:
        """Take no more steps, wait for the others and take the final weights; True when this worker is to evaluate
        them. Before the end of the run this worker is out: nobody waits for it, and the others go on."""
        return True

    def stop(self, reason: str) -> None:
        """End the run for all. Said with this worker's next step, or when it finishes or leaves: in sync and localsgd
        the open round is the last, in other modes everyone's contribution under way. `is_done` and `shard` tell."""
        raise NotImplementedError

    def evaluate(self, fn: Measure, every: str | int | None = None) -> None:
        """While the run goes on `fn(model)`, a dict of metrics, is asked for every so many training steps (100),
        seconds ("30s") or epochs ("1epoch", where nothing is said): of one worker, in `step()`, on the server's weights
        of one version (in localsgd after the next average). The run's own run.eval_every overrules `every`. And of who
        evaluates the final weights, in `finish()`, as if it had `report`ed the metrics.

        The model is in evaluation mode meanwhile; its mode, buffers and the generators of torch, Python and NumPy are
        as they were afterwards. What `fn` raises ends the run, which has failed then. UsageError for no interval.
        """
        self.evaluation.set(fn, every)

    def averaged(self, *models: nn.Module) -> bool:
        """Write the run's Polyak average into the model, or into the models of all parts in their order; False when the
        run keeps none."""
        return False

    def report(self, **metrics: float) -> None:
        """Metrics of the final evaluation, for the run's summary."""
        self.metrics.update({name: float(value) for name, value in metrics.items()})
        self._shown.look_again(is_last=True)

    def close(self) -> None:
        """Leave the run in good order: the others go on without this worker. Also called at the end of a `with` block
        and of the script; with an exception or an exit code that is not 0 it leaves as a process that has failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self.close()


def check_parts(parts: dict[str, Part], settings: Settings, has_tables: bool) -> list[torch.optim.Optimizer]:
    """The optimizers. UsageError for parts that a run of these settings cannot step by turns."""
    if not all(isinstance(part, tuple) and len(part) == 2 for part in parts.values()) or not parts:
        raise UsageError("session.optimizers() takes NAME=(model, optimizer) for each part")
    found = [optimizer for _, optimizer in parts.values()]
    if has_tables and len(found) > 1:
        raise UsageError("session.rows() with several optimizers: which of them steps a table's rows nobody says")
    if settings.delayed_update and len(found) > 1:
        raise UsageError(
            "policy.delayed_update with several optimizers: each would step along gradients from before the other's "
            "step",
            fix="leave --delayed-update out",
        )
    return found
