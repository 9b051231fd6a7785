"""Samplers of one's own, and data sets without a length: the ranks' batches of a step are those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from paramserver.common.errors import UsageError
from paramserver.worker.training.data import Shares, sharded_batches

from .test_batches import session
from .test_data import assert_one


class Stream(IterableDataset):
    """Numbers in an order that it draws anew each time, from torch's generator, some of them late."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(self.num_samples).tolist():
            yield torch.tensor([number + torch.rand(1).item() / 2])


def taken(dataset: Any, count: int, rank: int, workers: int, size: int, first: int = 0, **options: Any) -> list[Any]:
    """[(numbers, weight)] of one rank, which draws something of its own in between."""
    names = ("sampler", "drop_last")
    shares = Shares(dataset, size, 3, **{name: options.pop(name) for name in names if name in options})
    found = []
    for batch, weight in itertools.islice(sharded_batches(shares, lambda: (workers, rank), first, **options), count):
        torch.manual_seed(rank)
        numbers = batch[0] if isinstance(batch, (list, tuple)) else batch
        found.append((numbers.flatten().tolist(), weight))
    return found


@given(num=st.integers(1, 40), workers=st.integers(1, 5), size=st.integers(1, 6), first=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_of_a_stream_each_rank_keeps_its_part_from_any_place_on(num: int, workers: int, size: int, first: int) -> None:
    count = 2 * -(-num // (workers * size))
    ranks = [taken(Stream(num), count, rank, workers, size, first) for rank in range(workers)]
    assert_one(ranks, taken(Stream(num), count, 0, 1, workers * size, first))
    assert ranks[0][1:] == taken(Stream(num), count - 1, 0, workers, size, first + 1)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
def test_a_sampler_draws_the_same_on_all_ranks_and_another_order_each_epoch(replacement: bool, has_own: bool) -> None:
    data = TensorDataset(torch.arange(21.0))

    def make(rank: int) -> Any:
        generator = torch.Generator().manual_seed(rank) if has_own else None
        if replacement:
            return WeightedRandomSampler(torch.arange(1.0, 22.0), 17, generator=generator)
        return RandomSampler(data, generator=generator)

    ranks = [taken(data, 12, rank, 2, 3, sampler=make(rank)) for rank in range(2)]
    alone = taken(data, 12, 0, 1, 6, sampler=make(7))
    assert_one(ranks, alone)
    epochs = [[numbers for numbers, _ in alone[start : start + 3]] for start in (0, 3)]
    assert epochs[0] != epochs[1]


def test_one_loader_process_reads_as_the_worker_itself_does() -> None:
    assert taken(Stream(11), 6, 1, 2, 3, num_workers=1) == taken(Stream(11), 6, 1, 2, 3)


def test_a_stream_that_is_over_after_once_is_a_sentence_and_no_hang() -> None:
    with pytest.raises(UsageError, match="gave no sample in epoch 1 "):
        taken((number for number in torch.arange(4.0)), 5, 0, 1, 2)
    with pytest.raises(UsageError, match="gave less than a batch for all workers in epoch 0"):
        taken(Stream(5), 1, 0, 2, 3, drop_last=True)


def test_a_loop_over_epochs_of_a_stream_is_refused_and_does_not_train_nothing() -> None:
    run, _, _ = session(steps=3)
    batches = run.shard(Stream(5), batch_size=2)
    next(run.epochs(2))
    with pytest.raises(UsageError, match="cannot count them"):
        next(iter(batches))
