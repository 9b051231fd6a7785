"""Divides a data set without a length: every rank reads all samples in order and keeps every W-th one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ....common.errors import UsageError


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def share_of_few(index: int, num_workers: int, num_left: int) -> tuple[int, int]:
    """Assign the last samples of an epoch when fewer samples than workers are left.

    Returns (sample, weight) for worker `index`. Worker i computes sample i mod num_left. More workers compute some
    samples than others, and the weights make each sample count once.
    """
    at_least, num_more = divmod(num_workers, num_left)
    is_more = index % num_left < num_more
    return index % num_left, 1 if not num_more else at_least if is_more else at_least + 1


def pieces(source: Iterable[Any], seed: int, size: int, device: str | None = None) -> Iterator[list[Any]]:
    """Yield what a stream or a sampler gives, `size` items at a time.

    It draws from a generator of torch with this seed, whatever the script draws meanwhile. `device`: torch's default
    device while it draws.
    """
    state = torch.Generator().manual_seed(seed).get_state()
    items: Iterator[Any] | None = None
    while True:
        with torch.random.fork_rng(devices=[]), nullcontext() if device is None else torch.device(device):
            torch.set_rng_state(state)
            items = iter(source) if items is None else items
            found = list(islice(items, size))
            state = torch.get_rng_state()
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
                num_samples, mine = 0, rows[self.index :: self.num_workers]
                if len(rows) < self.num_workers:
                    which, num_samples = share_of_few(self.index, self.num_workers, len(rows))
                    mine = [rows[which]]
                yield self.collate(mine), num_samples or len(mine)
            count += 1
        yield None, -count


def streamed(once: StreamPass, number: int, options: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """Yield the batches of pass `number`, and what follows them. Raises UsageError for a pass without batches."""
    stream: Any = once.stream
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(number)
    generator = torch.Generator().manual_seed(once.seed)
    loader = DataLoader(once, **{"generator": generator, **options, "batch_size": None, "collate_fn": _as_it_is})
    with torch.device("cpu"):  # torch draws its seed on the default device
        batches = iter(loader)
    for batch, num_samples in batches:
        if not num_samples:
            amount = "less than a batch for all workers" if once.drop_last else "no sample"
            message = f"{type(stream).__name__} gave {amount} in epoch {number} (from 0)"
            raise UsageError(message, fix="make each iter() of it start again, with enough samples for all workers")
        yield batch, num_samples


def _as_it_is(item: Any) -> Any:
    return item


def check_stream(stream: Any, counts_epochs: bool, options: dict[str, Any]) -> None:
    """Raises UsageError for options that a data set without a length does not support."""
    name = type(stream).__name__
    if counts_epochs:
        message = f"{name} has no length, so a run of epochs (--epochs, session.epochs) cannot count them"
        raise UsageError(message, fix="--steps N, and a loop over session.shard(..., epochs=None)")
    for option in ("pads", "sampler"):
        if options.get(option):
            word = {"pads": "pad"}.get(option, option)
            raise UsageError(f"{name} has no length, and session.shard({word}=...) needs one", fix="leave it out")
    if (options.get("num_workers") or 0) > 1:
        message = f"{name} has no length, and {options['num_workers']} loader processes would each read all of it"
        raise UsageError(message, fix="num_workers=1 (--loader-workers 1)")
