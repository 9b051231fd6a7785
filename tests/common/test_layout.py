"""Where tensors lie in a payload: the same on every machine, aligned, and compared in sentences."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec, as_bytes, new_payload
from paramserver.common.wire.protocol import layout_from_proto, layout_to_proto
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.tensors.transfer import ModelTensors

FLOATS = ["float32", "float64", "float16", "bfloat16"]
P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN


def spec(name: str, kind: Kind = P, dtype: str = "float32", shape: tuple[int, ...] = (3,), *aliases: str) -> TensorSpec:
    return TensorSpec(name, kind, dtype, shape, aliases)


@st.composite
def many_specs(draw: st.DrawFn) -> list[TensorSpec]:
    count = draw(st.integers(0, 12))
    specs = []
    for index in range(count):
        kind = draw(st.sampled_from(list(Kind)))
        dtype = draw(st.sampled_from(FLOATS if kind is P else list(DTYPES)))
        specs.append(TensorSpec(f"t{index}", kind, dtype, tuple(draw(st.lists(st.integers(0, 5), max_size=3)))))
    return specs


# ---- places ------------------------------------------------------------------------------------


@given(specs=many_specs())
@settings(max_examples=200, deadline=None)
def test_every_byte_belongs_to_one_tensor_or_to_a_gap(specs: list[TensorSpec]) -> None:
    layout = Layout(specs)
    assert [entry.spec for entry in layout.entries] == sorted(
        specs, key=lambda spec: (spec.kind, spec.dtype, specs.index(spec))
    )
    at = 0
    for entry in layout.entries:
        assert entry.offset >= at, "two tensors overlap"
        assert entry.offset % DTYPES[entry.spec.dtype].itemsize == 0
        assert entry.offset - at < 64, "a gap is shorter than the alignment"
        at = entry.end
    assert layout.total_bytes == at
    assert all(run.offset % 64 == 0 for run in layout.runs)
    kinds = {kind: [entry for entry in layout.entries if entry.spec.kind is kind] for kind in Kind}
    assert layout.parameter_bytes == (kinds[P][-1].end if kinds[P] else 0)
    exchanged = kinds[P] + kinds[B]
    assert layout.exchange_bytes == (exchanged[-1].end if exchanged else 0)
    assert layout.num_parameters == sum(entry.spec.num_elements for entry in kinds[P])


@given(specs=many_specs())
@settings(max_examples=200, deadline=None)
def test_runs_are_the_same_memory_as_the_tensors(specs: list[TensorSpec]) -> None:
    layout = Layout(specs)
    payload = torch.randint(0, 2, (layout.total_bytes,), dtype=torch.uint8)
    assert len({(run.kind, run.dtype) for run in layout.runs}) == len(layout.runs)
    for run in layout.runs:
        members = [
            view.reshape(-1)
            for tensor, view in layout.views(payload)
            if (tensor.kind, DTYPES[tensor.dtype]) == (run.kind, run.dtype)
        ]
        flat = run.view(payload)
        assert flat.dtype == run.dtype
        joined = torch.cat(members)
        assert torch.equal(flat.view(torch.uint8), joined.view(torch.uint8))
        if flat.numel():
            first = next(member for member in members if member.numel())
            assert flat.data_ptr() == first.data_ptr(), "the run is a copy"
    for item, view in layout.views(payload):
        assert tuple(view.shape) == item.shape


@given(specs=many_specs())
@settings(max_examples=100, deadline=None)
def test_a_layout_survives_the_proto(specs: list[TensorSpec]) -> None:
    layout = Layout(specs)
    if not specs:
        return
    received = [pb.TensorSpec.FromString(tensor.SerializeToString()) for tensor in layout_to_proto(layout)]
    again = layout_from_proto(received)
    assert again.specs == layout.specs
    assert again.entries == layout.entries
    assert again.fingerprint == layout.fingerprint


def test_payloads_are_zero_and_runs_are_aligned_in_memory() -> None:
    payload = new_payload(1 << 20)
    assert not payload.any()
    assert payload.data_ptr() % 16 == 0


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_as_bytes_shares_memory(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=DTYPES[dtype])
    view = as_bytes(tensor)
    assert view.nbytes == len(view) == tensor.numel() * tensor.element_size()
    assert bytes(view) == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    if len(view):
        view[:] = bytes(len(view))
        assert not tensor.any()


# ---- fingerprint ---------------------------------------------------------------------------------


def test_the_fingerprint_is_what_the_proto_says() -> None:
    """SHA-256, lower-case hex, over the lines "kind name dtype d0,d1,...\\n" of the tensors in order."""
    layout = Layout([spec("b.weight", P, "float32", (10, 4), "tied"), spec("é", B, "int64", ()), spec("f", F)])
    lines = "PARAMETER b.weight float32 10,4\nBUFFER é int64 \nFROZEN f float32 3\n"
    assert layout.fingerprint == hashlib.sha256(lines.encode()).hexdigest()
    # Kinds are named as in the proto's enum.
    assert {kind.name for kind in Kind} == set(pb.TensorSpec.Kind.keys()) - {"KIND_UNSPECIFIED"}
    assert all(pb.TensorSpec.Kind.Value(kind.name) == kind for kind in Kind)


@pytest.mark.parametrize(
    "changed",
    [
        [spec("a", P, "float32", (3, 2)), spec("b")],
        [spec("a", P, "float64", (2, 3)), spec("b")],
        [spec("a", F, "float32", (2, 3)), spec("b")],
        [spec("A", P, "float32", (2, 3)), spec("b")],
        [spec("b"), spec("a", P, "float32", (2, 3))],
        [spec("a", P, "float32", (2, 3))],
        [spec("a", P, "float32", (2, 3)), spec("b"), spec("c", P, "float32", (0,))],
        [spec("a", P, "float32", (2, 3)), spec("b", P, "float32", (3, 1))],
    ],
)
def test_any_difference_changes_the_fingerprint_and_is_named(changed: list[TensorSpec]) -> None:
    layout, other = Layout([spec("a", P, "float32", (2, 3)), spec("b")]), Layout(changed)
    assert layout.fingerprint != other.fingerprint
    assert layout.differences(other)


# ---- differences ---------------------------------------------------------------------------------


def test_differences_are_sentences() -> None:
    mine = Layout([spec("w", P, "float32", (2, 3)), spec("gone"), spec("frozen", P), spec("wide", P, "float32")])
    theirs = Layout([
        spec("w", P, "float32", (3, 2)), spec("frozen", F), spec("wide", P, "float64"), spec("new", P, "float16", ()),
    ])  # fmt: skip
    assert mine.differences(theirs) == [
        "expected w float32[2, 3], got w float32[3, 2]",
        "missing tensor gone float32[3]",
        "expected frozen float32[3], got frozen float32[3] (PARAMETER and FROZEN)",
        "expected wide float32[3], got wide float64[3]",
        "extra tensor new float16[]",
    ]


def test_many_differences_are_counted() -> None:
    mine, theirs = Layout([spec(f"a{i}") for i in range(7)]), Layout([])
    found = mine.differences(theirs)
    assert len(found) == 6
    assert found[-1] == "and 2 more"
    assert len(mine.differences(theirs, limit=7)) == 7


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([spec("a"), spec("a")], "two tensors are named 'a'"),
        ([spec("a", P, "float32", (3,), "b"), spec("b")], "two tensors are named 'b'"),
        ([spec("a", P, "float32", (3,), "a")], "two tensors are named 'a'"),
        ([spec("a", P, "complex64")], "tensor 'a' has dtype complex64"),
        ([spec("a", P, "float32", (-1,))], "a float32[-1] has an impossible shape"),
        ([spec("a", P, "float32", (-2, -3))], "a float32[-2, -3] has an impossible shape"),
        ([spec("a", P, "float64", (2**30, 2**30))], "an impossible shape"),
        ([spec("a", P, "int64", (1,))], "tensor 'a' is int64: only floats are trained"),
        # No bytes, but no torch tensor can have that shape: views() would fail when the run is saved.
        *(([spec("a", P, "float32", shape)], "an impossible shape")
          for shape in [(2**63, 0), (2**64 - 1, 0), (2**40, 2**40, 0), (0, 2**62, 2**62)]),
        # Each tensor is possible, and all together are not.
        ([spec(str(index), P, "float64", (2**46,)) for index in range(2**7)], "at most 1125899906842624 are possible"),
    ],
)  # fmt: skip
def test_impossible_models_are_refused(specs: list[TensorSpec], says: str) -> None:
    with pytest.raises(ParamServerError) as caught:
        Layout(specs)
    assert caught.value.reason is Reason.BAD_REQUEST
    assert says in caught.value.message


# ---- tied weights ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.third = self.embedding
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def test_tied_weights_are_one_tensor_with_aliases() -> None:
    layout = ModelTensors(Tied()).layout
    (tied,) = [spec for spec in layout.specs if spec.aliases]
    assert (tied.name, tied.aliases) == ("embedding.weight", ("head.weight", "third.weight"))
    kinds = {spec.name: spec.kind for spec in layout.specs}
    assert kinds == {
        "frozen": F, "embedding.weight": P, "norm.weight": P, "norm.bias": P, "norm.running_mean": B,
        "norm.running_var": B, "norm.num_batches_tracked": B,
    }  # fmt: skip
    again = layout_from_proto(layout_to_proto(layout))
    assert again.specs == layout.specs, "aliases travel"
