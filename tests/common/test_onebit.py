"""Worker and server end the warm-up of 1-bit Adam with the same version."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.codecs.onebit_adam import OneBitAdamCodec
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.ps.tensors.store import Step, Store

LAYOUT = Layout([TensorSpec(name, Kind.PARAMETER, "float32", (40, 40)) for name in ("a", "b")])
WARM = 3
NUMBERS = {"lr": 0.01, "betas": [0.9, 0.99], "warmup_steps": WARM}
SPEC = OptimizerSpec("OneBitAdam", (GroupSpec(("a", "b"), NUMBERS),))


def second_moments(store: Store) -> dict[str, torch.Tensor]:
    assert store.optimizer is not None
    state = store.optimizer.state()
    stepped = [entry for entry in LAYOUT.entries if state.groups[0].tensors[entry.spec.name].keys]
    return {entry.spec.name: entry.view(state.payloads["exp_avg_sq"]).clone() for entry in stepped}


@pytest.mark.parametrize("empty", [(), (1,), (0, 2)])
@pytest.mark.parametrize("without", [frozenset(), frozenset("b")])
def test_the_second_moment_is_frozen_when_workers_send_momentum(empty: tuple[int, ...], without: frozenset) -> None:
    """Also after a round of which nothing was folded, and for a tensor that had no gradient in one of the rounds."""
    store, preparation = Store(LAYOUT, new_payload(LAYOUT.total_bytes), SPEC), OneBitAdamCodec().preparation(LAYOUT)
    preparation.begin([NUMBERS])
    frozen: dict[str, torch.Tensor] = {}
    for version in range(WARM + 4):
        is_warm = preparation.codec(version).name == "bf16"
        assert is_warm == (version < WARM)
        if not is_warm and not frozen:
            frozen = second_moments(store)
        if version not in empty:
            chance = torch.Generator().manual_seed(version)
            gradient = torch.randn(LAYOUT.num_parameters, generator=chance).view(torch.uint8).clone()
            store.fold(gradient, 1.0, 0, without=without if version == 1 else frozenset())
        numbers = NUMBERS if is_warm else {**NUMBERS, "betas": [0.0, 0.99]}
        store.commit(Step(1, 0, [numbers]))
    found = second_moments(store)
    assert all(torch.equal(found[name], value) for name, value in frozen.items()) and "a" in frozen
