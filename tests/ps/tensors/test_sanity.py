"""Measuring, judging and mending contributions, against plain torch; what a commit of nothing does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.config.sections.training import StoreConfig
from paramserver.common.tensors.judgement import SOUND, decide, halted, rejected_too_often
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.ps.tensors.sanity import Findings
from paramserver.ps.tensors.store import Step, Store, StoreOptions

P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN
ACTIONS: list[Any] = ["reject", "skip", "clip", "halt"]

LAYOUT = Layout([
    TensorSpec("a", P, "float32", (41, 13)),
    TensorSpec("b", P, "float64", (101,)),
    TensorSpec("c", P, "bfloat16", (77,)),
    TensorSpec("d", P, "float16", (5,)),
    TensorSpec("nothing", P, "float32", (0,)),
    TensorSpec("mean", B, "float32", (30,)),
    TensorSpec("count", B, "int64", (4,)),
    TensorSpec("frozen", F, "float32", (19,)),
])  # fmt: skip
PARAMETERS = ["a", "b", "c", "d"]
Payload = torch.Tensor


def views(payload: Payload, layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    """The tensors of a payload of total_bytes, sharing its memory."""
    return {spec.name: view for spec, view in layout.views(payload)}


def payload_of(seed: int, scale: float = 1.0, layout: Layout = LAYOUT) -> Payload:
    generator = torch.Generator().manual_seed(seed)
    payload = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8)
    for spec, view in layout.views(payload):
        if view.dtype.is_floating_point:
            view.copy_(scale * torch.randn(spec.shape, generator=generator, dtype=torch.float64))
        else:
            view.fill_(-1)  # NaN, were it a float
    return payload


def store_of(limits: StoreConfig, layout: Layout = LAYOUT, sends_gradients: bool = True, **options: Any) -> Store:
    names = tuple(spec.name for spec in layout.specs if spec.kind is P and spec.dtype == "float32")
    spec = OptimizerSpec("Adam", (GroupSpec(names, {"lr": 0.1, "weight_decay": 0.1}),)) if sends_gradients else None
    return Store(layout, payload_of(999, layout=layout), spec, StoreOptions(**{**dict(limits), **options}))


def norm_of(payload: Payload, layout: Layout = LAYOUT) -> float:
    parameters = [v.double().reshape(-1) for (s, v) in layout.views(payload) if s.kind is P]
    return torch.linalg.vector_norm(torch.cat(parameters)).item() if parameters else 0.0


def measured(store: Store, payload: Payload) -> Findings:
    findings = Findings()
    store.sanity.look(payload, slice(None), findings)
    return findings


# ---- the decision, which is pure ------------------------------------------------------------------


@pytest.mark.parametrize("on_nonfinite", ACTIONS)
@pytest.mark.parametrize("on_large", ACTIONS)
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_what_the_settings_say(on_nonfinite: Any, on_large: Any, max_norm: float | None) -> None:
    limits = StoreConfig(on_nonfinite=on_nonfinite, max_norm=max_norm, on_large=on_large)
    assert decide(limits, True, 2.0)[0] == "take", "the cap itself is allowed"
    action, text, limit = decide(limits, False, math.nan)
    assert (action, text, limit) == (on_nonfinite, "NaN or Inf", f"store.on_nonfinite is {on_nonfinite}")
    action, text, limit = decide(limits, True, 2.5)
    if max_norm is None:
        assert (action, text, limit) == ("take", "", "")
    else:
        assert action == on_large
        assert text == "a gradient of norm 2.5"
        assert limit == f"store.max_norm is 2, store.on_large is {on_large}"


@pytest.mark.parametrize("end", [lambda j: halted(3, 17, 41, j), lambda j: rejected_too_often(3, 10, 10, 41, j)])
def test_the_end_of_a_run_names_whom_what_and_the_limit(end: Callable[[Any], Any]) -> None:
    store = store_of(StoreConfig(max_norm=0.5, on_large="halt"))
    error = end(store.sanity.examine(payload_of(1), store.weights))
    assert error.exit_code == 16
    for word in ("rank 3", f"norm {norm_of(payload_of(1)):.4g}", "store.max_norm is 0.5", "version 41"):
        assert word in error.message
    assert "--lr" in error.fix


# ---- measuring ------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.tuples(st.sampled_from(["float32", "float64", "float16", "bfloat16"]), st.integers(0, 200))),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
@settings(max_examples=40, deadline=None)
def test_the_norm_is_that_of_all_parameters(sizes: list[tuple[str, int]], seed: int, scale: float) -> None:
    specs = [TensorSpec(f"t{index}", P, dtype, (size,)) for index, (dtype, size) in enumerate(sizes)]
    layout = Layout([*specs, TensorSpec("statistics", B, "float32", (50,))])
    payload = payload_of(seed, scale, layout)
    findings = measured(store_of(StoreConfig(max_norm=1.0), layout, sends_gradients=False), payload)
    assert findings.is_finite
    assert findings.norm == pytest.approx(norm_of(payload, layout), rel=1e-5)


@given(order=st.permutations(range(8)), data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_order_of_arrival_changes_no_bit_of_the_norm(order: list[int], data: st.DataObject) -> None:
    """A sync run that clips is to be the same to the last bit too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paramserver.ps.tensors.flat_optimizer.WINDOW_BYTES", 192)
        store = store_of(StoreConfig(max_norm=1.0))
    assert len(store.windows) >= 8
    payload, whole = payload_of(3), measured(store, payload_of(3))
    findings = Findings()
    borders = [*range(8), len(store.windows)]
    for part in order:
        store.sanity.look(payload, slice(borders[part], borders[part + 1]), findings)
    assert findings.norm == whole.norm
    assert whole.norm == pytest.approx(norm_of(payload), rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 1e30), ("float32", -3e38), ("float64", 1e300), ("float16", 65504.0), ("bfloat16", 3e38)],
)
def test_a_norm_whose_squares_overflow(dtype: str, value: float) -> None:
    """Large is not the same as infinite: measured, and clipped to the cap."""
    layout = Layout([TensorSpec("w", P, dtype, (100,))])
    store = store_of(StoreConfig(max_norm=2.0), layout, sends_gradients=False)
    payload = new_payload(layout.total_bytes)
    views(payload, layout)["w"].fill_(value)
    expected = abs(views(payload, layout)["w"][0].double().item()) * 10
    assert measured(store, payload).norm == pytest.approx(expected, rel=1e-6)
    judgement = store.sanity.examine(payload, store.weights)
    assert judgement.is_taken and judgement.is_clipped
    assert norm_of(payload, layout) == pytest.approx(2.0, rel=1e-2)


def test_a_norm_that_no_float_holds_is_clipped_to_nothing() -> None:
    layout = Layout([TensorSpec("w", P, "float64", (100,))])
    store = store_of(StoreConfig(max_norm=2.0), layout, sends_gradients=False)
    payload = new_payload(layout.total_bytes)
    views(payload, layout)["w"].fill_(1.7e308)
    assert store.sanity.examine(payload, store.weights).is_clipped
    assert views(payload, layout)["w"].count_nonzero() == 0


@pytest.mark.parametrize("specs", [[], [TensorSpec("w", P, "float32", (0,))], [TensorSpec("n", B, "int64", (3,))]])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_nothing_to_measure_is_sound(specs: list[TensorSpec], max_norm: float | None) -> None:
    layout = Layout(specs)
    payload = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8)
    store = Store(layout, payload.clone(), None, StoreOptions(on_nonfinite="halt", max_norm=max_norm, on_large="halt"))
    assert store.sanity.examine(payload, store.weights) == SOUND
    assert store.sanity.judge(payload, Findings(), store.weights) == SOUND


# ---- clipping -------------------------------------------------------------------------------------


FLOAT32 = Layout([TensorSpec("a", P, "float32", (41, 13)), TensorSpec("b", P, "float32", (9,))])


@pytest.mark.parametrize("layout", [LAYOUT, FLOAT32], ids=["mixed", "float32"])
@pytest.mark.parametrize("window_bytes", [192, 4 << 20])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 20.0, 1e6])
def test_clipping_is_torchs(
    monkeypatch: pytest.MonkeyPatch, max_norm: float, window_bytes: int, layout: Layout
) -> None:
    """The same values as clip_grad_norm_ gives, which rounds norms of half precision to half precision; of float32
    alone to the last digits. Buffers, integers and gaps stay to the last byte."""
    monkeypatch.setattr("paramserver.ps.tensors.flat_optimizer.WINDOW_BYTES", window_bytes)
    store, payload = store_of(StoreConfig(max_norm=max_norm), layout), payload_of(5, layout=layout)
    before = payload.clone()
    found = [view for spec, view in layout.views(payload) if spec.kind is P]
    parameters = [torch.nn.Parameter(torch.zeros_like(view)) for view in found]
    for view, parameter in zip(found, parameters, strict=True):
        parameter.grad = view.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
    judgement = store.sanity.examine(payload, store.weights)
    assert judgement.is_taken
    assert judgement.is_clipped == (norm > max_norm)
    for view, parameter in zip(found, parameters, strict=True):
        tolerance = {"rtol": 5e-4, "atol": 0.0} if view.dtype.itemsize >= 4 else {"rtol": 1e-2, "atol": 1e-6}
        torch.testing.assert_close(view, parameter.grad, **tolerance | ({"rtol": 1e-6} if layout is FLOAT32 else {}))
    assert torch.equal(payload[layout.parameter_bytes :], before[layout.parameter_bytes :])
    if not judgement.is_clipped:
        assert torch.equal(payload, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*PARAMETERS, "mean"])
@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_what_is_not_finite_becomes_nothing(name: str, bad: float, max_norm: float | None) -> None:
    """0 in a gradient; in a statistic, where 0 would be a value, what the server has. All else stays."""
    store, payload = store_of(StoreConfig(on_nonfinite="clip", max_norm=max_norm)), payload_of(5)
    views(payload)[name].reshape(-1)[3] = bad
    expected = payload.clone()
    views(expected)[name].reshape(-1)[3] = views(store.weights)["mean"][3] if name == "mean" else 0.0
    judgement = store.sanity.examine(payload, store.weights)
    assert (judgement.action, judgement.is_clipped, judgement.problem) == ("take", True, f"NaN or Inf in '{name}'")
    assert torch.equal(payload, expected)


def test_what_is_not_finite_of_weights_is_what_the_server_has() -> None:
    """localsgd: a weight of 0 would pull the others' there."""
    store, payload = store_of(StoreConfig(on_nonfinite="clip"), sends_gradients=False), payload_of(5)
    views(payload)["a"][4, 4] = math.nan
    assert store.sanity.examine(payload, store.weights).is_clipped
    assert views(payload)["a"][4, 4] == views(store.weights)["a"][4, 4]


@pytest.mark.parametrize("on_large", ACTIONS)
def test_all_nan_and_what_is_left_is_measured(on_large: Any) -> None:
    store, payload = store_of(StoreConfig(on_nonfinite="clip", max_norm=1e-3, on_large=on_large)), payload_of(5)
    views(payload)["a"].fill_(math.nan)
    judgement = store.sanity.examine(payload, store.weights)
    if on_large == "clip":
        assert judgement.is_taken and judgement.is_clipped
        assert norm_of(payload) == pytest.approx(1e-3, rel=1e-2)
    else:
        assert judgement.action == on_large
        assert "NaN or Inf in 'a', and without them a gradient of norm" in judgement.problem
    payload = torch.full((LAYOUT.total_bytes,), 0xFF, dtype=torch.uint8)  # NaN, every float of it
    assert store.sanity.examine(payload, store.weights).is_clipped
    assert norm_of(payload) == 0.0


@pytest.mark.parametrize("action", ["reject", "skip", "halt"])
@pytest.mark.parametrize("wrong", ["nan", "large"])
def test_what_is_not_clipped_is_not_touched(action: Any, wrong: str) -> None:
    store, payload = store_of(StoreConfig(on_nonfinite=action, max_norm=1.0, on_large=action)), payload_of(5)
    if wrong == "nan":
        views(payload)["a"][0, 0] = math.nan
    before = payload.clone()
    judgement = store.sanity.examine(payload, store.weights)
    assert (judgement.action, judgement.is_clipped) == (action, False)
    assert torch.equal(payload, before)


# ---- a commit of nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("sends_gradients", [True, False])
def test_a_commit_of_nothing_is_a_version_with_the_same_weights(elsewhere: bool, sends_gradients: bool) -> None:
    """No step of the optimizer: its momentum and its weight decay would move the weights along zeros too."""
    stores = [store_of(StoreConfig(), sends_gradients=sends_gradients, polyak=0.9) for _ in range(2)]
    for store in stores:
        store.fold(payload_of(1), 1.0, 0)
        store.commit(Step(2, 0))
    skipping = stores[0]
    before, averaged, records = skipping.weights.clone(), skipping.averaged.clone(), []
    target = None
    if elsewhere:
        target = torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)
        target[LAYOUT.exchange_bytes :] = skipping.weights[LAYOUT.exchange_bytes :]
        skipping_old = skipping.weights
    assert skipping.commit(Step(2, 0, [{"lr": 0.1}]), target, records.append) == []
    assert skipping.version == 2
    assert records[-1] == LAYOUT.exchange_bytes
    assert torch.equal(skipping.weights, before)
    assert torch.equal(skipping.averaged, averaged)
    if elsewhere:
        assert skipping.weights is target
        skipping_old.fill_(0xFF)  # another version is made there
    for store in stores:
        store.fold(payload_of(2), 1.0, 0)
        store.commit(Step(2, 0))
    for name, tensor in stores[1].tensors().items():
        assert torch.equal(skipping.tensors()[name], tensor), name
    assert torch.equal(skipping.averaged, stores[1].averaged)
