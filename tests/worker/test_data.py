"""A worker's share of the data: every sample, once an epoch, in another order each time, and from any position on."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from paramserver.common.errors import ParamServerError
from paramserver.worker.training import data
from paramserver.worker.training.data import Shares, seed_everything, sharded_batches, step_seed, to_device


def tensors_of(num_samples: int) -> TensorDataset:
    """Inputs that are their own number, and targets of another dtype and shape."""
    numbers = torch.arange(num_samples)
    return TensorDataset(numbers.float().unsqueeze(1).repeat(1, 3), numbers)


class Slow(Dataset):
    """The same samples one by one, as any data set of a user gives them; counts what is loaded."""

    def __init__(self, num_samples: int) -> None:
        self._inner = tensors_of(num_samples)
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.loaded.append(index)
        return self._inner[index]


def batches(
    dataset: Dataset, count: int, batch_size: int = 4, workers: int = 1, index: int = 0, seed: int = 0, first: int = 0,
    **options: bool,
) -> list[list[torch.Tensor]]:  # fmt: skip
    epochs = iter(range(first + count + 1))  # more than can be needed; without a bound a mistake would loop for ever

    def division() -> tuple[int, int]:
        assert next(epochs, None) is not None, "epoch after epoch without a batch"
        return workers, index

    return [batch for batch, _ in weighed(dataset, count, batch_size, division, seed, first, **options)]


def weighed(
    dataset: Dataset, count: int, batch_size: int, division: Callable[[], tuple[int, int]], seed: int = 0,
    first: int = 0, **options: bool,
) -> list[tuple[list[torch.Tensor], int]]:  # fmt: skip
    shares = Shares(dataset, batch_size, seed, **options)
    return list(itertools.islice(sharded_batches(shares, division, first), count))


def numbers(found: list[list[torch.Tensor]]) -> list[int]:
    return [int(number) for _, targets in found for number in targets]


@given(
    num_samples=st.integers(7, 60), workers=st.integers(1, 7), batch_size=st.integers(1, 9), epoch=st.integers(0, 2),
    shuffle=st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_batches_of_a_step_make_up_one_of_a_process_alone(
    num_samples: int, workers: int, batch_size: int, epoch: int, shuffle: bool
) -> None:
    """The weighted mean over the ranks counts each sample of the union batch once, also where some rank has none."""
    union, dataset = workers * batch_size, tensors_of(num_samples)
    per_epoch = -(-num_samples // union)
    item = batches(dataset, per_epoch, union, first=per_epoch * epoch, shuffle=shuffle)
    where = {"first": per_epoch * epoch, "shuffle": shuffle}
    ranks = [
        weighed(dataset, per_epoch, batch_size, lambda rank=rank: (workers, rank), **where) for rank in range(workers)
    ]
    assert all(1 <= len(targets) <= batch_size for rank in ranks for (_, targets), _ in rank)
    shares = [[(targets.tolist(), weight) for (_, targets), weight in rank] for rank in ranks]
    assert_one(shares, [(targets.tolist(), union) for _, targets in item])


def assert_one(ranks: list[Any], alone: list[Any]) -> None:
    """The weighted mean over the ranks' batches, [(numbers, weight)] each, counts every number as one process does."""
    for (expected, _), *shares in zip(alone, *ranks, strict=True):
        worth: dict[float, float] = Counter()
        total = sum(weight for _, weight in shares)
        for numbers, weight in shares:
            for number in numbers:
                worth[number] += weight / len(numbers) / total
        assert worth == {item: pytest.approx(times / len(expected)) for item, times in Counter(expected).items()}


@given(num_samples=st.integers(1, 60), workers=st.integers(1, 7), batch_size=st.integers(1, 9), epoch=st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_padded_shares_are_those_of_a_distributed_sampler(
    num_samples: int, workers: int, batch_size: int, epoch: int
) -> None:
    per_epoch = -(-num_samples // (workers * batch_size))
    for rank in range(workers):
        sampler = DistributedSampler(tensors_of(num_samples), workers, rank, seed=3)
        sampler.set_epoch(epoch)
        found = batches(tensors_of(num_samples), per_epoch, batch_size, workers, rank, 3, per_epoch * epoch, pads=True)
        assert numbers(found) == list(sampler)


def test_a_last_batch_that_is_not_full_is_left_out_for_all_or_none() -> None:
    for rank in range(2):
        found = batches(tensors_of(21), 5, batch_size=4, workers=2, index=rank, drop_last=True)
        assert [len(targets) for _, targets in found] == [4] * 5


@pytest.mark.parametrize(
    ("num_samples", "options", "message"),
    [
        (1, {}, "holds 1 sample; 2 workers need 2 or more"),
        (7, {"drop_last": True}, r"holds 7 samples; 2 workers need 8 or more \(drop_last\)"),
        (0, {"pads": True}, "is empty; 2 workers need 1 or more"),
    ],
)
def test_too_few_samples_for_the_workers_are_a_sentence(num_samples: int, options: dict, message: str) -> None:
    with pytest.raises(ParamServerError, match=message):
        batches(tensors_of(num_samples), 1, workers=2, **options)


def test_each_epoch_has_its_own_order() -> None:
    found = numbers(batches(tensors_of(40), 30))
    epochs = [found[start : start + 40] for start in (0, 40, 80)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert found == numbers(batches(tensors_of(40), 30)), "the same seed, the same order"
    assert found != numbers(batches(tensors_of(40), 30, seed=1))


@given(
    num_samples=st.integers(5, 50), workers=st.integers(1, 5), batch_size=st.integers(1, 8), first=st.integers(0, 40),
    make=st.sampled_from([tensors_of, Slow]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_a_worker_that_comes_back_goes_on_where_it_was(
    num_samples: int, workers: int, batch_size: int, first: int, make: Callable[[int], Dataset]
) -> None:
    whole = batches(make(num_samples), first + 6, batch_size, workers)
    resumed = batches(make(num_samples), 6, batch_size, workers, first=first)
    assert numbers(resumed) == numbers(whole[first:])
    assert [len(targets) for _, targets in resumed] == [len(targets) for _, targets in whole[first:]]


def test_what_is_skipped_is_not_loaded() -> None:
    dataset = Slow(40)
    found = batches(dataset, 2, batch_size=4, first=1007)
    assert dataset.loaded == numbers(found)
    assert len(dataset.loaded) == 8


@given(num_samples=st.integers(4, 40), workers=st.integers(1, 4), batch_size=st.integers(1, 9), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_fast_path_gives_what_the_loader_gives(num_samples: int, workers: int, batch_size: int, seed: int) -> None:
    fast = batches(tensors_of(num_samples), 8, batch_size, workers, seed=seed)
    slow = batches(Slow(num_samples), 8, batch_size, workers, seed=seed)
    for batch, two in zip(fast, slow, strict=True):
        assert type(batch) is type(two) is list
        for ours, theirs in zip(batch, two, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype


class Augmented(TensorDataset):
    """A user's subclass that changes each sample: the usual way to augment data in memory."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        return -inputs, targets


def test_a_subclass_with_its_own_samples_is_asked_for_them() -> None:
    plain = tensors_of(8)
    for inputs, targets in batches(Augmented(*plain.tensors), 2):
        assert torch.equal(inputs, -targets.float().unsqueeze(1).repeat(1, 3)), "the augmentation was skipped"


def test_the_division_is_asked_for_at_each_epoch() -> None:
    """Workers may come and go while the number of workers is open."""
    divisions = iter([(1, 0), (4, 2), (2, 1)])
    stream = sharded_batches(Shares(tensors_of(16), 16, 0), lambda: next(divisions), 0)
    assert [weight for _, weight in itertools.islice(stream, 3)] == [16, 4, 8]


# ---- batches of any form ---------------------------------------------------------------------------

Pair = namedtuple("Pair", "inputs targets")


def test_every_tensor_goes_to_the_device_and_the_form_stays() -> None:
    batch = {"x": [torch.zeros(2), (torch.ones(1), "text")], "pair": Pair(torch.zeros(1), 3), "none": None}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"][0].device.type == moved["x"][1][0].device.type == moved["pair"].inputs.device.type == "meta"
    assert type(moved["pair"]) is Pair
    assert type(moved["x"]) is list
    assert type(moved["x"][1]) is tuple
    assert (moved["x"][1][1], moved["pair"].targets, moved["none"]) == ("text", 3, None)
    assert batch["x"][0].device.type == "cpu", "the batch itself is not changed"
    same = torch.zeros(2)
    assert to_device(same, torch.device("cpu")) is same


class Numbered(Slow):
    """Says which process loads a sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([os.getpid()]), torch.tensor(index)


@pytest.mark.parametrize(("stay", "num_processes"), [(True, 1), (False, 3)])
def test_loader_processes_stay_from_epoch_to_epoch_when_asked_to(stay: bool, num_processes: int) -> None:
    shares = Shares(Numbered(8), 4, 0)
    loaded = sharded_batches(shares, lambda: (1, 0), 0, num_workers=1, persistent_workers=stay)
    found = [batch for batch, _ in itertools.islice(loaded, 6)]
    assert len({int(pid) for pids, _ in found for pid in pids}) == num_processes
    assert numbers(found) == numbers(batches(Slow(8), 6))


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_seeding_for_a_step_is_torchs_and_where_there_is_no_gpu_notes_no_stack_for_one(monkeypatch, has_accelerator):
    noted = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", noted.append)
    monkeypatch.setattr(data, "_has_accelerator", lambda: has_accelerator)
    torch.manual_seed(7)
    expected = torch.rand(3)
    noted.clear()
    data.seed_everything(7)
    assert torch.equal(torch.rand(3), expected)
    assert noted == [7] * has_accelerator


def test_a_gpu_that_is_there_is_seeded_and_one_that_is_not_is_none(monkeypatch):
    for kind, num_devices, has_accelerator in (
        ("cuda", 0, False),
        ("cuda", 1, True),
        ("mps", 0, True),
        (None, 0, False),
    ):
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda found=found: found)
        monkeypatch.setattr(torch.cuda, "device_count", lambda num=num_devices: num)
        assert data._has_accelerator.__wrapped__() is has_accelerator


place_of_a_batch = st.tuples(st.integers(0, 2**20), st.integers(0, 500), st.integers(0, 2**31))  # seed, rank, batch


@given(place_of_a_batch, place_of_a_batch)
def test_another_run_rank_or_batch_has_other_random_numbers(one_place: Any, other_place: Any) -> None:
    """As drawn: torch's generator of the CPU uses only a part of its seed."""
    state = torch.get_rng_state()
    drawn = []
    for place_of in (one_place, other_place):
        seed_everything(step_seed(*place_of))
        drawn.append(torch.rand(4).tolist())
    torch.set_rng_state(state)
    assert (drawn[0] == drawn[1]) == (one_place == other_place)


class Noisy(Dataset):
    """Samples with an augmentation, made in a loader process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def test_loader_processes_of_two_ranks_augment_differently() -> None:
    shares = Shares(Noisy(), 4, seed=1)
    first, second = (next(sharded_batches(shares, lambda i=i: (2, i), 0, num_workers=1))[0] for i in range(2))
    assert not torch.equal(first, second)


SOURCES = {
    "torch": lambda: torch.randperm(20).tolist(),
    "random": lambda: random.sample(range(20), 20),
    "numpy": lambda: np.random.permutation(20).tolist(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_ranks_divide_what_a_sampler_draws_from_any_generator(source: str) -> None:
    class Drawn:
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Any:
            return iter(SOURCES[source]())

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    shares = Shares(tensors_of(20), 5, seed=3, sampler=Drawn())
    found = [[numbers([batch]) for batch, _ in itertools.islice(sharded_batches(shares, lambda i=i: (2, i), 0), 4)]
             for i in range(2)]  # fmt: skip
    epochs = [sorted(itertools.chain(*found[0][i : i + 2], *found[1][i : i + 2])) for i in (0, 2)]
    assert epochs == [list(range(20))] * 2
    assert found[0][:2] != found[0][2:]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
