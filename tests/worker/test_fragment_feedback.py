"""Of a fragment in a codec that remembers: each has its own of what was left out, as a model of its own would have."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.codecs.base import decode_payload, payload_bytes
from paramserver.common.codecs.shared.by_tensor import ByTensor, only_rest
from paramserver.common.errors import ParamServerError
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from paramserver.common.wire.records import ReferenceInfo, WeightsInfo
from paramserver.worker.tensors.transfer import Stretch
from paramserver.worker.transports.encoding import Encoding
from paramserver.worker.transports.transport import Down

SPECS = [
    TensorSpec("a", Kind.PARAMETER, "float32", (70, 67)),
    TensorSpec("b", Kind.PARAMETER, "float32", (61, 80)),
    TensorSpec("c", Kind.PARAMETER, "float32", (7,)),
    TensorSpec("n", Kind.BUFFER, "int64", (3,)),
]
LAYOUT = Layout(SPECS)
FRAGMENTS = [{"a"}, {"b", "c"}]
NAMES = {spec.name for spec in SPECS if spec.kind is Kind.PARAMETER}
CODEC_NAMES = [n for n in CODECS.names() if issubclass(CODECS.load(n), ByTensor) and n != "onebit_adam"]


def filled(layout: Layout, values: dict[str, torch.Tensor]) -> torch.Tensor:
    payload = new_payload(layout.exchange_bytes)
    for spec, view in layout.views(payload):
        if spec.name in values:
            view.copy_(values[spec.name])
    return payload


def of_names(layout: Layout, payload: torch.Tensor | None) -> dict[str, torch.Tensor]:
    views = layout.views(new_payload(layout.exchange_bytes) if payload is None else payload)
    return {spec.name: view.clone() for spec, view in views if spec.kind is Kind.PARAMETER}


class Side:
    """Worker and server of one model, whole or with some of its tensors in each contribution."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.layout, self.encoding = layout, Encoding(CODECS.load(name)(), layout, len(layout.entries))

    def encode(self, values: dict[str, torch.Tensor], without: frozenset[str] = frozenset()) -> bytes:
        self.encoding.choose(without)
        self.work = Stretch(0, [as_bytes(filled(self.layout, values))])
        return bytes(self.encoding.whole(self.work))

    def decode(self, sent: bytes) -> dict[str, torch.Tensor]:
        codec, payload = self.encoding.codec, new_payload(self.layout.exchange_bytes).fill_(7)
        encoded = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        decode_payload(codec, self.layout, encoded, payload)
        return of_names(self.layout, payload)

    @property
    def left(self) -> dict[str, torch.Tensor]:
        return of_names(self.layout, self.encoding.residual)


FATES = st.lists(
    st.tuples(st.sampled_from(["counts", "counts", "dropped", "rejected", "again"]), st.booleans()), max_size=9
)


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(fates=FATES)
@settings(max_examples=12, deadline=None)
def test_a_fragment_is_sent_as_a_model_of_its_own_would_be(name: str, fates: list[tuple[str, bool]]) -> None:
    """Bytes, what is decoded, and what is left out: each fragment beside a model that has no other tensors."""
    whole = Side(name, LAYOUT)
    alone = [
        Side(name, Layout([spec for spec in SPECS if spec.name in names or spec.name == "n"])) for names in FRAGMENTS
    ]
    for seed, (fate, second) in enumerate(fates):
        chance, names, item = torch.Generator().manual_seed(seed), FRAGMENTS[second], alone[second]
        values = {spec.name: torch.randn(spec.shape, generator=chance) for spec in SPECS if spec.name in names}
        other = {name: left for name, left in whole.left.items() if name not in names}
        sent, wanted = whole.encode(values, frozenset(NAMES - names)), item.encode(values)
        assert len(sent) == payload_bytes(whole.encoding.codec, LAYOUT)
        num_bytes = whole.encoding.codec.encoded_bytes(LAYOUT)  # buffers follow
        assert num_bytes == item.encoding.codec.encoded_bytes(item.layout)
        decoded = whole.decode(sent)
        if name != "powersgd":  # whose first Q is of where a tensor lies
            assert sent[:num_bytes] == wanted[:num_bytes]
            for key, value in item.decode(wanted).items():
                assert torch.equal(decoded[key], value)
        assert not any(decoded[key].any() for key in NAMES - names)
        if fate == "again":
            whole.encoding.recall()
            payload = whole.encoding.payload
            assert payload is not None and bytes(payload) == sent
        for side in (whole, item):
            if fate in ("counts", "again"):
                side.encoding.commit()
            else:
                side.encoding.rollback(side.work if fate == "dropped" else None)
        left = whole.left
        assert all(torch.equal(left[key], kept) for key, kept in other.items()), "of other fragments"
        if name != "powersgd":
            assert all(torch.equal(left[key], kept) for key, kept in item.left.items())
        norm = math.sqrt(sum(float(kept.double().norm()) ** 2 for kept in left.values()))
        assert whole.encoding.norm == pytest.approx(norm, rel=1e-4)
    whole.encoding.start()
    norm = math.sqrt(sum(side.encoding.norm**2 for side in alone))
    assert name == "powersgd" or (whole.encoding.take_lost() or 0) == pytest.approx(norm, rel=1e-4)
    assert not any(kept.any() for kept in whole.left.values())


def test_a_fragment_that_was_dropped_raw_is_sent_when_its_turn_comes_again() -> None:
    """And nothing of it with the other one, whose bytes stay at home."""
    side, (first, second) = Side("raw", LAYOUT), FRAGMENTS
    worked = {spec.name: torch.randn(spec.shape) for spec in SPECS if spec.name in NAMES}
    of_first, of_second = ({name: worked[name] for name in names} for names in FRAGMENTS)
    side.encode(of_first, frozenset(second))
    side.encoding.rollback(side.work)
    decoded = side.decode(side.encode(of_second, frozenset(first)))
    side.encoding.commit()
    assert all(torch.equal(decoded[name], worked[name]) for name in second)
    assert not any(decoded[name].any() for name in first)
    assert side.encoding.residual is not None
    decoded = side.decode(side.encode(of_first, frozenset(second)))
    side.encoding.commit()
    assert all(torch.equal(decoded[name], 2 * worked[name]) for name in first)
    assert side.encoding.residual is None and side.encoding.take_lost() is None


def test_an_infinite_rest_of_one_fragment_costs_the_others_nothing() -> None:
    side = Side("int8", LAYOUT)
    for names in FRAGMENTS:
        side.encode({name: torch.randn(*spec_of(name).shape) for name in names}, frozenset(NAMES - names))
        side.encoding.commit()
    kept, norm = side.left["a"], math.hypot(*(float(side.left[name].norm()) for name in ("b", "c")))
    side.encode({"b": torch.full((61, 80), math.inf)}, frozenset({"a"}))
    side.encoding.commit()
    assert side.left["a"].any() and torch.equal(side.left["a"], kept)
    assert not side.left["b"].any() and side.encoding.take_lost() == pytest.approx(norm)


def spec_of(name: str) -> TensorSpec:
    return next(spec for spec in SPECS if spec.name == name)


# ---- the way down -----------------------------------------------------------------------------------


def taking(left_out: tuple[Any, ...], sizes: list[int], number: int) -> None:
    """A worker at reference 1 is sent zeros of these sizes that lead to another one."""
    model = SimpleNamespace(layout=LAYOUT, names_at=lambda found: frozenset(LAYOUT.specs[at].name for at in found))
    transfer = SimpleNamespace(write=lambda *_: None, finish_write=lambda *_: None)
    down = Down(CODECS.load("q4")(), model, transfer)  # type: ignore[arg-type]
    whole, payload = bytes(LAYOUT.exchange_bytes), bytes(sum(sizes))
    down.take(WeightsInfo(len(whole), "", reference=ReferenceInfo(1)), lambda write: write(0, memoryview(whole)))
    info = ReferenceInfo(number, left_out=left_out)
    down.take(WeightsInfo(len(payload), "q4", reference=info), lambda write: write(0, memoryview(payload)))
    assert down.reference == number


def size(without: set[str]) -> int:
    codec = CODECS.load("q4")()
    assert isinstance(codec, ByTensor)
    return payload_bytes(only_rest(codec, frozenset(without)), LAYOUT)


def test_differences_of_fragments_have_their_own_sizes() -> None:
    positions = {spec.name: at for at, spec in enumerate(LAYOUT.specs)}
    taking(([positions["a"]], [positions["b"], positions["c"]]), [size({"a"}), size({"b", "c"})], 3)
    assert size({"a"}) + size({"b", "c"}) < size(set()) + 100


@pytest.mark.parametrize(
    ("left_out", "sizes", "message"),
    [
        (([0],), [size({"a"}), size(set())], "2 differences, but missing tensors are listed for 1"),
        (([0], []), [size(set()), size(set())], "bytes of weights"),
        (([9], []), [size({"a"}), size(set())], "tensors that the model does not have"),
    ],
)
def test_differences_that_cannot_be_are_refused(left_out: tuple[Any, ...], sizes: list[int], message: str) -> None:
    with pytest.raises(ParamServerError, match=message):
        taking(left_out, sizes, 3)
