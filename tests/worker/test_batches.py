"""Which batches a step was made of, in loops that fetch before they use, and how many are left."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from paramserver.common.config.schema import Config, RunConfig
from paramserver.common.errors import UsageError
from paramserver.worker.training.alone import AloneSession
from paramserver.worker.training.batches import digest_of
from paramserver.worker.training.position.loaders import Source, source_of


def session(steps: int) -> tuple[AloneSession, torch.nn.Module, torch.optim.Optimizer]:
    item, model = AloneSession(Config(run=RunConfig(steps=steps))), torch.nn.Linear(1, 1)
    return item, model, item.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))


def data(num_samples: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples).float().unsqueeze(1))


def use(model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
    model(batch[0]).sum().backward()


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_may_fetch_ahead_and_takes_all_steps(num_ahead: int, accumulate: int) -> None:
    run, model, optimizer = session(steps=5)
    batches = run.shard(data(), batch_size=4)
    fetched: list[list[torch.Tensor]] = []
    num_used, taken = 0, []
    while True:
        fetched += [batch for _ in range(num_ahead + 1 - len(fetched)) if (batch := next(batches, None)) is not None]
        if not fetched:
            break
        use(model, fetched.pop(0))
        num_used += 1
        if num_used % accumulate == 0:
            optimizer.step()
            taken.append(run._data.position)
    assert taken == [accumulate * step for step in range(1, 6)], "the place counts what was used"
    assert num_used == 5 * accumulate, "and no batch was asked for that no step needs"
    assert run.is_done


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_a_backward_pass_need_not_reach_every_parameter(num_ahead: int) -> None:
    """As in a mixture of experts."""
    run = AloneSession(Config(run=RunConfig(steps=6)))
    experts = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    optimizer = run.optimizer(experts, torch.optim.SGD(experts.parameters(), lr=0.01))
    batches = run.shard(data(), batch_size=4)
    fetched, counts = [next(batches) for _ in range(num_ahead)], []
    while (batch := next(batches, None)) is not None or fetched:
        fetched += [] if batch is None else [batch]
        use(experts[len(counts) % 2], fetched.pop(0))
        optimizer.step()
        counts.append(run.num_samples)
    assert counts == [4, 8, 10, 14, 18, 20]


def test_a_model_without_trained_parameters() -> None:
    run = AloneSession(Config(run=RunConfig(steps=3)))
    model = torch.nn.Linear(1, 1).requires_grad_(False)
    optimizer = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in run.shard(data(), batch_size=4):
        optimizer.step()
    assert (run.step, run.num_samples) == (3, 10)


def test_a_loop_that_fetches_a_whole_step_at_once() -> None:
    """As the Trainer of transformers does when it accumulates."""
    run, model, optimizer = session(steps=4)
    batches = run.shard(data(), batch_size=4)
    while fetched := [batch for _ in range(3) if (batch := next(batches, None)) is not None]:
        for batch in fetched:
            use(model, batch)
        optimizer.step()
    assert (run.step, run._data.position, run.num_samples) == (4, 12, 40)


def test_the_length_is_what_is_left_of_the_run() -> None:
    run, model, optimizer = session(steps=6)
    batches = run.shard(data(), batch_size=4)
    assert len(batches) == 6
    for step in range(2):
        for left in ((6, 5), (10, 9))[step]:
            assert len(batches) == left, "once a step has shown that it accumulates two, there are twice as many"
            use(model, next(batches))
        optimizer.step()
    assert len(batches) == 8


def test_batches_without_a_step_belong_to_the_next_one() -> None:
    """A scaler that found infinities, a loss that was skipped."""
    run, model, optimizer = session(steps=3)
    for number, batch in enumerate(run.shard(data(), batch_size=4)):
        use(model, batch)
        if number != 1:
            optimizer.step()
    assert (run.step, run._data.position) == (3, 4)


@pytest.mark.parametrize("is_reused", [False, True])
def test_an_epoch_has_all_its_batches_if_the_last_step_before_lacks_some(is_reused: bool) -> None:
    """A loop over shard() in each epoch, five batches, and a step of two."""
    run, model = AloneSession(Config()), torch.nn.Linear(1, 1)
    optimizer = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    reused, seen = run.shard(data(10), batch_size=2), []
    for _ in range(4):
        numbers: list[float] = []
        for number, (batch,) in enumerate(reused if is_reused else run.shard(data(10), batch_size=2)):
            model(batch).sum().backward()
            numbers += batch.flatten().tolist()
            if number % 2:
                optimizer.step()
        seen.append(sorted(numbers))
    assert seen == [[float(number) for number in range(10)]] * 4
    assert run.step == 8


def test_two_loops_side_by_side_are_at_one_place() -> None:
    run, model, optimizer = session(steps=4)
    for item, other in zip(run.shard(data(), batch_size=4), run.shard(data(6), batch_size=2), strict=False):
        use(model, item)
        use(model, other)
        optimizer.step()
    assert run._data.position == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sampler": [[0], [1]]}, "cannot use a batch_sampler"),
        ({"sampler": DistributedSampler(range(10), 2, 0)}, "divides the data itself, and so does a DistributedSampler"),
        ({"sampler": iter([1, 2])}, "list_iterator has no length"),
    ],
)
def test_what_divides_by_itself_is_refused_with_what_to_use(options: dict, message: str) -> None:
    run, _, _ = session(steps=1)
    with pytest.raises(UsageError, match=message) as refused:
        run.shard(data(), batch_size=4, **options)
    assert refused.value.fix


class Numbers(IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


def summed(samples: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([item for (item,) in samples]).cumsum(0)]


def drawn(run: AloneSession, *args: object, **options: object) -> list[list[float]]:
    """The numbers of each batch of a run."""
    found = []
    for batch in run.shard(*args, **options):
        found.append((batch[0] if isinstance(batch, list) else batch).flatten().tolist())
        run._data.step()
        run._progress.training_steps += 1
    return found


@pytest.mark.parametrize(
    ("of_loader", "as_told"),
    [
        ({"shuffle": True}, {}),
        ({"shuffle": True, "generator": torch.Generator().manual_seed(5)}, {}),  # the order is the run's
        ({}, {"shuffle": False}),
        ({"shuffle": True, "drop_last": True}, {"drop_last": True}),
        ({"collate_fn": summed}, {"collate_fn": summed, "shuffle": False}),
        ({"shuffle": True, "num_workers": 1, "persistent_workers": True}, {"num_workers": 1}),
        ({"sampler": SubsetRandomSampler([7, 8, 9])}, {"sampler": SubsetRandomSampler([7, 8, 9])}),
        ({"sampler": RandomSampler(range(10), True, 6)}, {"sampler": RandomSampler(range(10), True, 6)}),
        ({"sampler": SequentialSampler(range(3))}, {"sampler": range(3)}),
    ],
)
def test_a_data_loader_is_divided_as_its_data_set(of_loader: dict, as_told: dict) -> None:
    loader, torch_seed = DataLoader(data(), 4, **of_loader), torch.get_rng_state()
    found = drawn(session(steps=6)[0], loader)
    torch.set_rng_state(torch_seed)
    assert found == drawn(session(steps=6)[0], data(), 4, **as_told)
    assert max(map(len, found)) <= 4, "a batch of samples, not of batches"


def test_a_data_loader_of_a_stream_is_divided_as_the_stream() -> None:
    found = drawn(session(steps=6)[0], DataLoader(Numbers(), batch_size=3, drop_last=True))
    assert found == drawn(session(steps=6)[0], Numbers(), 3, drop_last=True)


def test_all_options_of_a_data_loader_are_taken_over() -> None:
    settings = {
        "num_workers": 2, "pin_memory": True, "timeout": 7, "worker_init_fn": print, "prefetch_factor": 3,
        "persistent_workers": True, "generator": torch.Generator(), "collate_fn": summed, "in_order": False,
    }  # fmt: skip
    found = source_of(Source(DataLoader(data(), 4, multiprocessing_context="spawn", **settings)))
    assert found.options.pop("multiprocessing_context").get_start_method() == "spawn"
    assert found.options == settings and found.batch_size == 4
    assert source_of(Source(DataLoader(data(), 4))).options == {}


class Endless(DataLoader):
    def __iter__(self):
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize(
    ("loader", "given", "message"),
    [
        (DataLoader(data(), batch_sampler=BatchSampler(range(9), 3, True)), {}, r"batch_sampler of its own \(BatchSa"),
        (DataLoader(data(), batch_size=None), {}, "batch_size=None, whose data set makes the batches"),
        (Endless(data(), 4), {}, "Endless, which iterates in a way of its own"),
        (DataLoader(data(), 4, sampler=DistributedSampler(range(10), 2, 0)), {}, "so does a DistributedSampler"),
        (DataLoader(data(), 4), {"batch_size": 8}, r"shard\(batch_size=8\) of a DataLoader whose batch_size is 4"),
        (DataLoader(data(), 4, shuffle=True), {"shuffle": False}, "whose shuffle is True"),
        (DataLoader(data(), 4), {"drop_last": True}, "whose drop_last is False"),
        (DataLoader(data(), 4), {"num_workers": 2}, "whose num_workers is 0"),
        (DataLoader(data(), 4), {"sampler": range(4)}, "whose sampler is <torch"),
        (DataLoader(Numbers(), 4, num_workers=2), {}, "2 loader processes would each read all of it"),
    ],
)
def test_what_a_data_loader_does_that_cannot_be_taken_over_is_refused(
    loader: DataLoader, given: dict, message: str
) -> None:
    run, _, _ = session(steps=1)
    with pytest.raises(UsageError, match=message) as refused:
        run.shard(loader, **given)
    assert refused.value.fix


def test_what_a_data_loader_says_already_may_be_said_again() -> None:
    run, _, _ = session(steps=1)
    run.shard(DataLoader(data(), 4), 4, shuffle=False, num_workers=0, pad=True)


def test_batches_before_an_optimizer_are_a_mistake_that_is_said() -> None:
    with pytest.raises(UsageError, match=r"state\(\) was called before session.optimizer\(\)"):
        AloneSession(Config()).shard(data())


def test_a_validation_loop_is_not_training_data() -> None:
    """Its batches would move this rank's place in the data it trains on."""
    item, *_ = session(steps=8)
    batches = item.shard(data(), batch_size=2)
    with torch.no_grad(), pytest.raises(UsageError, match=r"under torch\.no_grad"):
        next(iter(item.shard(data(), batch_size=2)))
    next(batches)


def test_a_digest_tells_gradients_apart_beyond_their_beginnings_and_knows_none_of_zeros() -> None:
    item = torch.zeros(1000, 4)
    assert digest_of([item, torch.zeros(3)]) == digest_of([]) == 0
    item[900] = 1.0
    other = item.clone()
    assert digest_of([item]) == digest_of([other]) != 0
    other[901] = 0.5
    assert digest_of([item]) != digest_of([other])
