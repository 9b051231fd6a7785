"""What each aggregation withstands: sync with five workers, some of which send their gradient negated, times ten.

Policy and store are driven directly, in this process, as in `test_sync_equals_union.py`. Every worker computes the
gradient of its own samples, so the honest ones differ by chance as they do in training.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

from paramserver.common.config.sections.training import StoreConfig
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import AGGREGATIONS
from paramserver.common.tensors.optimizers import describe_optimizers
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Commit, Fold
from paramserver.ps.tensors.store import Step, Store, StoreOptions

from ..records import contribution_of
from .replica import Replica

NUM_WORKERS = 5
NUM_STEPS = 150
BATCH = 32  # samples of each worker in one step
NUM_CLASSES = 4
LIE = -10.0
CHANCE = math.log(NUM_CLASSES)  # loss of a model that knows nothing
LEARNED, DIVERGED = 0.25, 100 * CHANCE

# Final loss with 0, 1, 2 and 3 of five workers lying, as measured; chance is 1.386.
#                     0        1        2        3
# mean            0.173     1055     3165     5237
# trimmed_mean 1  0.174    0.179     2348     5740
# trimmed_mean 2  0.175    0.179    0.210     8859
# median          0.175    0.179    0.210     8859


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, NUM_CLASSES))


def make_data(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [num_samples, 8] around a centre per class, and the classes [num_samples]."""
    centres = 1.5 * torch.randn(NUM_CLASSES, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
    return centres[classes] + torch.randn(num_samples, 8, generator=generator), classes


class Worker(Replica):
    """What it sends is its gradient times `factor`."""

    def __init__(self, rank: int, factor: float) -> None:
        super().__init__(make_model())
        self.rank, self.factor = rank, factor

    def contribution(self, step: int) -> torch.Tensor:
        inputs, classes = make_data(BATCH, seed=1000 * step + self.rank)
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), classes).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(self.factor)
        return self.gather(ContributionKind.GRADIENT)


@cache
def train(aggregation: str, num_liars: int, trim: int = 1, limits: StoreConfig = StoreConfig()) -> float:
    """The loss on fresh samples after NUM_STEPS rounds; the liars have the lowest ranks."""
    workers = [Worker(rank, LIE if rank < num_liars else 1.0) for rank in range(NUM_WORKERS)]
    layout = workers[0].tensors.layout
    spec = describe_optimizers([torch.optim.SGD(workers[0].model.parameters(), lr=0.2)], workers[0].tensors.names)
    options = StoreOptions(aggregation=AGGREGATIONS.load(aggregation), trim=trim, **dict(limits))
    store = Store(layout, workers[0].weights(), spec, options)
    policy = policy_of("sync", {"training_steps": NUM_STEPS, "num_workers": NUM_WORKERS})
    for worker in workers:
        policy.joined(worker.rank, 0.0)
    staged: dict[int, torch.Tensor] = {}
    for step in range(NUM_STEPS):
        for worker in workers:
            payload = staged[worker.rank] = worker.contribution(step)
            if not store.sanity.examine(payload, store.weights).is_taken:
                return math.inf  # NaN: as lost as can be
            for decision in policy.contributed(worker.rank, contribution_of(step + 1, policy.version, BATCH), 0.0):
                if isinstance(decision, Fold):
                    store.fold(staged.pop(decision.rank), decision.weight, decision.rank)
                elif isinstance(decision, Commit):
                    store.commit(Step(NUM_WORKERS, 0))
        for worker in workers:
            worker.receive(store.weights)
    assert store.version == NUM_STEPS
    inputs, classes = make_data(2000, seed=1)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(workers[-1].model(inputs), classes).item()
    return loss if math.isfinite(loss) else math.inf


@pytest.mark.parametrize("num_liars", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("aggregation", "trim", "withstands"),
    [("mean", 1, 0), ("trimmed_mean", 1, 1), ("trimmed_mean", 2, 2), ("median", 1, 2)],
)
def test_where_it_breaks_down(aggregation: str, trim: int, withstands: int, num_liars: int) -> None:
    loss = train(aggregation, num_liars, trim)
    if num_liars <= withstands:
        assert loss < LEARNED, f"{aggregation} does not learn with {num_liars} of {NUM_WORKERS} lying: {loss}"
    else:
        assert loss > DIVERGED, f"{aggregation} is said to break down with {num_liars} of {NUM_WORKERS} lying: {loss}"


def test_nothing_is_lost_where_nobody_lies() -> None:
    """To a few percent of the mean's loss, of which the model has come down from chance."""
    mean = train("mean", 0)
    for aggregation, trim in (("trimmed_mean", 1), ("median", 1)):
        assert train(aggregation, 0, trim) == pytest.approx(mean, rel=0.05)


def test_a_cap_on_the_norm_bounds_what_one_liar_does() -> None:
    """The mean then learns with one of five lying, worse than a median; it is no defence against three."""
    capped = StoreConfig(max_norm=0.3, on_large="clip")
    assert train("median", 1) < train("mean", 1, limits=capped) < LEARNED
    assert train("mean", 3, limits=capped) > CHANCE
