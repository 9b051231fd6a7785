"""Reads what a script gives to `session.shard()`: a DataLoader, or a data set without a length.

Of a data set without a length every rank reads all samples in order and keeps every W-th one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from ....common.errors import UsageError
from ....common.tensors.generators import Generators

_SIGNATURE = inspect.signature(DataLoader).parameters
# The session divides and orders the data by these itself. It passes all other arguments to a DataLoader of its own.
_OF_BATCHES = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_FIX = (
    "give it the data set, with batch_size=, sampler= and collate_fn=; or divide your loader among the ranks yourself, "
    "and call session.record(num_samples=len(batch)) before each step"
)
# The arguments of `session.shard()` about the data, and what they are unless a script gives them.
_DEFAULTS = {"batch_size": None, "shuffle": True, "drop_last": False, "sampler": None}


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def share_of(rows: Any, index: int, num_workers: int) -> tuple[Any, int]:
    """Returns the samples of worker `index` from those of all workers for a step, and their weight in samples.

    It is every W-th sample. If fewer samples than workers are left, worker i computes sample i mod num_left. More
    workers compute some samples than others, and the weights make each sample count once.
    """
    if (num_left := len(rows)) >= num_workers:
        mine = rows[index::num_workers]
        return mine, len(mine)
    (at_least, num_more), which = divmod(num_workers, num_left), index % num_left
    weight = 1 if not num_more else at_least if which < num_more else at_least + 1
    return rows[which : which + 1], weight


def pieces(source: Iterable[Any], seed: int, size: int, device: str | None = None) -> Iterator[list[Any]]:
    """Yield what a stream or a sampler gives, `size` items at a time.

    It draws from generators with this seed, whatever the script draws meanwhile. `device`: torch's default device while
    it draws.
    """
    generators = Generators(seed)
    items: Iterator[Any] | None = None
    while True:
        with generators.drawn_from(), nullcontext() if device is None else torch.device(device):
            items = iter(source) if items is None else items
            found = list(islice(items, size))
        if found:
            yield found
        if len(found) < size:
            return


@dataclass(frozen=True)
class StreamPass(IterableDataset[Any]):
    """One pass through a stream. Yields one rank's batches and weights, without the first `first` batches.

    The last item is (None, minus the number of batches). The stream's draws from torch's generator are the same on all
    ranks.
    """

    stream: Iterable[Any]
    seed: int
    batch_size: int
    num_workers: int
    index: int
    first: int
    drop_last: bool
    collate: Callable[[list[Any]], Any]

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        union, count = self.num_workers * self.batch_size, 0
        for rows in pieces(self.stream, self.seed, union):
            if len(rows) < union and self.drop_last:
                break
            if count >= self.first:
                mine, num_samples = share_of(rows, self.index, self.num_workers)
                yield self.collate(mine), num_samples
            count += 1
        yield None, -count


def streamed(once: StreamPass, number: int, options: dict[str, Any]) -> Generator[tuple[Any, int], None, int]:
    """Yield the batches of pass `number`, each with its weight in samples. Returns the number of batches of the pass.

    Raises UsageError for a pass without batches.
    """
    stream: Any = once.stream
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(number)
    generator = torch.Generator().manual_seed(once.seed)
    loader = DataLoader(once, **{"generator": generator, **options, "batch_size": None, "collate_fn": _as_it_is})
    with torch.device("cpu"):  # torch draws its seed on the default device
        batches = iter(loader)
    while (found := next(batches))[1] > 0:
        yield found
    if not found[1]:
        amount = "less than a batch for all workers" if once.drop_last else "no sample"
        message = f"{type(stream).__name__} gave {amount} in epoch {number} (from 0)"
        raise UsageError(message, fix="make each iter() of it start again, with enough samples for all workers")
    return -int(found[1])


def _as_it_is(item: Any) -> Any:
    return item


def check_stream(stream: Any, counts_epochs: bool, options: dict[str, Any]) -> None:
    """Raises UsageError for options that a data set without a length does not support."""
    name = type(stream).__name__
    if counts_epochs:
        message = f"{name} has no length, so a run of epochs (--epochs, session.epochs) cannot count them"
        raise UsageError(message, fix="--steps N, and a loop over session.shard(..., epochs=None)")
    for option in ("pad", "sampler"):
        if options.get(option):
            raise UsageError(f"{name} has no length, and session.shard({option}=...) needs one", fix="leave it out")
    if (options.get("num_workers") or 0) > 1:
        message = f"{name} has no length, and {options['num_workers']} loader processes may each read all of it"
        raise UsageError(message, fix="num_workers=1 (--loader-workers 1)")


# ---- DataLoaders ----------------------------------------------------------------------------------


def source_of(loader: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Unpack a DataLoader into its data set and the arguments to divide it; return other data and `given` as they are.

    `given`: the arguments of `session.shard()`, with the options for a DataLoader. A batch of the DataLoader is a batch
    of one worker. With a plain `shuffle=True` the order follows from the run's seed, as without a DataLoader. Raises
    UsageError for a DataLoader that the session cannot use, and for an argument that contradicts the DataLoader.
    """
    if unknown := given.keys() - _SIGNATURE.keys():
        message = f"session.shard(): DataLoader has no option {', '.join(sorted(unknown))}"
        raise UsageError(message, fix="the options of torch.utils.data.DataLoader, such as num_workers=2")
    if given.pop("batch_sampler", None) is not None:
        raise _refusal("a batch_sampler", fix="give session.shard() batch_size=, drop_last= and sampler=")
    if not isinstance(loader, DataLoader):
        return loader, given
    kind, batches = type(loader), loader.batch_sampler
    if any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")):
        raise _refusal(f"{kind.__name__}, which iterates in a way of its own")
    if loader.batch_size is None and batches is not None:
        raise _refusal(f"a DataLoader with a batch_sampler of its own ({type(batches).__name__})")
    if loader.batch_size is None:
        raise _refusal("a DataLoader with batch_size=None, whose data set makes the batches")
    options = {name: getattr(loader, name) for name in _SIGNATURE if name not in _OF_BATCHES}
    if options["collate_fn"] is default_collate:
        options["collate_fn"] = None
    shuffle = isinstance(loader.sampler, RandomSampler)
    found = {"batch_size": loader.batch_size, "shuffle": shuffle, "drop_last": loader.drop_last}
    of_loader = {**found, "sampler": loader.sampler, **options}
    for name, value in given.items():
        is_default = name in _DEFAULTS and value is _DEFAULTS[name]
        if not is_default and name in of_loader and value is not of_loader[name] and value != of_loader[name]:
            raise UsageError(
                f"session.shard({name}={value!r}) of a DataLoader whose {name} is {of_loader[name]!r}",
                fix=f"give {name} once: to the DataLoader, or give session.shard() the loader's data set",
            )
    changed = {name: value for name, value in options.items() if value != _SIGNATURE[name].default}
    return loader.dataset, {**found, "sampler": _order_of(loader), **changed}


def _order_of(loader: DataLoader[Any]) -> Any:
    """The sampler, if `shuffle` alone does not give the samples of an epoch and their order; else None."""
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    if is_stream(dataset):
        return None
    if type(sampler) not in (RandomSampler, SequentialSampler) or sampler.data_source is not dataset:
        return sampler
    is_random = type(sampler) is RandomSampler
    return sampler if is_random and (sampler.replacement or sampler.num_samples != len(dataset)) else None


def _refusal(source: str, fix: str = _FIX) -> UsageError:
    return UsageError(f"session.shard() divides the data itself and cannot use {source}", fix=fix)
