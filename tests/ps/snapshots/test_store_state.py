"""A store that is captured, written, loaded and restored goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec, as_bytes
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec, is_elementwise, known_optimizers
from paramserver.ps.snapshots.manifest import WEIGHTS, Loaded, load
from paramserver.ps.snapshots.resharding import merge
from paramserver.ps.snapshots.store_state import capture, restore, tensors_of
from paramserver.ps.tensors.model import outer_spec
from paramserver.ps.tensors.store import Step, Store, StoreOptions
from paramserver.tests.ps.snapshots.making import empty_store, written

P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN
ELEMENTWISE = sorted(cls.__name__ for cls in known_optimizers().values() if is_elementwise(cls))

# All kinds, several dtypes, a tied tensor, one of no dimension and one of no elements, in two groups and in none.
LAYOUT = Layout([
    TensorSpec("a", P, "float32", (37, 11), ("tied.a", "again.a")),
    TensorSpec("frozen", F, "float32", (19,)),
    TensorSpec("b/c", P, "float32", (3,)),
    TensorSpec("c", P, "float64", (101,)),
    TensorSpec("d", P, "float32", (1000,)),
    TensorSpec("e", P, "bfloat16", (333,)),
    TensorSpec("f", P, "float32", ()),
    TensorSpec("nothing", P, "float32", (0, 4)),
    TensorSpec("untrained", P, "float32", (5,)),
    TensorSpec("mean", B, "float32", (257,)),
    TensorSpec("var", B, "float64", (65,)),
    TensorSpec("count", B, "int64", ()),
    TensorSpec("seen", B, "bool", (70,)),
])  # fmt: skip
GROUPS = (("nothing", "a", "d"), ("b/c", "c", "e", "f"))


def payload_of(seed: int, layout: Layout = LAYOUT, num_bytes: int | None = None) -> torch.Tensor:
    return random_payload(seed, layout)[:num_bytes].clone()


@functools.lru_cache(maxsize=64)
def random_payload(seed: int, layout: Layout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    payload = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8)
    for spec, view in layout.views(payload):
        if DTYPES[spec.dtype].is_floating_point:
            view.copy_(torch.randn(spec.shape, generator=generator, dtype=torch.float32))
        else:
            view.copy_(torch.randint(0, 2, spec.shape, generator=generator))
    return payload


def optimizer(name: str | None, groups: tuple[tuple[str, ...], ...] = GROUPS, **values: Any) -> OptimizerSpec | None:
    if name is None:
        return None
    return OptimizerSpec(
        name, tuple(GroupSpec(names, {"lr": 0.01 / (i + 1), **values}) for i, names in enumerate(groups))
    )


def new_store(spec: OptimizerSpec | None, layout: Layout = LAYOUT, polyak: float | None = 0.9) -> Store:
    return Store(layout, payload_of(999, layout), spec, StoreOptions(polyak=polyak))


def train(store: Store, first: int, last: int) -> None:
    """Steps first..last - 1, each under a learning rate of its own."""
    for step in range(first, last):
        store.fold(payload_of(step, store.layout, store.layout.exchange_bytes), 1.0, 0)
        rates = [{"lr": 0.01 / (step + 1)}, {"lr": 0.02 / (step + 1)}]
        store.commit(Step(2, 0, rates[: len(store.optimizer.torch.param_groups)] if store.optimizer else None))


def through_files(store: Store, spec: OptimizerSpec | None, folder: Path) -> Loaded:
    return load(written(folder, store, store.layout, spec))


def restored(loaded: Loaded, polyak: float | None = 0.9) -> Store:
    """A store that knows nothing but the snapshot."""
    store = Store(
        loaded.layout,
        torch.full((loaded.layout.total_bytes,), 0xAA, dtype=torch.uint8),
        loaded.manifest.optimizer if loaded.manifest.hyperparameters is not None else None,
        StoreOptions(polyak=polyak),
    )
    restore(store, loaded)
    return store


def assert_same(store: Store, other: Store) -> None:
    assert store.version == other.version
    for averaged in (False, True):
        theirs = other.tensors(averaged)
        for name, tensor in store.tensors(averaged).items():
            assert as_bytes(tensor) == as_bytes(theirs[name]), name  # equal also where training has made a NaN


OPTIMIZERS = [
    pytest.param(None, {}, id="weights"),
    pytest.param("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, id="SGD-momentum"),
    pytest.param("Adam", {"amsgrad": True, "betas": [0.8, 0.95]}, id="Adam-amsgrad"),
    pytest.param("RMSprop", {"momentum": 0.5, "centered": True}, id="RMSprop-centered"),
    *(pytest.param(name, {}, id=name) for name in (*ELEMENTWISE, "Adam+SGD")),
]


@pytest.mark.parametrize(("name", "values"), OPTIMIZERS)
def test_training_goes_on_bit_identically(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | None, values: dict[str, Any]
) -> None:
    monkeypatch.setattr(
        "paramserver.ps.tensors.flat_optimizer.WINDOW_BYTES", 4096
    )  # windows end inside tensors and groups
    spec = optimizer(name, **values)
    straight = new_store(spec)
    train(straight, 0, 50)
    interrupted = new_store(spec)
    train(interrupted, 0, 20)
    resumed = restored(through_files(interrupted, spec, tmp_path))
    assert_same(resumed, interrupted)
    train(resumed, 20, 50)
    assert_same(resumed, straight)
    assert not torch.equal(straight.tensors()["d"], interrupted.tensors()["d"])


def test_what_the_files_hold(tmp_path: Path) -> None:
    spec = optimizer("Adam")
    store = new_store(spec)
    train(store, 0, 3)
    loaded = through_files(store, spec, tmp_path)
    for averaged, file in ((False, "weights.safetensors"), (True, "averaged.safetensors")):
        expected = store.tensors(averaged)
        found = load_file(loaded.path / file)
        assert found.keys() == expected.keys() and "tied.a" in found
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    state = load_file(loaded.path / "optimizer.safetensors")
    trained = [name for group in GROUPS for name in group if name != "nothing"]
    assert sorted(state) == sorted(f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in trained)
    assert state["exp_avg/a"].shape == (37, 11) and state["exp_avg/e"].dtype == torch.bfloat16
    assert state["step/f"].shape == state["exp_avg/f"].shape == ()
    assert {state[f"step/{name}"].item() for name in trained} == {3.0}
    assert [group["lr"] for group in loaded.manifest.hyperparameters or ()] == [0.01 / 3, 0.02 / 3]
    assert loaded.manifest.scalars == ("step",)


def test_a_capture_is_a_moment_and_its_memory_is_used_again(tmp_path: Path) -> None:
    spec = optimizer("Adam")
    store = new_store(spec)
    first = capture(store)  # before there is any state
    train(store, 0, 3)
    second = capture(store, first)
    assert all(second.payloads[file] is payload for file, payload in first.payloads.items())
    assert second.optimizer is not None
    payloads = dict(second.optimizer.payloads)
    assert torch.equal(second.payloads[WEIGHTS], store.weights)
    train(store, 3, 6)
    assert not torch.equal(second.payloads[WEIGHTS], store.weights), "training does not touch it"
    third = capture(store, second)
    assert third.optimizer is not None and third.version == 6
    assert all(third.optimizer.payloads[key] is payload for key, payload in payloads.items())
    other = new_store(spec)
    train(other, 0, 6)
    fresh = tensors_of(capture(other), LAYOUT, spec)
    for file, tensors in tensors_of(third, LAYOUT, spec).items():
        assert all(torch.equal(tensor, fresh[file][name]) for name, tensor in tensors.items())


def test_commits_into_other_memory_are_captured_too() -> None:
    spec = optimizer("SGD", momentum=0.9)
    store = new_store(spec)
    train(store, 0, 2)
    reused = capture(store)
    target = store.weights.clone()
    store.fold(payload_of(5, LAYOUT, LAYOUT.exchange_bytes), 1.0, 0)
    store.commit(Step(1, 0), target)
    assert store.weights is target
    assert torch.equal(capture(store, reused).payloads[WEIGHTS], target)


def test_a_run_may_change_what_it_keeps(tmp_path: Path) -> None:
    spec = optimizer("Adam")
    store = new_store(spec, polyak=None)
    train(store, 0, 3)
    loaded = through_files(store, spec, tmp_path)
    averaging = restored(loaded, polyak=0.5)
    assert averaging.averaged is not None and torch.equal(averaging.tensors(True)["a"], store.tensors()["a"])
    weights_only = empty_store(LAYOUT, None)
    restore(weights_only, loaded)  # the state of the optimizer is left out
    assert_same(weights_only, store)
    from_weights = through_files(weights_only, spec, tmp_path / "weights")
    fresh = new_store(spec, polyak=None)
    restore(fresh, from_weights)  # an optimizer that remembers nothing
    assert fresh.version == 3 and fresh.optimizer is not None and fresh.optimizer.num_state_bytes == 0


def test_an_outer_optimizer_goes_on_and_is_never_taken_for_the_workers(tmp_path: Path) -> None:
    """Both are SGD with momentum here: mode sync's, and what mode diloco runs while AdamW is with the workers."""
    layout, sgd, theirs = LAYOUT, optimizer("SGD", momentum=0.9), optimizer("AdamW")
    outer = outer_spec("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}, layout)
    store, straight = new_store(outer), new_store(outer)
    train(straight, 0, 4)
    train(store, 0, 2)
    loaded = load(written(tmp_path / "diloco", store, layout, theirs, outer=outer))
    assert loaded.whole_optimizer == theirs
    for again in (loaded, merge([loaded], 0, 1)):
        resumed = new_store(outer)
        restore(resumed, again, is_outer=True)
        train(resumed, 2, 4)
        assert_same(resumed, straight)
    merged = merge([loaded], 1, 2)
    assert merged.manifest.outer == outer_spec("SGD", outer.groups[0].hyperparameters, merged.layout)
    restore(other := empty_store(merged.layout, merged.manifest.outer), merged, True)
    assert other.optimizer is not None and 0 < other.optimizer.num_state_bytes < store.optimizer.num_state_bytes
    synchronous = new_store(sgd)
    train(synchronous, 0, 2)
    for spec, snapshot, is_outer in ((sgd, loaded, False), (outer, through_files(synchronous, sgd, tmp_path), True)):
        fresh = new_store(spec)
        restore(fresh, snapshot, is_outer)
        assert fresh.version == 2 and fresh.optimizer is not None and fresh.optimizer.num_state_bytes == 0


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    spec = optimizer("Adam")
    store = new_store(spec)
    train(store, 0, 1)
    loaded = through_files(store, spec, tmp_path)
    with pytest.raises(CheckpointError, match="state of Adam, the run uses SGD"):
        restore(new_store(optimizer("SGD")), loaded)
    with pytest.raises(CheckpointError, match=r"another model: missing tensor|another model: extra tensor"):
        restore(new_store(None, Layout(LAYOUT.specs[1:])), loaded)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[tuple[str, ...], ...]]:
    shapes = st.lists(st.integers(0, 30), max_size=3).map(tuple)
    specs = [TensorSpec("w", P, "float32", (5,))]
    for index in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from([P, P, P, B, F]))
        dtype = draw(
            st.sampled_from(["float32", "float64", "bfloat16", "float16"] + (["int64"] if kind is not P else []))
        )
        aliases = (f"alias.{index}",) if draw(st.booleans()) else ()
        specs.append(TensorSpec(f"t{index}", kind, dtype, draw(shapes), aliases))
    trained = [spec.name for spec in specs if spec.kind is P]
    in_second = {name for name in trained[1:] if draw(st.booleans())}
    second = tuple(name for name in trained if name in in_second)
    return Layout(specs), (tuple(name for name in trained if name not in in_second), *([second] if second else []))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=layouts(), name=st.sampled_from(["Adam", "RMSprop", "ASGD"]), at=st.integers(0, 2),
    sizes=st.tuples(st.sampled_from([256, 4 << 20]), st.sampled_from([256, 4 << 20])),
)  # fmt: skip
def test_any_layout_at_any_step_in_other_windows(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[Layout, Any], name: str, at: int, sizes: tuple[int, int]
) -> None:
    layout, groups = shape
    # Torch's 1e-8 is 0 in float16: RMSprop divides by it, and weights that are not finite are in no snapshot.
    spec = optimizer(name, groups, **({} if name == "ASGD" else {"eps": 1e-3}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paramserver.ps.tensors.flat_optimizer.WINDOW_BYTES", sizes[0])
        straight, interrupted = new_store(spec, layout), new_store(spec, layout)
        train(straight, 0, 4)
        train(interrupted, 0, at)
        loaded = through_files(interrupted, spec, tmp_path_factory.mktemp("any"))
        patch.setattr("paramserver.ps.tensors.flat_optimizer.WINDOW_BYTES", sizes[1])
        resumed = restored(loaded)
        train(resumed, at, 4)
        assert_same(resumed, straight)
