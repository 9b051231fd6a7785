"""SyncBatchNorm in a group: what the mathematics of a single value would give without a word."""

from __future__ import annotations

import pytest
import torch

from paramserver.worker.replica_group import batch_norm
from paramserver.worker.replica_group.batch_norm import GroupBatchNorm


class WithoutOthers:
    """A group whose other processes have no samples in this step."""

    def sum_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


def test_one_value_in_all_processes_is_refused_as_torch_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "_group", WithoutOthers())
    layer, plain = GroupBatchNorm(3), torch.nn.BatchNorm1d(3)
    for module in (plain, layer):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            module(torch.randn(1, 3))
        assert torch.equal(module.running_var, torch.ones(3))
    batch = torch.randn(2, 3)
    assert torch.allclose(layer(batch), plain(batch), atol=1e-6)
    assert torch.allclose(layer.running_var, plain.running_var)
