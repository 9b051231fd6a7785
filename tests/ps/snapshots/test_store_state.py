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
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec, is_elementwise, known_optimizers
from paramserver.common.tensors.sharding import Share, divide
from paramserver.common.tensors.tables import make_spec
from paramserver.ps.snapshots.manifest import WEIGHTS, Loaded, load
from paramserver.ps.snapshots.resharding import merge, merge_tables
from paramserver.ps.snapshots.store_state import capture, restore, tensors_of
from paramserver.ps.tensors.model import outer_spec
from paramserver.ps.tensors.store import Rows, Step, Store, StoreOptions, Tables
from paramserver.tests.ps.snapshots.making import empty_store, written
from paramserver.tests.ps.tensors.payloads import MIXED as LAYOUT
from paramserver.tests.ps.tensors.payloads import random_payload

P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN
ELEMENTWISE = sorted(cls.__name__ for cls in known_optimizers().values() if is_elementwise(cls))

kept_payload = functools.lru_cache(maxsize=64)(random_payload)
GROUPS = (("nothing", "a", "d"), ("b/c", "c", "e", "f"))


def payload_of(seed: int, layout: Layout = LAYOUT, num_bytes: int | None = None) -> torch.Tensor:
    return kept_payload(layout, seed, False)[:num_bytes].clone()


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


# ---- test resharding ------------------------------------------------------------------------------------

# Tables of rows and optimizer state in snapshots: also for another number of shards, of which some have none.


WHOLE = Layout([TensorSpec(name, Kind.PARAMETER, "float32", (8, 4)) for name in ("backbone", "head")])
ADAM = OptimizerSpec("Adam", (GroupSpec(("head",), {"lr": 0.1}),))


def store_of(share: Share) -> Store:
    return empty_store(share.layout, share.optimizer(ADAM))


def step(store: Store) -> None:
    store.fold(torch.ones(store.layout.exchange_bytes // 4).view(torch.uint8).clone(), 1.0, 0)
    store.commit(Step(1, 0))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_first_shard_has_only_tensors_without_state(tmp_path: Path, num_shards: int) -> None:
    parts = []
    for share in divide(WHOLE, 2):
        store = store_of(share)
        step(store)
        parts.append(load(written(tmp_path / str(share.number), store, WHOLE, ADAM, share.number, 2)))
    assert parts[0].manifest.scalars == ()
    for share in divide(WHOLE, num_shards):
        store = store_of(share)
        restore(store, merge(parts, share.number, num_shards))
        step(store)
        for name, tensor in store.tensors().items():
            assert torch.allclose(tensor, torch.full_like(tensor, -0.2 if "head" in name else 0.0)), name


@pytest.mark.parametrize("touched", [1, 6])
def test_only_one_shard_has_stepped_rows(touched: int) -> None:
    spec = make_spec("emb", 8, 2, "float32", 0.1, "SparseAdam", {"lr": 0.1})

    def stepped(tables: Tables, times: int, value: float) -> Tables:
        part = tables.specs[0]
        for _ in range(times):
            is_here = part.first <= touched < part.end
            tables.fold([Rows(0, torch.tensor([touched]), torch.full((1, 2), value))] if is_here else [], 1.0)
            tables.commit()
        return tables

    parts = [stepped(Tables([spec.part(shard, 2)], 0), 3, 1.0).state() for shard in (0, 1)]
    merged = Tables([spec], 0)
    merged.set_state(merge_tables(parts, [spec]))
    wanted = stepped(stepped(Tables([spec], 0), 3, 1.0), 1, -2.0).state()
    found = stepped(merged, 1, -2.0).state()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- tables of rows -----------------------------------------------------------------------------

SMALL = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (12, 2))])
TABLES = tuple(
    make_spec(name, 11, 2, "float32", 0.5, name, {"lr": 0.1})
    for name in ("sgd", "adagrad", "sparse_adam", "rowwise_adagrad")
)
SGD = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.1}),), TABLES)


def store_with_tables(shard: int, shards: int, seed: int | None) -> Store:
    share = divide(SMALL, shards)[shard]
    optimizer = share.optimizer(SGD)
    return empty_store(share.layout, optimizer, tables=Tables(optimizer.tables, seed))


def step_rows(store: Store) -> None:
    rows = []
    for number, spec in enumerate(store.tables.specs):
        ids = torch.arange(spec.first, spec.end, 2)
        rows.append(Rows(number, ids, ids.float()[:, None].repeat(1, 2) + 1))
    store.fold(torch.zeros(store.layout.exchange_bytes, dtype=torch.uint8), 1.0, 0, rows=rows)
    store.commit(Step(1, 0))


def together(stores: list[Store]) -> dict[str, torch.Tensor]:
    states = [store.tables.state() for store in stores]
    return {
        key: torch.cat([state[key] for state in states]) if value.dim() else value for key, value in states[0].items()
    }


def test_a_table_and_its_state_come_back(tmp_path: Path):
    store, other = store_with_tables(0, 1, 1), store_with_tables(0, 1, None)
    step_rows(store)
    captured = capture(store)
    step_rows(store)
    assert capture(store, captured) is not captured  # in the memory of the one before
    restore(other, load(written(tmp_path, store, SMALL, SGD)))
    for item in (store, other):
        step_rows(item)
    mine, theirs = store.tables.state(), other.tables.state()
    assert mine.keys() == theirs.keys() and len(mine) == 4 + 2 + 3 + 1
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("now", [2, 4])
def test_another_number_of_shards_has_the_same_rows(tmp_path: Path, now: int):
    before = [store_with_tables(shard, 3, 1) for shard in range(3)]
    for store in before:
        step_rows(store)
    parts = [load(written(tmp_path / str(shard), store, SMALL, SGD, shard, 3)) for shard, store in enumerate(before)]
    after = [store_with_tables(shard, now, None) for shard in range(now)]
    for shard, store in enumerate(after):
        restore(store, merge(parts, shard, now))
    wanted, found = together(before), together(after)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_snapshot_without_the_table_is_refused(tmp_path: Path):
    loaded = load(written(tmp_path, store_with_tables(0, 1, 1), SMALL, SGD))
    files = {name: tensors for name, tensors in loaded.files.items() if name != "tables.safetensors"}
    with pytest.raises(CheckpointError, match="table 'sgd' is missing"):
        restore(store_with_tables(0, 1, None), loaded._replace(files=files))
