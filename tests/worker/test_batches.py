"""What a loop over `session.shard()` says about itself, and which batches a step is made of."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

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
from paramserver.worker.training.position.sources import source_of


def session(steps: int) -> tuple[AloneSession, torch.nn.Module, torch.optim.Optimizer]:
    item, model = AloneSession(Config(run=RunConfig(steps=steps))), torch.nn.Linear(1, 1)
    return item, model, item.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))


def data(num_samples: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples).float().unsqueeze(1))


def position(run: AloneSession) -> int:
    return run._memory.data.position


def use(model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
    model(batch[0]).sum().backward()


def ahead(batches: Iterator, num: int) -> Iterator:
    """Fetches `num` batches before it gives the first."""
    fetched = deque(itertools.islice(batches, num))
    for batch in batches:
        fetched.append(batch)
        yield fetched.popleft()
    yield from fetched


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_may_fetch_ahead_and_takes_all_steps(num_ahead: int, accumulate: int) -> None:
    run, model, optimizer = session(steps=5)
    batches = run.shard(data(), batch_size=4, accumulate=accumulate, prefetch=num_ahead, epochs=None)
    assert len(batches) == batches.remaining == 5 * accumulate
    taken = []
    for number, batch in enumerate(ahead(iter(batches), num_ahead), 1):
        use(model, batch)
        if number % accumulate == 0:
            optimizer.step()
            taken.append(position(run))
    assert taken == [accumulate * step for step in range(1, 6)], "the place counts what was used"
    assert number == 5 * accumulate == len(batches), "and no batch was asked for that no step needs"
    assert run.is_done and batches.remaining == 0


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_what_the_model_does_with_a_batch_decides_nothing(num_ahead: int) -> None:
    """Several backward passes for a batch, as of microbatches; none; a part of the parameters."""
    run = AloneSession(Config(run=RunConfig(steps=6)))
    experts = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).requires_grad_(False)])
    optimizer = run.optimizer(experts, torch.optim.SGD(experts.parameters(), lr=0.01))
    counts = []
    for number, batch in enumerate(ahead(iter(run.shard(data(), 4, prefetch=num_ahead, epochs=2)), num_ahead)):
        for _ in range(number % 3):
            use(experts[0], batch)
        optimizer.step()
        counts.append(run.alone.row.samples)
    assert counts == [4, 8, 10, 14, 18, 20]


def test_a_second_step_on_a_batch_is_said() -> None:
    run, model, optimizer = session(steps=4)
    batches = run.shard(data(), 4, epochs=None)
    for batch in batches:
        use(model, batch)
        optimizer.step()
        batches.accumulate = 0
        with pytest.raises(UsageError, match="has no samples, which are its weight"):
            optimizer.step()
        run.record(num_samples=4)
        optimizer.step()
        batches.accumulate = 1
    assert (run.step, position(run), run.alone.row.samples) == (4, 2, 16)
    run, model, optimizer = session(steps=4)
    next(iter(run.shard(data(), 4)))
    optimizer.step()
    with pytest.raises(UsageError, match=r"without a batch of session.shard\(\) since the step before"):
        optimizer.step()


def test_steps_of_several_optimizers_on_a_batch_need_no_word() -> None:
    run = AloneSession(Config(run=RunConfig(steps=4)))
    parts = {name: torch.nn.Linear(1, 1) for name in ("first", "second")}
    optimizers = run.optimizers(
        **{name: (part, torch.optim.SGD(part.parameters(), lr=0.01)) for name, part in parts.items()}
    )
    batches = run.shard(source := data(), 4)
    assert batches.dataset is source
    for _ in batches:
        for optimizer in (*optimizers, optimizers[1]):
            optimizer.step()
    assert run.alone.row.samples == 10
    batches.accumulate = 0
    with pytest.raises(UsageError, match=r"accumulate = 0 with session.optimizers\(\)"):
        optimizers[0].step()


def test_a_step_may_use_another_number_of_batches_than_the_one_before() -> None:
    run, model, optimizer = session(steps=4)
    batches, num = run.shard(data(40), 2, epochs=None), 0
    for batch in batches:
        use(model, batch)
        num += 1
        if num == batches.accumulate:
            optimizer.step()
            batches.accumulate, num = batches.accumulate + 1, 0
    assert (run.step, position(run), run.alone.row.samples) == (4, 10, 20)


def test_the_length_is_that_of_a_loop_and_what_remains_is_another_number() -> None:
    run, model, optimizer = session(steps=100)
    batches = run.shard(data(), batch_size=4)
    for epoch in range(2):
        assert len(batches) == 3 and batches.remaining == (0 if epoch else 3)
        for number, batch in enumerate(batches):
            assert (len(batches), batches.remaining) == (3, 2 - number)
            use(model, batch)
            optimizer.step()
    assert run.step == 6


def test_a_dropped_batch_is_used_up_and_has_no_weight() -> None:
    run, model, optimizer = session(steps=3)
    for number, batch in enumerate(run.shard(data(40), batch_size=4)):
        if number == 1:
            run.skip()
            continue
        use(model, batch)
        optimizer.step()
    assert (run.step, position(run), run.alone.row.samples) == (3, 4, 12)


def test_a_batch_that_is_taken_before_the_loop_was_yielded() -> None:
    run, model, optimizer = session(steps=100)
    batches = run.shard(data(), batch_size=4, shuffle=False)
    first, seen = next(iter(batches)), []
    for batch in batches:
        use(model, batch)
        with pytest.raises(UsageError, match=r"2 yielded, 0 used"):
            optimizer.step()
        run.skip()
        seen.append(batch[0].flatten().tolist())
        optimizer.step()
        break
    assert len(first[0]) == 4 and seen == [[0, 1, 2, 3]]


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_scaler_that_is_not_the_session_s_is_refused_by_name(options: dict) -> None:
    run, model = AloneSession(Config(run=RunConfig(steps=3))), torch.nn.Linear(1, 1)
    optimizer = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01, **options))
    scaler = torch.amp.GradScaler("cpu")
    (batch,) = next(iter(run.shard(data(40), batch_size=4)))
    scaler.scale(model(batch).sum()).backward()
    with pytest.raises(UsageError, match="GradScaler on the optimizer") as refused:
        scaler.step(optimizer)
    assert "session.scaler" in refused.value.fix
    run.watched(scaler)
    assert not optimizer._step_supports_amp_scaling, "Lightning asks too, before it unscales"
    scaler.step(optimizer)
    assert run.step == 1


def test_recorded_samples_replace_those_of_the_step_s_batches(recwarn: pytest.WarningsRecorder) -> None:
    """As of a mean over tokens; the next step counts those of its batches again."""
    run, model, optimizer = session(steps=4)
    counts = []
    for number, batch in enumerate(run.shard(data(16), batch_size=2, accumulate=2)):
        (loss := model(batch[0]).sum()).backward()
        if number in (2, 3):
            run.record(loss=loss, num_samples=100)
        if number % 2:
            optimizer.step()
            counts.append(run.alone.row.samples)
    assert counts == [4, 204, 208, 212]
    assert (type(run.alone.loss), len(recwarn)) == (float, 0)


@pytest.mark.parametrize("is_reused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_is_a_pass_with_all_its_batches(is_reused: bool, accumulate: int) -> None:
    """Five batches. The last step of a pass of two batches each uses one."""
    run, model = AloneSession(Config()), torch.nn.Linear(1, 1)
    optimizer = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    make = lambda: run.shard(data(10), batch_size=2, accumulate=accumulate)  # noqa: E731
    reused, seen = make(), []
    for _ in range(4):
        numbers: list[float] = []
        batches = reused if is_reused else make()
        for number, (batch,) in enumerate(batches, 1):
            model(batch).sum().backward()
            numbers += batch.flatten().tolist()
            if number % accumulate == 0 or number == len(batches):
                optimizer.step()
        seen.append(numbers)
    assert [sorted(numbers) for numbers in seen] == [[float(number) for number in range(10)]] * 4
    assert len({tuple(numbers) for numbers in seen}) == 4, "each in an order of its own"
    assert run.step == 4 * -(-5 // accumulate)


def test_a_pass_that_is_left_early_is_over() -> None:
    run, model, optimizer = session(steps=100)
    batches, seen = run.shard(data(12), batch_size=4, shuffle=False), []
    for _ in range(2):
        for number, batch in enumerate(batches):
            if number == 1:
                run.skip()
                break
            seen.append(batch[0][0].item())
            use(model, batch)
            optimizer.step()
    assert seen == [0.0, 0.0] and position(run) == 5


def test_two_loops_side_by_side_have_a_position_each() -> None:
    """Labelled and unlabelled data; the shorter one ends the loop, and the other has yielded one more."""
    run, model, optimizer = session(steps=100)
    labelled, other = run.shard(data(8), 4, shuffle=False), run.shard(data(12), 2, accumulate=2, shuffle=False)
    seen = []
    for _ in range(2):
        rest = iter(other)
        for batch in labelled:
            pair = [next(rest), next(rest)]
            seen.append([item[0][0].item() for item in (batch, *pair)])
            for item in (batch, *pair):
                use(model, item)
            optimizer.step()
    assert seen == [[0, 0, 2], [4, 4, 6]] * 2
    assert [cursor.position for cursor in run._memory.data.cursors] == [4, 10]
    assert (position(run), run.alone.row.samples) == (14, 32)


def test_two_loops_over_one_shard_at_once_are_refused() -> None:
    run, _, _ = session(steps=100)
    batches = run.shard(data(12), 4)
    first = iter(batches)
    next(first)
    next(iter(batches))
    with pytest.raises(UsageError, match=r"two loops over one session.shard\(\) at once") as refused:
        next(first)
    assert "once for each of the loops" in (refused.value.fix or "")


def test_a_data_set_that_changes_its_length_is_refused() -> None:
    run, model, optimizer = session(steps=100)
    growing = Growing()
    batches = run.shard(growing, 4)
    for batch in batches:
        use(model, [batch])
        optimizer.step()
    growing.num_samples += 1
    with pytest.raises(UsageError, match=r"had 8 samples, and has 9 now"):
        next(iter(batches))


class Growing(torch.utils.data.Dataset):
    num_samples = 8

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


def test_a_loop_without_an_end_needs_one_from_the_run() -> None:
    run = AloneSession(Config())
    model = torch.nn.Linear(1, 1)
    run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(UsageError, match="goes on until the run ends, and the run has no length") as refused:
        run.shard(data(), 4, epochs=None)
    assert "--steps N" in (refused.value.fix or "")


def test_a_stream_has_no_length_unless_its_loop_ends_with_the_run() -> None:
    run, _, _ = session(steps=7)
    with pytest.raises(TypeError, match="Numbers has no length") as refused:
        len(run.shard(Numbers(), 4))
    assert isinstance(refused.value, UsageError)
    assert len(run.shard(Numbers(), 4, epochs=None, accumulate=2)) == 14


def test_a_loop_over_a_stream_is_a_pass() -> None:
    run, _, optimizer = session(steps=100)
    batches, seen = run.shard(Numbers(), 4), []
    for _ in range(2):
        for batch in batches:
            seen.append(batch.tolist())
            optimizer.step()
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2


def test_an_order_longer_than_memory_is_drawn_as_it_is_needed() -> None:
    run, model, optimizer = session(steps=3)
    order = RandomSampler(range(10), True, 10**10)
    seen = []
    for batch in run.shard(data(), 4, sampler=order):
        use(model, batch)
        optimizer.step()
        seen.append(batch[0].flatten().tolist())
    run, model, optimizer = session(steps=3)
    assert seen == drawn(run, data(), 4, sampler=RandomSampler(range(10), True, 10**10))
    assert len(seen) == 3


@pytest.mark.parametrize("num", [-1, 1.5, True, "2"])
@pytest.mark.parametrize("name", ["accumulate", "prefetch", "epochs"])
def test_numbers_of_batches_are_whole(name: str, num: object) -> None:
    run, _, _ = session(steps=3)
    with pytest.raises(UsageError, match=rf"session.shard\({name}="):
        run.shard(data(), 4, **{name: num})


class Numbers(IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


def summed(samples: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([item for (item,) in samples]).cumsum(0)]


def drawn(run: AloneSession, *args: object, **options: object) -> list[list[float]]:
    """The numbers of each batch of a run."""
    found = []
    for batch in run.shard(*args, epochs=None, **options):
        found.append((batch[0] if isinstance(batch, list) else batch).flatten().tolist())
        run._steps.parts[0].step()
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
    plain = {"batch_size": 4, "shuffle": False, "drop_last": False, "sampler": None}
    _, found = source_of(DataLoader(data(), 4, multiprocessing_context="spawn", **settings), {})
    assert found.pop("multiprocessing_context").get_start_method() == "spawn"
    assert found == plain | settings
    assert source_of(DataLoader(data(), 4), {})[1] == plain


class Endless(DataLoader):
    def __iter__(self):
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize(
    ("dataset", "given", "message"),
    [
        (data(), {"batch_sampler": [[0], [1]]}, "cannot use a batch_sampler"),
        (data(), {"sampler": DistributedSampler(range(10), 2, 0)}, "divides the data itself, and so does a Distribut"),
        (data(), {"sampler": iter([1, 2])}, "list_iterator has no length"),
        (Numbers(), {"batch_size": 2, "num_workers": 2}, "2 loader processes may each read all of it"),
        (Numbers(), {"batch_size": 2, "pad": True}, r"has no length, and session.shard\(pad=...\) needs one"),
        (Numbers(), {"batch_size": 2, "sampler": [1, 2]}, r"has no length, and session.shard\(sampler=...\) needs one"),
        (DataLoader(data(), batch_sampler=BatchSampler(range(9), 3, True)), {}, r"batch_sampler of its own \(BatchSa"),
        (DataLoader(data(), batch_size=None), {}, "batch_size=None, whose data set makes the batches"),
        (Endless(data(), 4), {}, "Endless, which iterates in a way of its own"),
        (DataLoader(data(), 4, sampler=DistributedSampler(range(10), 2, 0)), {}, "so does a DistributedSampler"),
        (DataLoader(data(), 4), {"batch_size": 8}, r"shard\(batch_size=8\) of a DataLoader whose batch_size is 4"),
        (DataLoader(data(), 4, shuffle=True), {"shuffle": False}, "whose shuffle is True"),
        (DataLoader(data(), 4), {"drop_last": True}, "whose drop_last is False"),
        (DataLoader(data(), 4), {"num_workers": 2}, "whose num_workers is 0"),
        (DataLoader(data(), 4), {"sampler": range(4)}, "whose sampler is <torch"),
        (DataLoader(Numbers(), 4, num_workers=2), {}, "2 loader processes may each read all of it"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_to_use(dataset: Any, given: dict, message: str) -> None:
    run, _, _ = session(steps=1)
    with pytest.raises(UsageError, match=message) as refused:
        run.shard(dataset, **given)
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
        next(iter(batches))
    next(iter(batches))


def test_a_digest_tells_gradients_apart_beyond_their_beginnings_and_knows_none_of_zeros() -> None:
    item = torch.zeros(1000, 4)
    assert digest_of([item, torch.zeros(3)]) == digest_of([]) == 0
    item[900] = 1.0
    other = item.clone()
    assert digest_of([item]) == digest_of([other]) != 0
    other[901] = 0.5
    assert digest_of([item]) != digest_of([other])
