"""Tables of rows against torch with sparse gradients, to the bit, and against references of a few lines."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from paramserver.common.errors import UsageError
from paramserver.common.tensors.tables import Table, make_spec, summed

NUM_ROWS, DIM = 40, 3
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.2, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "sparse_adam": (torch.optim.SparseAdam, {"lr": 0.05}),
}


def table(optimizer: str = "sgd", num_rows: int = NUM_ROWS, seed: int = 1, **arguments: float) -> Table:
    return Table(make_spec("items", num_rows, DIM, "float32", 0.5, optimizer, arguments or {"lr": 0.1}), seed)


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids with repeats, and what their rows are multiplied with."""
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(0, NUM_ROWS // 2, (6, 2), generator=generator) for _ in range(number)]
    return [(number, torch.randn(*number.shape, DIM, generator=generator)) for number in ids]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torchs_with_sparse_gradients(name: str) -> None:
    cls, arguments = OPTIMIZERS[name]
    ours = table(name, **arguments)
    embedding = torch.nn.Embedding(NUM_ROWS, DIM, sparse=True, _weight=ours.state()["weight"].clone())
    theirs = cls(embedding.parameters(), **arguments)
    start = ours.state()["weight"].clone()
    for ids, factor in batches(12):
        theirs.zero_grad()
        (embedding(ids) * factor).sum().backward()
        embedding.weight.grad = embedding.weight.grad.coalesce()  # SGD alone does not, and adds what repeats one by one
        theirs.step()
        distinct, where = ids.unique(return_inverse=True)
        rows = ours.rows(distinct).requires_grad_()
        (F.embedding(where, rows) * factor).sum().backward()
        ours.step(distinct, rows.grad)
        assert torch.equal(ours.state()["weight"], embedding.weight.detach())
    assert torch.equal(ours.state()["weight"][NUM_ROWS // 2 :], start[NUM_ROWS // 2 :])


def test_rowwise_adagrad_by_hand() -> None:
    ours = table("rowwise_adagrad", lr=0.2)
    weight, sums = ours.state()["weight"].tolist(), [0.0] * NUM_ROWS
    for ids, factor in batches(5):
        gradient = torch.zeros(NUM_ROWS, DIM).index_add_(0, ids.flatten(), factor.view(-1, DIM))
        for row in ids.unique().tolist():
            item = gradient[row].tolist()
            sums[row] += sum(value**2 for value in item) / DIM
            weight[row] = [
                old - 0.2 * value / (math.sqrt(sums[row]) + 1e-10) for old, value in zip(weight[row], item, strict=True)
            ]
        ours.step(ids.unique(), gradient[ids.unique()])
    assert torch.allclose(ours.state()["weight"], torch.tensor(weight), rtol=1e-5, atol=1e-6)
    assert ours.state()["sum"].shape == (NUM_ROWS,)
    with pytest.raises(TypeError):
        ours.torch.step(lambda: pytest.fail("called after the step"))


@pytest.mark.parametrize("name", [*OPTIMIZERS, "rowwise_adagrad"])
def test_a_table_goes_on_from_its_state(name: str) -> None:
    ours, other = table(name), table(name, seed=2)
    for ids, factor in batches(3):
        ours.step(*summed([(ids.unique(), factor.view(-1, DIM)[: len(ids.unique())], 1.0)]))
    other.set_state({key: value.clone() for key, value in ours.state().items()})
    ids = torch.tensor([0, 5, 39])
    for item in (ours, other):
        item.step(ids, torch.ones(3, DIM), 0.5)
    assert torch.equal(ours.state()["weight"], other.state()["weight"])


def test_another_tables_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight of table 'items' is torch.float32 \[39, 3\]"):
        table().set_state(table(num_rows=39).state())
    with pytest.raises(ValueError, match="is missing"):
        table().set_state({})


def test_first_values_are_the_same_however_the_table_is_divided() -> None:
    whole = make_spec("items", 200_003, 5, "float32", 0.5, "sgd", {})
    values = Table(whole, 3).state()["weight"]
    parts = [Table(whole.part(shard, 3), 3).state()["weight"] for shard in range(3)]
    assert torch.equal(torch.cat(parts), values)
    assert abs(values.mean()) < 0.005 and abs(values.std() - 0.5) < 0.005
    assert (values.abs() < 0.5).float().mean() == pytest.approx(0.68, abs=0.02)  # of a normal distribution
    assert not torch.equal(values, Table(whole, 4).state()["weight"])


def test_the_sum_of_parts() -> None:
    parts = [(torch.tensor([1, 4]), torch.ones(2, 2), 0.5), (torch.tensor([0, 4]), torch.full((2, 2), 2.0), 1.0)]
    ids, values = summed(parts)
    assert ids.tolist() == [0, 1, 4] and values[:, 0].tolist() == [2.0, 0.5, 2.5]


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        ("adamw", {}, "cannot step rows: Adam does not support sparse gradients"),
        ("sgd", {"momentum": 0.9}, "is not one for rows"),
        ("adagrad", {"weight_decay": 0.1}, "weight_decay option is not compatible"),
        ("sgd", {"lrr": 1.0}, "has no argument 'lrr'"),
        ("adagrat", {}, "no optimizer 'adagrat' for rows"),
    ],
)
def test_an_optimizer_that_is_not_one_for_rows_is_refused(optimizer: str, arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_spec("items", 10, 2, "float32", 0.1, optimizer, arguments)


@pytest.mark.parametrize(
    "wrong", [{"num_rows": 0}, {"dim": 0}, {"dim": 1 << 20}, {"dtype": "int64"}, {"init_std": -1.0}]
)
def test_a_table_that_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(UsageError, match="table 'items'"):
        make_spec(**{"name": "items", "num_rows": 9, "dim": 2, "dtype": "float32", "init_std": 0.1, "optimizer": "sgd",
                     "hyperparameters": {}, **wrong})  # fmt: skip
