"""Which batches a step was made of, in loops that fetch before they use, and how many are left."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from paramserver.common.config.schema import Config, RunConfig
from paramserver.common.errors import UsageError
from paramserver.worker.training.alone import AloneSession


def session(steps: int) -> tuple[AloneSession, torch.nn.Module, torch.optim.Optimizer]:
    one, model = AloneSession(Config(run=RunConfig(steps=steps))), torch.nn.Linear(1, 1)
    return one, model, one.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))


def data(num_samples: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples).float().unsqueeze(1))


def use(model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
    model(batch[0]).sum().backward()


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_may_fetch_ahead_and_takes_all_steps(num_ahead: int, accumulate: int) -> None:
    run, model, optimizer = session(steps=5)
    batches = run.shard(data(), batch_size=4)
    held: list[list[torch.Tensor]] = []
    num_used, taken = 0, []
    while True:
        held += [batch for _ in range(num_ahead + 1 - len(held)) if (batch := next(batches, None)) is not None]
        if not held:
            break
        use(model, held.pop(0))
        num_used += 1
        if num_used % accumulate == 0:
            optimizer.step()
            taken.append(run._taken.place)
    assert taken == [accumulate * step for step in range(1, 6)], "the place counts what was used"
    assert num_used == 5 * accumulate, "and no batch was asked for that no step needs"
    assert run.is_done


def test_a_loop_that_fetches_a_whole_step_at_once() -> None:
    """As the Trainer of transformers does when it accumulates."""
    run, model, optimizer = session(steps=4)
    batches = run.shard(data(), batch_size=4)
    while fetched := [batch for _ in range(3) if (batch := next(batches, None)) is not None]:
        for batch in fetched:
            use(model, batch)
        optimizer.step()
    assert (run.num_steps, run._taken.place, run.num_samples) == (4, 12, 40)


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
    assert (run.num_steps, run._taken.place) == (3, 4)


def test_two_loops_side_by_side_are_at_one_place() -> None:
    run, model, optimizer = session(steps=4)
    for one, other in zip(run.shard(data(), batch_size=4), run.shard(data(6), batch_size=2), strict=False):
        use(model, one)
        use(model, other)
        optimizer.step()
    assert run._taken.place == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_sampler": [[0], [1]]}, "cannot follow a batch_sampler of yours"),
        ({"sampler": DistributedSampler(range(10), 2, 0)}, "divides the data itself, and so does a DistributedSampler"),
        ({"sampler": iter([1, 2])}, "list_iterator has no length"),
    ],
)
def test_what_divides_by_itself_is_refused_with_what_to_use(options: dict, said: str) -> None:
    run, _, _ = session(steps=1)
    with pytest.raises(UsageError, match=said) as refused:
        run.shard(data(), batch_size=4, **options)
    assert refused.value.fix


def test_without_shuffling_the_samples_come_in_their_order() -> None:
    run, model, optimizer = session(steps=3)
    found = []
    for batch in run.shard(data(), batch_size=4, shuffle=False):
        found += batch[0].flatten().tolist()
        use(model, batch)
        optimizer.step()
    assert found == list(range(10))


def test_batches_before_an_optimizer_are_a_mistake_that_is_said() -> None:
    with pytest.raises(UsageError, match=r"session.shard\(\) before session.optimizer\(\)"):
        AloneSession(Config()).shard(data())


def test_a_validation_loop_is_not_training_data() -> None:
    """Its batches would move this rank's place in the data it trains on."""
    one, *_ = session(steps=8)
    batches = one.shard(data(), batch_size=2)
    with torch.no_grad(), pytest.raises(UsageError, match=r"under torch\.no_grad"):
        next(iter(one.shard(data(), batch_size=2)))
    next(batches)
