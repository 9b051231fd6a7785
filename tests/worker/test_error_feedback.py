"""What a codec leaves out of contributions is sent with later ones, whatever becomes of each; without a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.codecs.base import decode_payload
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from paramserver.worker.tensors.transfer import Stretch
from paramserver.worker.transports.encoding import Encoding

LAYOUT = Layout(
    [
        TensorSpec("w", Kind.PARAMETER, "float64", (70, 67)),
        TensorSpec("bias", Kind.PARAMETER, "float64", (7,)),
        TensorSpec("n", Kind.BUFFER, "int64", (3,)),
    ]
)
BUFFERED = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (64, 32)), TensorSpec("n", Kind.BUFFER, "int64", (3,))])
LOSSY = [name for name in CODECS.names() if CODECS.load(name).has_feedback]
NUM = LAYOUT.num_parameters


class Server:
    """Adds up what counts, in float64."""

    def __init__(self, name: str, layout: Layout = LAYOUT) -> None:
        self.layout, self.codec = layout, CODECS.load(name)()
        self.encoding = Encoding(CODECS.load(name)(), layout, len(layout.entries))
        self.received = torch.zeros(layout.num_parameters, dtype=torch.float64)

    def encode(self, values: torch.Tensor) -> memoryview:
        payload = new_payload(self.layout.exchange_bytes)
        of_type(self.layout, payload).copy_(values)
        self.work = Stretch(0, [as_bytes(payload)])
        return self.encoding.whole(self.work)

    def decoded(self, sent: memoryview) -> torch.Tensor:
        payload = new_payload(self.layout.exchange_bytes)
        encoded = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        decode_payload(self.codec, self.layout, encoded, payload)
        return of_type(self.layout, payload).double()

    @property
    def left(self) -> torch.Tensor:
        kept: Any = self.encoding.residual
        return torch.zeros_like(self.received) if kept is None else of_type(self.layout, kept).double()


def of_type(layout: Layout, payload: torch.Tensor) -> torch.Tensor:
    (run,) = layout.runs_of(Kind.PARAMETER)
    return run.view(payload)


def gradient(seed: int, num: int = NUM) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FATES = ["counts", "counts", "sent again", "repeated", "dropped", "rejected", "recalled", "start", "not finite"]


@pytest.mark.parametrize("is_work", [False, True])
@pytest.mark.parametrize("name", [name for name in LOSSY if name != "onebit_adam"])
@given(fates=st.lists(st.sampled_from(FATES), max_size=12))
@settings(max_examples=15, deadline=None)
def test_what_is_sent_adds_up_to_what_was_computed(name: str, is_work: bool, fates: list[str]) -> None:
    """sum(y) + e = sum(x) of what counts; of differences (`is_work`) also of what was dropped."""
    server = Server(name)
    computed = torch.zeros(NUM, dtype=torch.float64)
    decay = server.codec.decay
    for seed, fate in enumerate(fates):
        x, before = gradient(seed), server.left.clone()
        if fate == "not finite":
            x[0] = math.nan
        sent = bytes(server.encode(x))
        assert torch.equal(server.left, before), "nothing is decided yet"
        if fate == "sent again":
            server.encoding.recall()  # a new stream; there is nothing of it to recall
            assert server.encoding.payload is not None and bytes(server.encoding.payload) == sent
        if fate in ("counts", "sent again", "repeated"):
            server.encoding.commit()
            server.received += server.decoded(memoryview(sent))
            if fate == "repeated":
                server.encoding.commit()  # asked for again
            computed += x - (1 - decay) * before
        elif fate == "start":
            server.encoding.start()
            assert (server.encoding.take_lost() or 0) == pytest.approx(float(before.norm()))
            computed -= before
        elif fate == "dropped":
            server.encoding.rollback(server.work if is_work else None)
            if is_work:
                computed += x - (1 - decay) * before
            else:
                assert torch.equal(server.left, before)
        elif fate == "recalled":
            server.encoding.rollback()
        else:
            server.encoding.rollback()
            assert torch.equal(server.left, before)
        assert server.encoding.payload is None
        assert server.encoding.norm == pytest.approx(float(server.left.norm()))
        assert (server.received + server.left - computed).abs().max() < 1e-12 * (seed + 1), fate


@pytest.mark.parametrize("name", LOSSY)
def test_a_residual_that_is_not_finite_is_let_go_and_counted(name: str) -> None:
    """A server that takes NaN as zeros (store.on_nonfinite=clip) counts the contribution."""
    server = Server(name)
    server.encode(gradient(0))
    server.encoding.commit()
    norm = server.encoding.norm
    assert norm > 0
    x = gradient(1)
    x[5] = math.inf
    server.encode(x)
    server.encoding.commit()
    assert not server.left.any() and server.encoding.take_lost() == pytest.approx(norm)
    assert server.encoding.take_lost() is None, "told once"
    server.encode(x)
    server.encoding.commit()
    assert server.encoding.take_lost() == 0, "there was nothing before it"


@pytest.mark.parametrize("name", ["raw", "bf16"])
def test_work_that_was_dropped_is_sent_with_the_next_also_where_nothing_is_left_out(name: str) -> None:
    server, layout = Server(name, BUFFERED), BUFFERED
    num = layout.num_parameters
    for seed in range(2):
        server.encode(gradient(seed, num))
        server.encoding.rollback(server.work)
    assert server.encoding.norm == pytest.approx(float(server.left.norm()))
    server.received += server.decoded(server.encode(gradient(2, num)))
    server.encoding.commit()
    worked = sum((gradient(seed, num) for seed in range(3)), torch.zeros(num, dtype=torch.float64))
    assert (server.received + server.left - worked).abs().max() < 1e-5
    assert (server.left.abs().max() == 0) == (name == "raw"), "of bf16 what rounding leaves out of it"
    assert (server.encoding.residual is not None) == (name != "raw")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes_keep_what_is_left_out_as_they_are(dtype: str) -> None:
    layout = Layout([TensorSpec("w", Kind.PARAMETER, dtype, (64, 32))])
    server, computed = Server("q4", layout), torch.zeros(2048, dtype=torch.float64)
    for seed in range(8):
        x = gradient(seed, 2048).to(getattr(torch, dtype)).double()
        server.received += server.decoded(server.encode(x))
        server.encoding.commit()
        computed += x
    most = 8 * 16 * torch.finfo(getattr(torch, dtype)).eps
    assert (server.received + server.left - computed).abs().max() < most


@pytest.mark.parametrize("name", [name for name in LOSSY if name != "onebit_adam"])
@given(turns=st.lists(st.sampled_from([(), ("w",), ("bias",), ("w", "bias")]), max_size=12))
@settings(max_examples=15, deadline=None)
def test_a_tensor_without_a_gradient_keeps_its_residual(name: str, turns: list[tuple[str, ...]]) -> None:
    """As with several optimizers by turns: the server skips the tensor, so what is sent for it is lost."""
    server, num_w = Server(name), LAYOUT.entries[0].spec.num_elements
    computed, decay = torch.zeros(NUM, dtype=torch.float64), server.codec.decay
    rows = {entry.spec.name: slice(entry.offset // 8, entry.end // 8) for entry in LAYOUT.entries[:2]}
    for seed, idle in enumerate(turns):
        x, before = gradient(seed), server.left.clone()
        for tensor in idle:
            x[rows[tensor]] = 0
        server.encoding.rest(frozenset(idle))
        decoded = server.decoded(memoryview(bytes(server.encode(x))))
        server.encoding.commit()
        forgotten = (1 - decay) * before
        for tensor in idle:
            assert not decoded[rows[tensor]].any()
            forgotten[rows[tensor]] = 0
        server.received += decoded
        computed += x - forgotten
        assert (server.received + server.left - computed).abs().max() < 1e-12 * (seed + 1), (num_w, idle)
        assert server.encoding.norm == pytest.approx(float(server.left.norm()))
