"""Gradients of rows: what of them is taken, and what a round of them does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.config.schema import Config
from paramserver.common.errors import ParamServerError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec, Reduction
from paramserver.common.tensors.sharding import divide
from paramserver.common.tensors.tables import make_spec
from paramserver.common.wire.frames import parse
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.tensors.model import Model
from paramserver.ps.tensors.store import Rows, Step, Store, StoreOptions, Tables
from paramserver.ps.tensors.thread import TensorThread
from paramserver.worker.conversation.messages import RowGradients, rows_frames

NUM_ROWS, DIM = 12, 2
SPEC = make_spec("items", NUM_ROWS, DIM, "float64", 0.1, "sgd", {"lr": 1.0})


def sent(ids: list[int], values: torch.Tensor) -> memoryview:
    return memoryview(torch.tensor(ids).numpy().tobytes() + values.numpy().tobytes())


ROUND = st.lists(
    st.tuples(st.lists(st.integers(0, NUM_ROWS - 1), unique=True).map(sorted), st.integers(1, 9)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(ROUND, st.integers(0, 1000))
def test_a_round_moves_rows_along_the_mean_of_all_contributions(found: list[tuple[list[int], int]], seed: int) -> None:
    """Those without a gradient for a row count as zeros; also when a contribution came in several messages."""
    generator = torch.Generator().manual_seed(seed)
    tables = Tables([SPEC], 1)
    before, wanted = tables.state()["weight/items"], torch.zeros(NUM_ROWS, DIM, dtype=torch.float64)
    total = sum(weight for _, weight in found)
    for ids, weight in found:
        values = torch.randn(len(ids), DIM, dtype=torch.float64, generator=generator)
        wanted.index_add_(0, torch.tensor(ids, dtype=torch.int64), values * weight / total)
        middle, rows = len(ids) // 2, []
        for here in (slice(middle), slice(middle, None)):
            if ids[here]:
                rows.append(tables.read(0, len(ids[here]), sent(ids[here], values[here]), rows))
        tables.fold(rows, weight)
    tables.commit()
    after = tables.state()["weight/items"]
    assert torch.allclose(after, before - wanted, atol=1e-12)
    touched = {row for ids, _ in found for row in ids}
    assert all(torch.equal(after[row], before[row]) for row in range(NUM_ROWS) if row not in touched)
    tables.commit()  # a commit of nothing
    assert torch.equal(tables.state()["weight/items"], after)


def test_the_learning_rate_of_a_commit_is_scaled() -> None:
    tables = Tables([SPEC], 1)
    before = tables.state()["weight/items"]
    tables.fold([Rows(0, torch.tensor([3]), torch.ones(1, DIM, dtype=torch.float64))], 1)
    tables.commit(0.25)
    assert torch.allclose(before[3] - tables.state()["weight/items"][3], torch.tensor(0.25, dtype=torch.float64))


@pytest.mark.parametrize(
    ("ids", "table", "count", "message"),
    [
        ([1, 1], 0, 2, "not ascending"),
        ([2, 1], 0, 2, "not ascending"),
        ([0, 12], 0, 2, "row 12 of table 'items', which has 0 to 11"),
        ([0, 1], 1, 2, "there is no table 1: this run has 1"),
        ([0, 1], 0, 3, "48 bytes for 3 rows"),
        ([0], 0, 0, "for 0 rows"),
        ([-5], 0, 1, "not ascending"),
    ],
)
def test_what_is_no_part_of_a_contribution_is_refused(ids: list[int], table: int, count: int, message: str) -> None:
    with pytest.raises(ParamServerError, match=message):
        Tables([SPEC], 1).read(table, count, sent(ids, torch.zeros(len(ids), DIM, dtype=torch.float64)), [])


def test_a_row_comes_once_in_a_contribution() -> None:
    tables, item = Tables([SPEC], 1), torch.zeros(1, DIM, dtype=torch.float64)
    first = tables.read(0, 1, sent([4], item), [])
    with pytest.raises(ParamServerError, match="not ascending"):
        tables.read(0, 1, sent([4], item), [first])


def test_rows_are_pulled_in_the_order_asked_for() -> None:
    tables = Tables([SPEC.part(1, 2)], 1)  # rows 6 to 11
    whole = Tables([SPEC], 1).state()["weight/items"]
    ids = torch.tensor([9, 6, 9])
    pulled = torch.frombuffer(bytearray(tables.pull(0, ids.numpy().tobytes(), 1 << 20)), dtype=torch.float64)
    assert torch.equal(pulled.view(3, DIM), whole[ids])
    for wrong in ([5], [12], [-1]):
        with pytest.raises(ParamServerError, match="which has 6 to 11"):
            tables.pull(0, torch.tensor(wrong).numpy().tobytes(), 1 << 20)
    for nothing in (b"", b"123"):
        with pytest.raises(ParamServerError, match="not a list of ids"):
            tables.pull(0, nothing, 1 << 20)
    with pytest.raises(ParamServerError, match="more than 40 bytes"):
        tables.pull(0, ids.numpy().tobytes(), 40)


def test_numbers_may_change_and_nothing_else() -> None:
    of = {lr: make_spec("items", NUM_ROWS, DIM, "float64", 0.1, "sgd", {"lr": lr}) for lr in (1.0, 0.5)}
    first, other = (OptimizerSpec("SGD", (), (of[lr],)) for lr in (1.0, 0.5))
    assert first.new_numbers(other) == [("lr", 1.0, 0.5)]
    assert first.differences(other) == ["table 'items': expected lr=1.0, got 0.5"]
    assert first.new_numbers(OptimizerSpec("SGD", (), ())) is None
    assert first.new_numbers(OptimizerSpec("SGD", (), (replace(SPEC, num_rows=13),))) is None
    tables = Tables([SPEC], 1)
    before = tables.state()["weight/items"]
    tables.change([of[0.5]])
    tables.fold([Rows(0, torch.tensor([3]), torch.ones(1, DIM, dtype=torch.float64))], 1)
    tables.commit()
    assert torch.allclose(before[3] - tables.state()["weight/items"][3], torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"lr": "0.1"}, {"lr": 1e10}, {"momentum": 0.9}, {"lr": 0.1, "eps": 0.1}]
)
def test_what_is_no_learning_rate_of_a_table_is_refused(settings: dict) -> None:
    model = Model(Config(), TensorThread(lambda error: None), make_policy(Config()))
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (3,))])
    model.adopt(layout, OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.1}),), (SPEC,)))
    model.optimizer.check_changes([{"lr": 0.2}, {"lr": 0.2}])
    model.optimizer.check_changes([{}, {}])
    with pytest.raises(ParamServerError, match="is not a learning rate"):
        model.optimizer.check_changes([{}, settings])


@pytest.mark.parametrize(("reduction", "factors"), [("mean", (2.0, 0.0)), ("sum", (0.25, 0.75))])
@pytest.mark.parametrize("bounds", [(3.0, 0.0), (None, 3.0), (5.0, 3.0), (3.0, 5.0)], ids=str)
@pytest.mark.parametrize("shards", [1, 2])
def test_rows_count_in_the_norm_that_a_step_is_clipped_to(
    shards: int, bounds: tuple[float | None, float], reduction: Reduction, factors: tuple[float, float]
) -> None:
    """As clip_grad_norm_ over all that one process with the union batch holds; twice, the second is short enough. The
    bounds are the server's and that of the workers' script. A sum weighs no samples."""
    whole = Layout([TensorSpec("w", Kind.PARAMETER, "float64", (6, 2))])
    spec = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 1.0}),), (SPEC,), reduction)
    parts = divide(whole, shards)
    stores = []
    for share in parts:
        optimizer = share.optimizer(spec)
        weights = torch.zeros(share.layout.total_bytes, dtype=torch.uint8)
        stores.append(
            Store(
                share.layout,
                weights,
                optimizer,
                StoreOptions(clip_norm=bounds[0], is_part=shards > 1),
                Tables(optimizer.tables, 1),
            )
        )
    first = torch.cat([store.tables.state()["weight/items"] for store in stores])
    w, items = torch.nn.Parameter(torch.zeros(6, 2, dtype=torch.float64)), torch.nn.Parameter(first)
    torch.manual_seed(0)
    for scale in (4.0, 0.1):
        gradient, ids = torch.randn(6, 2, dtype=torch.float64) * scale, torch.tensor([1, 5, 9])
        values = torch.randn(3, 2, dtype=torch.float64) * scale
        w.grad, items.grad = gradient.clone(), torch.zeros_like(items).index_add_(0, ids, values)
        torch.nn.utils.clip_grad_norm_([w, items], 3.0)
        with torch.no_grad():
            w -= w.grad
            items -= items.grad
        for share, store in zip(parts, stores, strict=True):
            (part,), (table,) = share.parts, store.tables.specs
            here = (ids >= table.first) & (ids < table.end)
            payload = part.of(gradient).contiguous().view(-1).view(torch.uint8)
            for index, factor in enumerate(factors):  # of two workers, one of which may have none
                rows = [Rows(0, ids[here], values[here] * factor)] if here.any() else []
                weight = 1.0 if reduction == "mean" else 1.0 + index
                store.fold((payload.view(torch.float64) * factor).view(torch.uint8), weight, 0, rows=rows)
        norm = math.hypot(*(store.measure() for store in stores)) if shards > 1 else None
        for store in stores:
            store.commit(Step(2, 0, clip_norm=bounds[1]), norm=norm)
        now = torch.cat([store.weights.view(torch.float64).view(-1, 2) for store in stores])
        assert torch.allclose(now, w, rtol=1e-12)
        assert torch.allclose(torch.cat([store.tables.state()["weight/items"] for store in stores]), items, rtol=1e-12)


@pytest.mark.parametrize(("optimizer", "numbers"), [
    ("sparse_adam", {"lr": 0.1}), ("adagrad", {"lr": 0.1, "lr_decay": 0.5}), ("rowwise_adagrad", {"lr": 0.1}),
    ("sgd", {"lr": 0.1}),
])  # fmt: skip
def test_every_shard_counts_the_steps_of_a_table_whoever_has_its_rows(optimizer: str, numbers: dict) -> None:
    """As messages bring them: a shard without rows of the round counts its step nevertheless."""
    whole = make_spec("items", NUM_ROWS, DIM, "float64", 0.1, optimizer, numbers)
    other = make_spec("other", NUM_ROWS, DIM, "float64", 0.1, optimizer, numbers)
    sides = [Tables([whole, other], 1), *(Tables([whole.part(shard, 2), other.part(shard, 2)], 1) for shard in (0, 1))]
    for step, rows in enumerate(([0, 1], [0, 2], [9], [1, 11], [10])):
        gradients = RowGradients(int(step == 3), torch.tensor(rows), torch.full((len(rows), DIM), 1.0 + step).double())
        for tables in sides:
            found: list[Rows] = []
            for raw in rows_frames(tables.specs, [gradients]):
                frame = parse(pb.WorkerMessage, raw)
                header = frame.of(pb.Rows)
                found.append(tables.read(header.table, header.count, frame.data, found))
            tables.fold(found, 1.0)
            tables.commit()
    for table in range(2):
        wanted, *parts = (tables._tables[table].weight.detach() for tables in sides)
        assert torch.equal(torch.cat(parts), wanted)
    with pytest.raises(ParamServerError, match="for 0 rows"):
        sides[0].read(0, 0, memoryview(b""), [Rows(0, torch.empty(0), torch.empty(0))])
