"""How a trainer's loader is divided, and what is said where a trainer is missing."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from paramserver.common.errors import UsageError
from paramserver.integrations.data import RankSampler, divide, num_samples_in


def session(rank: int, num_workers: int = 2, is_done: bool = False):
    settings = SimpleNamespace(num_workers=num_workers, seed=5)
    return SimpleNamespace(rank=rank, settings=settings, is_done=is_done, is_over=lambda: is_done)


def shares(make, num_workers: int = 2, epoch: int = 0) -> list[list[int]]:
    found = []
    for rank in range(num_workers):
        torch.manual_seed(rank)  # whatever each has seeded
        sampler = RankSampler(make(), session(rank, num_workers))
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(20)),
        lambda: RandomSampler(range(20), generator=torch.Generator()),
        lambda: SequentialSampler(range(20)),
    ],
)
def test_shares_are_equal_and_together_all_samples(make, num_workers: int):
    first, again, next_epoch = shares(make, num_workers), shares(make, num_workers), shares(make, num_workers, epoch=1)
    assert first == again
    assert {len(share) for share in first} == {-(-20 // num_workers)}
    assert {sample for share in first for sample in share} == set(range(20))
    assert (first == next_epoch) == isinstance(make(), SequentialSampler)


def test_a_sampler_that_draws_by_weight_draws_the_same_on_all_ranks():
    weights = torch.arange(1.0, 21.0)
    torch.manual_seed(0)
    whole = shares(lambda: WeightedRandomSampler(weights, 20), 1)[0]
    divided = shares(lambda: WeightedRandomSampler(weights, 20))
    assert [sample for pair in zip(*divided, strict=True) for sample in pair] == whole


def test_an_order_is_drawn_without_a_change_to_any_generator(monkeypatch: pytest.MonkeyPatch):
    """A GPU's generator with the same state on all ranks would give them the same dropout in each epoch."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    state = torch.get_rng_state()
    assert sorted(RankSampler(RandomSampler(range(20)), session(0, 1))) == list(range(20))
    assert torch.equal(torch.get_rng_state(), state) and seeded == []


def test_a_worker_that_comes_later_begins_where_its_rank_was():
    """12 batches of 2 an epoch, 2 to a step: step 8 is the third of the second epoch."""
    loader = DataLoader(range(48), batch_size=2)
    share = divide(loader, session(1))
    assert share is not None and divide(loader, session(1)) is share and len(loader) == 12
    share.go_to(8, 0, loader, accumulate=2)
    assert list(share) == list(range(1, 48, 2))[8:]
    assert share._first_epoch == 1
    assert list(share) == list(range(1, 48, 2)), "the next epoch is whole"


def test_a_worker_with_a_checkpoint_of_the_middle_of_an_epoch_has_epochs_that_lie_otherwise():
    """4 batches of 2 an epoch: its trainer is at step 3 and skips 3; the run is at 8, where one begins."""
    share = divide(loader := DataLoader(range(16), batch_size=2), session(0))
    share.go_to(8, 3, loader, accumulate=1)
    stream = [*range(0, 16, 2)] * 3
    assert list(share) == stream[10:18], "3 batches before, which are skipped, and the first of the next epoch"
    share.set_epoch(1)
    assert list(share)[:2] == stream[2:4]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_of_a_batch_are_counted_also_where_its_tensors_differ_in_length(num_workers: int, drop_last: bool):
    """Graphs of 3 nodes each, texts, a constant tensor and one packed row: lengths that are no number of samples."""
    collates = {
        "graphs": lambda rows: {"nodes": torch.zeros(3 * len(rows), 2), "y": torch.tensor(rows)},
        "texts": lambda rows: {"text": ["a"] * len(rows)},
        "constant": lambda rows: (torch.zeros(11), torch.tensor(rows)),
    }
    for collate in collates.values():
        loader = DataLoader(range(44), batch_size=8, drop_last=drop_last, collate_fn=collate)
        divide(loader, session(0, num_workers))
        share = 44 // num_workers
        wanted = [8] * (share // 8) + [share % 8] * (not drop_last)
        assert [num_samples_in(batch, loader) for batch in loader] == wanted
    packed = DataLoader(range(48), batch_size=8, collate_fn=lambda rows: torch.zeros(1, 5 * len(rows)))
    assert [num_samples_in(batch, packed) for batch in packed] == [8] * 6


def test_samples_of_a_loader_without_a_batch_size_are_those_of_the_first_tensor():
    batches = DataLoader(range(10), batch_sampler=[[0, 1, 2], [3]])
    assert [num_samples_in(batch, batches) for batch in batches] == [3, 1]


def test_a_run_that_is_over_has_no_more_batches():
    assert list(RankSampler(SequentialSampler(range(4)), session(0, is_done=True))) == []


def test_a_server_that_takes_any_number_of_workers_is_refused():
    with pytest.raises(UsageError, match="any number"):
        divide(DataLoader(range(4)), session(0, num_workers=0))


@pytest.mark.slow
def test_a_missing_trainer_is_one_sentence_with_the_line_that_installs_it():
    code = """
import importlib, sys
for package, extra in (("lightning", "lightning"), ("transformers", "huggingface"), ("accelerate", "accelerate")):
    sys.modules[package] = None
    try:
        importlib.import_module(f"paramserver.integrations.{extra}")
    except ImportError as error:
        print(error)
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        f"pip install 'paramserver[{extra}]'" for extra in ("lightning", "huggingface", "accelerate")
    ]
