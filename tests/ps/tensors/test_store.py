"""The store against plain torch: means, optimizer steps, buffers, the Polyak average, and whose memory is whose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec, new_payload
from paramserver.common.tensors.optimizers import (
    GroupSpec,
    OptimizerSpec,
    describe_optimizers,
    is_elementwise,
    known_optimizers,
)
from paramserver.ps.tensors.sanity import Findings, Unsound
from paramserver.ps.tensors.store import Step, Store, StoreOptions

from .payloads import random_payload

P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN
ELEMENTWISE = sorted(name for name, cls in known_optimizers().items() if is_elementwise(cls))
Values = dict[str, Any]

# Parameters in an order that the layout changes, tensors of every awkward shape, and all kinds.
SPECS = [
    TensorSpec("frozen", F, "float32", (2, 2)),
    TensorSpec("conv", P, "float32", (3, 2, 2), ("tied.conv",)),
    TensorSpec("mean", B, "float32", (3,)),
    TensorSpec("count", B, "int64", ()),
    TensorSpec("scale", P, "float32", ()),
    TensorSpec("nothing", P, "float32", (0, 4)),
    TensorSpec("wide", P, "float64", (5,)),
    TensorSpec("seen", B, "bool", (3,)),
    TensorSpec("bias", P, "float32", (7,)),
    TensorSpec("var", B, "float64", (2,)),
]
LAYOUT = Layout(SPECS)
VAR_TOO = TensorSpec("var_too", B, "float64", (3,))
SGD = OptimizerSpec("SGD", (GroupSpec(("conv", "scale", "nothing", "wide", "bias"), {"lr": 0.5}),))


def is_finite(store: Store, payload: torch.Tensor, windows: slice = slice(None)) -> bool:
    findings = Findings()
    store.sanity.look(payload, windows, findings)
    return findings.is_finite


def random_values(seed: int, layout: Layout = LAYOUT) -> Values:
    payload = random_payload(layout, seed, is_contribution=False)
    return {spec.name: view.clone() for spec, view in layout.views(payload)}


def payload_of(values: Values, layout: Layout = LAYOUT, is_contribution: bool = True) -> torch.Tensor:
    """A payload; gaps hold garbage, as they do in memory that is lent again."""
    payload = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8)
    for spec, view in layout.views(payload):
        if spec.name in values:
            view.copy_(torch.as_tensor(values[spec.name]))
    return payload[: layout.exchange_bytes].clone() if is_contribution else payload


def store_of(values: Values, optimizer: OptimizerSpec | None = SGD, layout: Layout = LAYOUT, **options: Any) -> Store:
    return Store(layout, payload_of(values, layout, is_contribution=False), optimizer, StoreOptions(**options))


def apply(store: Store, contributions: list[tuple[Values, float, int]], layout: Layout = LAYOUT, **commit: Any) -> None:
    for values, weight, rank in contributions:
        store.fold(payload_of(values, layout), weight, rank)
    live = commit.pop("live", [rank for _, _, rank in contributions])
    store.commit(Step(len(live), min(live), commit.pop("hyperparameters", None)))


def assert_same(store: Store, expected: Values, names: list[str], **tolerance: float) -> None:
    tensors = store.tensors()
    for name in names:
        torch.testing.assert_close(tensors[name], torch.as_tensor(expected[name]), **tolerance)


PARAMETERS = [spec.name for spec in SPECS if spec.kind is P]


# ---- the mean -------------------------------------------------------------------------------------


@given(weights=st.lists(st.integers(1, 1000).map(float), min_size=1, max_size=9), seed=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_weights_are_the_weighted_mean(weights: list[float], seed: int) -> None:
    values = [random_values(seed + index) for index in range(len(weights))]
    store = store_of(random_values(999), optimizer=None)
    apply(store, [(value, weight, rank) for rank, (value, weight) in enumerate(zip(values, weights, strict=True))])
    for name in PARAMETERS:
        mean = sum(value[name].double() * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        tolerance = (
            {"rtol": 1e-5, "atol": 1e-6} if values[0][name].dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
        )
        torch.testing.assert_close(store.tensors()[name].double(), mean, **tolerance)
    assert store.version == 1


@given(count=st.integers(1, 12), seed=st.integers(0, 100), weight=st.integers(1, 10**6))
@settings(max_examples=40, deadline=None)
def test_equal_contributions_give_exactly_themselves(count: int, seed: int, weight: int) -> None:
    """To the last bit, however many: a mean of one value is that value."""
    values = random_values(seed)
    store = store_of(random_values(999), optimizer=None)
    apply(store, [(values, float(weight + rank), rank) for rank in range(count)])
    for name in PARAMETERS:
        assert torch.equal(store.tensors()[name], values[name])


# ---- the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_on_flat_weights_are_torchs_steps_on_separate_tensors(name: str) -> None:
    """Param groups that interleave in the layout, with their own learning rates; six steps, two dtypes."""
    cls = known_optimizers()[name]
    groups = [(("bias", "conv", "wide"), 0.05), (("scale", "nothing"), 0.002)]
    spec = OptimizerSpec(
        cls.__name__, tuple(GroupSpec(names, {"lr": lr, "weight_decay": 0.01}) for names, lr in groups)
    )
    start = random_values(0)
    store = store_of(start, spec)
    parameters = {n: torch.nn.Parameter(start[n].clone()) for n in PARAMETERS}
    theirs = cls([{"params": [parameters[n] for n in names], "lr": lr, "weight_decay": 0.01} for names, lr in groups])
    for step in range(6):
        gradients = random_values(10 + step)
        apply(store, [(gradients, 1.0, 0)])
        for n, parameter in parameters.items():
            parameter.grad = gradients[n].clone()
        theirs.step()
    expected = {n: parameter.detach() for n, parameter in parameters.items()}
    # A fused step may round its last bit differently from one tensor at a time.
    assert_same(store, expected, PARAMETERS, rtol=2e-6, atol=2e-6)
    assert not torch.equal(store.tensors()["bias"], start["bias"])
    assert store.version == 6


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_schedule_reaches_the_step_it_belongs_to(name: str) -> None:
    cls = getattr(torch.optim, name)
    spec = OptimizerSpec(name, (GroupSpec(("bias",), {"lr": 0.1}), GroupSpec(("conv",), {"lr": 0.2})))
    start = random_values(0)
    store = store_of(start, spec)
    parameters = {n: torch.nn.Parameter(start[n].clone()) for n in ("bias", "conv")}
    theirs = cls([{"params": [parameters["bias"]], "lr": 0.1}, {"params": [parameters["conv"]], "lr": 0.2}])
    for step, (first, second) in enumerate([(0.1, 0.2), (0.05, 0.4), (0.0, 0.1)]):
        gradients = random_values(10 + step)
        apply(store, [(gradients, 1.0, 0)], hyperparameters=[{"lr": first}, {"lr": second}])
        for (n, parameter), group, lr in zip(parameters.items(), theirs.param_groups, (first, second), strict=True):
            parameter.grad, group["lr"] = gradients[n].clone(), lr
        theirs.step()
    assert_same(store, {n: p.detach() for n, p in parameters.items()}, ["bias", "conv"], rtol=1e-6, atol=1e-6)


def test_parameters_of_no_group_and_frozen_ones_stay() -> None:
    start = random_values(0)
    store = store_of(start, OptimizerSpec("SGD", (GroupSpec(("bias",), {"lr": 0.5}),)))
    apply(store, [(random_values(1), 1.0, 0)])
    assert_same(store, start, ["conv", "scale", "wide", "frozen"], rtol=0, atol=0)
    torch.testing.assert_close(store.tensors()["bias"], start["bias"] - 0.5 * random_values(1)["bias"])


@pytest.mark.parametrize("after", [("int64", B), ("bool", B), ("int8", F), ("float64", P), ("float32", B)])
@pytest.mark.parametrize("num_elements", [1, 15, 16, 17, 32])
def test_an_empty_parameter_where_the_next_run_begins(after: tuple[str, Kind], num_elements: int) -> None:
    """16 float32 end at byte 64: an empty tensor behind them has the same offset as the run that follows."""
    dtype, kind = after
    layout = Layout([
        TensorSpec("w", P, "float32", (num_elements,)),
        TensorSpec("empty", P, "float32", (0,)),
        TensorSpec("next", kind, dtype, (3,)),
    ])  # fmt: skip
    trained = tuple(spec.name for spec in layout.specs if spec.kind is P)
    values = {"w": torch.ones(num_elements), "next": torch.ones(3)}
    store = store_of(values, OptimizerSpec("SGD", (GroupSpec(trained, {"lr": 0.5}),)), layout)
    apply(store, [({"w": torch.ones(num_elements), "next": torch.ones(3)}, 1.0, 0)], layout)
    assert torch.equal(store.tensors()["w"], torch.full((num_elements,), 0.5))


# ---- buffers --------------------------------------------------------------------------------------


def two_contributions() -> list[tuple[Values, float, int]]:
    return [(random_values(1), 3.0, 2), (random_values(2), 1.0, 1)]


@pytest.mark.parametrize("optimizer", [SGD, None], ids=["gradients", "weights"])
def test_float_buffers_are_averaged_integers_come_from_the_lowest_rank(optimizer: OptimizerSpec | None) -> None:
    store = store_of(random_values(0), optimizer)
    apply(store, two_contributions())
    item, two = random_values(1), random_values(2)
    expected = {
        "mean": (3 * item["mean"] + two["mean"]) / 4,
        "var": (3 * item["var"] + two["var"]) / 4,
        "count": two["count"],
        "seen": two["seen"],
    }
    assert_same(store, expected, list(expected), rtol=1e-6, atol=1e-6)


def test_a_buffer_that_is_no_statistic_is_the_lowest_rank_s_beside_one_that_is() -> None:
    """Neighbours of one dtype with different rules; of a rank that contributed twice the newer one counts."""
    layout = Layout([replace(spec, averaged=spec.name != "var") for spec in [*SPECS, VAR_TOO]])
    store = store_of(random_values(0, layout), layout=layout)
    contributions = [(random_values(seed, layout), 1.0, rank) for seed, rank in ((1, 2), (2, 1), (3, 1))]
    apply(store, contributions, layout)
    mean = sum(values["var_too"] for values, _, _ in contributions) / 3
    assert_same(store, {"var": random_values(3, layout)["var"]}, ["var"], rtol=0, atol=0)
    assert_same(store, {"var_too": mean}, ["var_too"], rtol=1e-12, atol=1e-12)


def test_keep_leaves_buffers_alone() -> None:
    store = store_of(random_values(0), buffers="keep")
    apply(store, two_contributions())
    assert_same(store, random_values(0), ["mean", "var", "count", "seen"], rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]])
@pytest.mark.parametrize("buffers", ["average", "lowest_rank"])
def test_the_lowest_rank_is_found_in_any_order(ranks: list[int], buffers: Any) -> None:
    store = store_of(random_values(0), buffers=buffers)
    apply(store, [(random_values(10 + rank), 1.0, rank) for rank in ranks])
    assert_same(store, random_values(10), ["count", "seen"], rtol=0, atol=0)


def test_one_workers_buffers_move_by_its_share() -> None:
    """async: of four live workers each moves the statistics by a quarter; integers follow the lowest live rank."""
    start, given_ = random_values(0), random_values(1)
    store = store_of(start)
    apply(store, [(given_, 5.0, 3)], live=[1, 2, 3, 7])
    assert_same(store, {"mean": start["mean"] + (given_["mean"] - start["mean"]) / 4}, ["mean"], rtol=1e-6, atol=1e-6)
    assert_same(store, start, ["count", "seen"], rtol=0, atol=0)
    apply(store, [(random_values(2), 5.0, 1)], live=[1, 2, 3, 7])
    assert_same(store, random_values(2), ["count", "seen"], rtol=0, atol=0)


def test_a_departed_workers_contribution_still_counts() -> None:
    """More were folded than are live: the share stays one. The departed rank is below every live one."""
    store = store_of(random_values(0))
    apply(store, [(random_values(1), 1.0, 0), (random_values(2), 1.0, 4)], live=[4])
    item, two = random_values(1), random_values(2)
    assert_same(store, {"mean": (item["mean"] + two["mean"]) / 2, "count": item["count"]}, ["mean", "count"])


def test_nobody_is_live_any_more() -> None:
    store = store_of(random_values(0))
    store.fold(payload_of(random_values(1)), 1.0, 0)
    store.commit(Step(0, 0))
    assert_same(store, random_values(1), ["mean", "count"], rtol=0, atol=0)


# ---- the Polyak average ------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["average", "lowest_rank", "keep"])
def test_the_polyak_average_follows_the_weights(buffers: Any) -> None:
    decay = 0.9
    start = random_values(0)
    store = store_of(start, optimizer=None, polyak=decay, buffers=buffers)
    expected = {name: start[name].double() for name in PARAMETERS}
    for step in range(5):
        values = random_values(10 + step)
        apply(store, [(values, 1.0, 0)])
        expected = {name: decay * expected[name] + (1 - decay) * values[name].double() for name in PARAMETERS}
    averaged, plain = store.tensors(averaged=True), store.tensors()
    for name in PARAMETERS:
        torch.testing.assert_close(averaged[name].double(), expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(plain[name], random_values(14)[name])
    # Statistics are not averaged over time: they belong to the newest weights.
    for name in ("mean", "var", "count", "seen", "frozen"):
        assert torch.equal(averaged[name], plain[name])


# ---- finite ------------------------------------------------------------------------------------------


def test_integers_and_gaps_are_always_finite() -> None:
    """-1 as bytes is NaN to a float; neither integer buffers nor the gaps between runs are looked at."""
    store, values = store_of(random_values(0)), random_values(1)
    values["count"] = torch.tensor(-1)
    payload = payload_of(values)
    assert (payload == 0xFF).sum() > 8, "the gaps hold NaN patterns"
    assert is_finite(store, payload)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_sum_that_overflows_is_not_a_bad_value(dtype: str) -> None:
    layout = Layout([TensorSpec("w", P, dtype, (64,))])
    store = store_of({"w": torch.zeros(64)}, None, layout)
    largest = torch.finfo(DTYPES[dtype]).max
    assert is_finite(store, payload_of({"w": torch.full((64,), largest, dtype=torch.float64)}, layout))
    mixed = torch.full((64,), largest, dtype=torch.float64)
    mixed[1::2] *= -1
    assert is_finite(store, payload_of({"w": mixed}, layout))
    mixed[63] = math.inf
    mixed[62] = -math.inf
    assert not is_finite(store, payload_of({"w": mixed}, layout)), "Inf and -Inf hide in a sum as NaN, not as zero"


# ---- memory ----------------------------------------------------------------------------------------


def test_the_first_payload_becomes_the_mean_the_others_come_back() -> None:
    store = store_of(random_values(0))
    payloads = [payload_of(random_values(rank)) for rank in range(3)]
    assert store.fold(payloads[0], 1.0, 0) == []
    assert [id(b) for b in store.fold(payloads[1], 1.0, 1)] == [id(payloads[1])]
    assert [id(b) for b in store.fold(payloads[2], 1.0, 2)] == [id(payloads[2])]
    assert store.num_bytes["mean"] == LAYOUT.exchange_bytes
    assert [id(b) for b in store.commit(Step(3, 0))] == [id(payloads[0])]
    assert store.num_bytes["mean"] == 0


@pytest.mark.parametrize("optimizer", [SGD, None], ids=["gradients", "weights"])
@pytest.mark.parametrize("buffers", ["average", "lowest_rank", "keep"])
def test_a_payload_that_came_back_may_be_overwritten(optimizer: OptimizerSpec | None, buffers: Any) -> None:
    """Nothing of the store may point into it: uploads write there while the next step runs."""
    twins = [store_of(random_values(0), optimizer, buffers=buffers, polyak=0.5) for _ in range(2)]
    for round_ in range(3):
        for spoil, store in enumerate(twins):
            for rank in range(2):
                may_keep = bool(round_ % 2)
                returned = store.fold(payload_of(random_values(10 * round_ + rank)), 1.0, rank, may_keep)
                if spoil:
                    for payload in returned:
                        payload.fill_(0xFF)
            returned = store.commit(Step(2, 0))
            if spoil:
                for payload in returned:
                    payload.fill_(0xFF)
    assert torch.equal(twins[0].weights, twins[1].weights)
    assert torch.equal(twins[0].averaged, twins[1].averaged)


def test_folding_leaves_the_other_payload_as_it_is() -> None:
    store = store_of(random_values(0))
    store.fold(payload_of(random_values(1)), 1.0, 0)
    payload = payload_of(random_values(2))
    before = payload.clone()
    store.fold(payload, 1.0, 1)
    assert torch.equal(payload, before)


def test_the_weights_keep_their_place() -> None:
    """Replies are made from this memory; a commit must not move it."""
    store = store_of(random_values(0), OptimizerSpec("Adam", (GroupSpec(("bias", "conv"), {"lr": 0.1}),)))
    address = store.weights.data_ptr()
    for step in range(3):
        apply(store, [(random_values(step), 1.0, 0)])
    assert store.weights.data_ptr() == address
    tensors = store.tensors()
    tensors["bias"].fill_(7.0)
    assert not torch.equal(store.tensors()["bias"], tensors["bias"]), "tensors() gives copies"


def test_bytes_held_are_those_of_the_tensors() -> None:
    names = ("conv", "scale", "wide", "bias")
    elements = {spec.name: spec.num_elements for spec in SPECS}
    store = store_of(random_values(0), OptimizerSpec("Adam", (GroupSpec(names, {"lr": 0.1}),)), polyak=0.9)
    assert store.num_bytes == {
        "weights": LAYOUT.total_bytes, "mean": 0, "optimizer": 0, "averaged": LAYOUT.total_bytes,
    }  # fmt: skip
    apply(store, [(random_values(1), 1.0, 0)])
    moments = sum(2 * elements[name] * (8 if name == "wide" else 4) for name in names)
    lines = 2 * 2 * 60  # of float32 and of float64 two moments, each filled up to 64 bytes
    assert moments <= store.num_bytes["optimizer"] <= moments + lines + 100, "two moments, and a few step counters"


# ---- the learning rate of one commit ------------------------------------------------------------------


def test_groups_of_adagrad_have_first_sums_of_their_own() -> None:
    layout = Layout([TensorSpec(name, Kind.PARAMETER, "float32", (4,)) for name in "ab"])
    plain = [torch.nn.Parameter(torch.zeros(4)) for _ in "ab"]
    optimizers = [torch.optim.Adagrad([part], 0.1, initial_accumulator_value=at) for at, part in enumerate(plain)]
    spec = describe_optimizers(optimizers, {id(part): name for part, name in zip(plain, "ab", strict=True)})
    store = Store(layout, new_payload(layout.total_bytes), spec)
    for _ in range(3):
        for part, optimizer in zip(plain, optimizers, strict=True):
            part.grad = torch.ones(4)
            optimizer.step()
        store.fold(torch.ones(layout.exchange_bytes // 4).view(torch.uint8).clone(), 1.0, 0)
        store.commit(Step(1, 0))
    for part, name in zip(plain, "ab", strict=True):
        torch.testing.assert_close(store.tensors()[name], part.data)


FEWER = [Step(1, 0, lr_scale=scale) for scale in (1.0, 0.25, 1.0, 0.0, 1.0)]


def among(*numbers: int) -> list[Step]:
    return [Step(1, 0, momentum_among=number) for number in numbers]


@pytest.mark.parametrize(
    ("name", "extra", "steps"),
    [
        ("SGD", {}, FEWER),
        ("SGD", {"momentum": 0.9}, FEWER),
        ("Adam", {}, FEWER),
        ("AdamW", {}, FEWER),
        ("SGD", {"momentum": 0.9, "nesterov": False}, among(1, 4, 4, 10, 2, 1)),
        ("SGD", {"momentum": 0.9, "nesterov": True}, among(1, 4, 4, 10, 2, 1)),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}, among(11, 4, 11, 1)),
        ("RMSprop", {"momentum": 0.9, "eps": 1e-3}, among(4, 10, 2, 1)),
        ("RMSprop", {"momentum": 0.9, "eps": 1e-3}, among(11, 4, 11, 1)),  # at first there is no momentum left
    ],
)
def test_a_commit_steps_like_torch_with_its_rate_and_the_momentum_that_is_left(
    name: str, extra: dict[str, Any], steps: list[Step]
) -> None:
    """Left among late workers, that is."""
    layout = Layout([TensorSpec("w", P, "float64", (64,))])
    start = torch.linspace(-1, 1, 64, dtype=torch.float64)
    numbers = {"lr": 0.1, **extra}
    store = Store(layout, start.clone().view(torch.uint8), OptimizerSpec(name, (GroupSpec(("w",), numbers),)))
    parameter = torch.nn.Parameter(start.clone())
    plain = getattr(torch.optim, name)([parameter], **numbers)
    least = 0.0 if name == "SGD" else 1e-30  # RMSprop makes its buffer only if momentum is above 0 at the first step
    for step in steps:
        gradient = torch.randn(64, dtype=torch.float64)
        parameter.grad = gradient
        plain.param_groups[0]["lr"] = 0.1 * step.lr_scale
        if "momentum" in extra:
            plain.param_groups[0]["momentum"] = max(least, 1 - step.momentum_among * (1 - 0.9))
        plain.step()
        store.fold(gradient.clone().view(torch.uint8), 1.0, 0)
        store.commit(step)
    torch.testing.assert_close(store.weights.view(torch.float64), parameter.data, rtol=1e-12, atol=1e-12)
    group = store.optimizer.torch.param_groups[0]
    assert {key: group[key] for key in numbers} == numbers, "as told: a snapshot keeps that"


def test_it_is_measured_whether_rounds_go_the_same_way() -> None:
    """Cosines of successive means: 1, 0 and -1 have the mean 0; where nothing was folded nothing is measured."""
    layout = Layout([TensorSpec("w", P, "float32", (2, 1_000)), TensorSpec("b", B, "float32", (4,))])
    sgd = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.5}),))
    store = Store(layout, new_payload(layout.total_bytes).zero_(), sgd, StoreOptions(measures_direction=True))
    for east, north in ((1.0, 0.0), (2.0, 0.0), (0.0, 3.0), (0.0, -1.0)):
        payload = new_payload(layout.exchange_bytes).zero_()
        (_, w), _ = layout.views(payload)
        w[0], w[1] = east, north
        store.fold(payload, 1.0, 0)
        store.commit(Step(1, 0))
        store.commit(Step(1, 0))
    assert store.direction is not None and store.direction.cosine == pytest.approx(0.0, abs=1e-9)


# ---- what a step leaves ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "wide", "scale"])
def test_finite_gradients_that_overflow_weights_are_seen_at_the_commit(name: str) -> None:
    zeros = dict.fromkeys([spec.name for spec in SPECS], 0)
    store = store_of(zeros | {name: -1.0})
    largest = torch.finfo(store.tensors()[name].dtype).max
    store.fold(payload_of(zeros | {name: largest}), 1.0, 0)
    with pytest.raises(Unsound, match=f"-inf in '{name}'"):
        store.commit(Step(1, 0, [{"lr": 3.0}]))


def test_weights_whose_sum_overflows_are_sound() -> None:
    layout = Layout([TensorSpec("w", P, "float32", (40,)), TensorSpec("h", P, "float16", (40,))])
    spec = OptimizerSpec("SGD", (GroupSpec(("w", "h"), {"lr": 1.0}),))
    store = store_of({"w": 0.0, "h": 0.0}, spec, layout)
    apply(store, [({"w": -3e38, "h": -60_000.0}, 1.0, 0)], layout)
    assert store.version == 1
    assert store.tensors()["w"][0] == pytest.approx(3e38)


def test_an_optimizer_that_divides_by_zero_is_seen() -> None:
    spec = OptimizerSpec("Adam", (GroupSpec(("conv", "scale", "nothing", "wide", "bias"), {"lr": 0.1, "eps": 0.0}),))
    store = store_of(random_values(0), spec)
    store.fold(payload_of(dict.fromkeys([spec.name for spec in SPECS], 0)), 1.0, 0)
    with pytest.raises(Unsound, match="nan in "):
        store.commit(Step(1, 0))
