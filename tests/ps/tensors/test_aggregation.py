"""Means, medians and trimmed means of payloads against numpy's, and whose memory is whose."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.config.schema import Config
from paramserver.common.registry import AGGREGATIONS
from paramserver.common.tensors.layout import DTYPES, FlatRun, Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.ps.tensors.aggregation import trimmed_mean
from paramserver.ps.tensors.aggregation.base import Aggregator
from paramserver.ps.tensors.aggregation.trimmed_mean import sort_rows
from paramserver.ps.tensors.flat_optimizer import windows_of
from paramserver.ps.tensors.store import Step, Store, StoreOptions

from .payloads import random_payload

P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN
ROBUST = ["median", "trimmed_mean"]

LAYOUT = Layout([
    TensorSpec("a", P, "float32", (37, 11)),
    TensorSpec("b", P, "float64", (101,)),
    TensorSpec("nothing", P, "float32", (0,)),
    TensorSpec("c", P, "float32", ()),
    TensorSpec("mean", B, "float32", (57,)),
    TensorSpec("count", B, "int64", (4,)),
    TensorSpec("seen", B, "bool", (7,)),
    TensorSpec("frozen", F, "float32", (19,)),
])  # fmt: skip
PARAMETERS = ["a", "b", "c"]
payload_of = partial(random_payload, LAYOUT)


def values_of(payload: torch.Tensor, layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    full = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    full[: len(payload)] = payload
    return {spec.name: view.clone() for spec, view in layout.views(full)}


def aggregate(name: str, payloads: list[torch.Tensor], trim: int = 1, layout: Layout = LAYOUT, **more: Any) -> Any:
    """The result of a round, by name of the tensor."""
    aggregator = make(name, trim, layout, **more)
    for rank, payload in enumerate(payloads):
        aggregator.fold(payload.clone(), 1.0 + rank, rank, may_keep=bool(rank % 2))
    for window in windows_of(layout):
        aggregator.complete(window)
    return values_of(aggregator.close()[0], layout)


def make(name: str, trim: int = 1, layout: Layout = LAYOUT, buffers: Any = "average") -> Aggregator:
    made: Aggregator = AGGREGATIONS.load(name)(windows_of(layout), FlatRun.view, buffers, trim)
    return made


def reference(payloads: list[torch.Tensor], left_out: int, layout: Layout = LAYOUT) -> dict[str, np.ndarray]:
    """numpy's, in float64: sorted, the outermost left out, the mean of the rest."""
    columns = [values_of(payload, layout) for payload in payloads]
    found = {}
    for name in columns[0]:
        ordered = np.sort(np.stack([column[name].double().numpy() for column in columns]), axis=0)
        found[name] = ordered[left_out : len(payloads) - left_out].mean(axis=0)
    return found


# ---- putting values in order ----------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 13))
def test_the_network_sorts_everything(count: int) -> None:
    """What sorts every sequence of zeros and ones sorts every sequence (Knuth's 0-1 principle)."""
    every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=count))).T.contiguous()
    rows = sort_rows(list(every), torch.empty(count + 1, every.shape[1]))
    assert torch.equal(torch.stack(rows), every.sort(dim=0).values)


@pytest.mark.parametrize("count", [13, 16, 17, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_many_rows_in_order(count: int, dtype: torch.dtype) -> None:
    values = torch.randn(count, 50, generator=torch.Generator().manual_seed(count)).to(dtype)
    before = values.clone()
    rows = sort_rows(list(values), torch.empty(count + 1, 50, dtype=dtype))
    assert torch.equal(torch.stack(rows), values.sort(dim=0).values)
    assert torch.equal(values, before), "a worker's own memory is left alone"


# ---- the values -----------------------------------------------------------------------------------


@given(count=st.integers(1, 12), seed=st.integers(0, 1000), trim=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_robust_means_are_numpys(count: int, seed: int, trim: int) -> None:
    payloads = [payload_of(seed + rank) for rank in range(count)]
    for name, left_out in (("median", (count - 1) // 2), ("trimmed_mean", min(trim, (count - 1) // 2))):
        found, expected = aggregate(name, payloads, trim), reference(payloads, left_out)
        for parameter in PARAMETERS:
            np.testing.assert_allclose(found[parameter].double().numpy(), expected[parameter], rtol=1e-5, atol=1e-6)
    stacked = np.stack([values_of(payload)["a"].numpy() for payload in payloads])
    np.testing.assert_allclose(aggregate("median", payloads)["a"].numpy(), np.median(stacked, axis=0), atol=1e-6)


@given(data=st.data(), num_liars=st.integers(0, 3), num_honest=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_minority_never_moves_an_element_beyond_what_the_honest_sent(
    data: st.DataObject, num_liars: int, num_honest: int, seed: int
) -> None:
    """Whatever it sends, wherever its ranks are."""
    if num_liars >= num_honest:
        num_honest = num_liars + 1
    honest = [payload_of(seed + index) for index in range(num_honest)]
    lies = [data.draw(st.sampled_from([-3e38, -10.0, 0.0, 1e-30, 7.0, 3e38])) for _ in range(num_liars)]
    payloads = list(honest)
    for lie in lies:
        payload = payload_of(0)
        for spec, view in LAYOUT.views(torch.cat([payload, torch.zeros(500, dtype=torch.uint8)])):
            if spec.kind is P:
                view.fill_(lie)
        payloads.insert(data.draw(st.integers(0, len(payloads))), payload)
    columns = [values_of(payload) for payload in honest]
    for name in ROBUST:
        found = aggregate(name, payloads, trim=max(1, num_liars))
        for parameter in PARAMETERS:
            sent = torch.stack([column[parameter] for column in columns])
            slack = 1e-6 * (1 + sent.abs().amax(0))
            assert bool((found[parameter] >= sent.amin(0) - slack).all())
            assert bool((found[parameter] <= sent.amax(0) + slack).all())


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_largest_values_do_not_overflow(name: str, dtype: str) -> None:
    """The sum of what is kept would."""
    layout = Layout([TensorSpec("w", P, dtype, (70,))])
    largest = torch.full((70,), torch.finfo(DTYPES[dtype]).max, dtype=DTYPES[dtype])
    payloads = [largest.clone().view(torch.uint8) for _ in range(6)]
    assert torch.equal(aggregate(name, payloads, trim=1, layout=layout)["w"], largest)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_round_too_small_to_leave_out_so_many_has_its_median(count: int) -> None:
    """Not an error: workers come and go. The run says so, once (`few_contributions`)."""
    payloads = [payload_of(rank) for rank in range(count)]
    trimmed, median = aggregate("trimmed_mean", payloads, trim=2), aggregate("median", payloads)
    assert all(torch.equal(trimmed[name], median[name]) for name in PARAMETERS)
    assert make("trimmed_mean", trim=2).fewest == 5
    assert (make("median").fewest, make("mean").fewest) == (3, 1)


# ---- windows and chunks -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("chunk_bytes", [64, 1000])
def test_windows_and_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch, name: str, chunk_bytes: int) -> None:
    payloads = [payload_of(rank) for rank in range(5)]
    whole = aggregate(name, payloads)
    monkeypatch.setattr("paramserver.ps.tensors.flat_optimizer.WINDOW_BYTES", 192)
    monkeypatch.setattr(trimmed_mean, "_CHUNK_BYTES", chunk_bytes)
    assert len(windows_of(LAYOUT)) > 10
    parts = aggregate(name, payloads)
    assert all(torch.equal(whole[tensor], parts[tensor]) for tensor in whole)


# ---- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["average", "lowest_rank", "keep"])
@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_buffers_are_as_with_the_mean(name: str, buffers: Any, ranks: list[int]) -> None:
    found = []
    for which in (name, "mean"):
        aggregator = make(which, buffers=buffers)
        for rank in ranks:
            aggregator.fold(payload_of(rank), 1.0 + rank, rank, may_keep=False)
        for window in windows_of(LAYOUT):
            aggregator.complete(window)
        assert aggregator.lowest_rank == 0
        found.append(values_of(aggregator.close()[0]))
    for tensor in ("mean", "count", "seen"):
        assert torch.equal(found[0][tensor], found[1][tensor])


# ---- in the store ---------------------------------------------------------------------------------


def store_of(name: str, **options: Any) -> Store:
    adam = OptimizerSpec("Adam", (GroupSpec(("a", "b", "c"), {"lr": 0.1}),))
    return Store(
        LAYOUT,
        payload_of(999, is_contribution=False),
        adam,
        StoreOptions(aggregation=AGGREGATIONS.load(name), **options),
    )


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", ROBUST)
def test_one_step_along_the_robust_mean(name: str, elsewhere: bool) -> None:
    """As torch's own Adam along numpy's median; rounds leave nothing behind for the next."""
    store = store_of(name)
    parameter = torch.nn.Parameter(store.tensors()["b"].clone())
    adam = torch.optim.Adam([parameter], lr=0.1)
    for round_, count in enumerate([5, 3, 4]):
        payloads = [payload_of(10 * round_ + rank) for rank in range(count)]
        for rank, payload in enumerate(payloads):
            assert store.fold(payload.clone(), 1.0, rank) == []
        target = torch.full((LAYOUT.total_bytes,), 0xAA, dtype=torch.uint8) if elsewhere else None
        for payload in store.commit(Step(count, 0), target):
            payload.fill_(0xFF)
        parameter.grad = torch.from_numpy(reference(payloads, (count - 1) // 2 if name == "median" else 1)["b"])
        adam.step()
        torch.testing.assert_close(store.tensors()["b"], parameter.detach())


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("may_keep", [False, True])
def test_all_payloads_are_kept_to_the_commit_and_come_back_once(name: str, may_keep: bool) -> None:
    store = store_of(name)
    for count in (4, 1, 7):
        payloads = [payload_of(rank) for rank in range(count)]
        for rank, payload in enumerate(payloads):
            assert store.fold(payload, 1.0, rank, may_keep) == []
        assert store.num_bytes["mean"] == count * LAYOUT.exchange_bytes
        returned = store.commit(Step(count, 0))
        assert returned[0] is payloads[0]
        assert sorted(map(id, returned)) == sorted(map(id, payloads))
        assert store.num_bytes["mean"] == 0


# ---- where it is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "backup", "trim", "is_possible"),
    [(3, 0, 1, True), (2, 0, 1, False), (5, 0, 2, True), (4, 0, 2, False), (5, 1, 2, False), (None, 0, 9, True)],
)
def test_a_trim_that_leaves_nothing_of_any_round(workers: Any, backup: int, trim: int, is_possible: bool) -> None:
    values = {
        "run": {"mode": "sync", "workers": workers},
        "policy": {"aggregation": "trimmed_mean", "trim": trim, "backup_workers": backup},
    }
    if is_possible:
        Config.model_validate(values)
        return
    with pytest.raises(ValueError, match=f"policy.trim is {trim}: a round needs more than {2 * trim} contributions"):
        Config.model_validate(values)
