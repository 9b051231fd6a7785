"""A model divided among shards: everything once, in equal shares, the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.tensors.sharding import divide

KINDS = {Kind.PARAMETER: ["float32", "float16"], Kind.BUFFER: ["float32", "int64"], Kind.FROZEN: ["float32"]}


@st.composite
def layouts(draw) -> Layout:
    specs = [TensorSpec("first", Kind.PARAMETER, "float32", (draw(st.integers(1, 50)), 3), ("tied",))]
    for index in range(draw(st.integers(0, 9))):
        kind = draw(st.sampled_from(list(KINDS)))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        specs.append(TensorSpec(f"t{index}", kind, draw(st.sampled_from(KINDS[kind])), shape))
    return Layout(specs)


def _divided(layout: Layout, num_shards: int):
    try:
        return divide(layout, num_shards)
    except ParamServerError as error:
        assume(error.reason is not Reason.LIMIT_EXCEEDED)  # too few rows for so many
        raise


@given(layouts(), st.integers(1, 6))
@settings(max_examples=300)
def test_every_row_is_in_one_share(layout, num_shards):
    found = {spec.name: [] for spec in layout.specs}
    for share in _divided(layout, num_shards):
        assert [part.as_spec() for part in share.parts] == list(share.layout.specs)
        for part in share.parts:
            found[part.spec.name].append(part)
    for spec in layout.specs:
        parts = found[spec.name]
        if len(parts) == 1:
            assert parts[0].is_whole and parts[0].as_spec() == spec  # with its aliases
        else:
            assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
            assert parts[-1].end == spec.shape[0]


@given(layouts(), st.integers(2, 6))
@settings(max_examples=300)
def test_shares_differ_by_less_than_two_rows(layout, num_shards):
    trained = [spec for spec in layout.specs if spec.kind is Kind.PARAMETER]
    row = max(spec.num_bytes // max(1, spec.shape[0] if spec.shape else 1) for spec in trained)
    total = sum(spec.num_bytes for spec in trained)
    for share in _divided(layout, num_shards):
        num_bytes = sum(spec.num_bytes for spec in share.layout.specs if spec.kind is Kind.PARAMETER)
        assert abs(num_bytes - total / num_shards) <= 2 * row + 1


def test_a_large_tensor_is_spread_and_small_ones_stay_whole():
    layout = Layout([
        TensorSpec("large", Kind.PARAMETER, "float32", (1000, 10)),
        TensorSpec("small", Kind.PARAMETER, "float32", (10,)),
    ])  # fmt: skip
    names = [[part.name for part in share.parts] for share in divide(layout, 4)]
    assert names == [["large[0:250]"], ["large[250:500]"], ["large[500:751]"], ["large[751:1000]", "small"]]


def test_groups_go_with_their_parts():
    layout = Layout([
        TensorSpec("a", Kind.PARAMETER, "float32", (8, 4)),
        TensorSpec("b", Kind.PARAMETER, "float32", (8, 4)),
    ])  # fmt: skip
    optimizer = OptimizerSpec("SGD", (GroupSpec(("a",), {"lr": 0.1}), GroupSpec(("b",), {"lr": 0.2})))
    first, second = (share.optimizer(optimizer) for share in divide(layout, 2))
    assert [group.tensors for group in first.groups] == [("a",), ()]
    assert [group.tensors for group in second.groups] == [(), ("b",)]
    assert [group.hyperparameters for group in first.groups] == [{"lr": 0.1}, {"lr": 0.2}]


def test_a_model_too_small_for_its_shards_is_refused():
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (1, 1000))])
    with pytest.raises(ParamServerError, match=r"1 row cannot be divided among 2 shards: shard 0 would have none"):
        divide(layout, 2)
