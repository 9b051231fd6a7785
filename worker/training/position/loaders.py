"""Reads a DataLoader that a script gives to `session.shard()`: its data set, batch size, order and options."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from ....common.errors import UsageError
from .stream import is_stream

_SIGNATURE = inspect.signature(DataLoader).parameters
# The session divides and orders the data by these itself. It passes all other arguments to a DataLoader of its own.
_OF_BATCHES = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


# The arguments of `session.shard()` about the data, and what they are unless a script gives them.
_DEFAULTS = {"batch_size": None, "shuffle": True, "drop_last": False, "sampler": None}


def source_of(dataset: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Unpack a DataLoader into its data set and the arguments to divide it; return other data and `given` unchanged.

    `given`: the arguments of `session.shard()`, with the options for a DataLoader. A batch of the DataLoader is a batch
    of one worker. With a plain `shuffle=True` the order follows from the run's seed, as without a DataLoader. Raises
    UsageError for a DataLoader that the session cannot use, and for an argument that contradicts the DataLoader.
    """
    loader = dataset
    if not isinstance(loader, DataLoader):
        return dataset, given
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


def _refusal(source: str) -> UsageError:
    return UsageError(
        f"session.shard() divides the data itself and cannot use {source}",
        fix="give session.shard() the data set: session.shard(loader.dataset, batch_size=..., sampler=...)",
    )
