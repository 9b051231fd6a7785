"""Which buffers of a model are averaged."""

import pytest
import torch
from torch import nn

from paramserver.common.errors import UsageError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.statistics import statistics_of
from paramserver.common.wire.protocol import layout_from_proto, layout_to_proto
from paramserver.worker.tensors.transfer import ModelTensors, named_tensors


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def found(model, *classes):
    return statistics_of(model, named_tensors(model), classes)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2),
        nn.InstanceNorm1d(2, track_running_stats=True), nn.InstanceNorm2d(2, track_running_stats=True),
    ],
)  # fmt: skip
def test_those_of_torch_s_norms(norm):
    names = {"running_mean", "running_var", "num_batches_tracked"}
    assert found(nn.Sequential(norm, Own())) == {f"0.{name}" for name in names}


def test_norms_that_keep_none_and_layers_of_ones_own_have_none():
    assert not found(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2), Own()))


def test_a_norm_that_is_wrapped_or_compiled_in_part_is_known():
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.BatchNorm1d(2)))
    assert "1.running_mean" in found(nn.DataParallel(model).module)
    specs = {spec.name: spec for spec in ModelTensors(model).layout.specs}
    assert specs["1.running_mean"].averaged


def test_a_name_of_ones_own():
    assert found(Own(), "mean") == {"mean"}
    with pytest.raises(UsageError, match="no buffer 'maen'") as raised:
        found(Own(), "maen")
    assert raised.value.fix == "did you mean 'mean'?"
    with pytest.raises(UsageError, match="'count' is int64, and integers have no mean"):
        found(Own(), "count")
    with pytest.raises(UsageError, match=r"no buffer 'linear\.weight'"):
        found(Own(), "linear.weight")


def test_the_rule_travels_is_part_of_the_fingerprint_and_divides_runs():
    specs = [spec for spec in ModelTensors(Own(), (), ["mean"]).layout.specs if spec.kind is Kind.BUFFER]
    assert [spec.averaged for spec in specs] == [True, False]
    named, plain = ModelTensors(Own(), (), ["mean"]).layout, ModelTensors(Own()).layout
    assert layout_from_proto(layout_to_proto(named)).fingerprint == named.fingerprint != plain.fingerprint
    (line,) = named.differences(plain)
    assert line.startswith(
        "buffer mean float32[2] is averaged over the workers in the run, and that of the lowest live rank here"
    )
    two = Layout([TensorSpec(name, Kind.BUFFER, "float32", (4,), (), name == "a") for name in "ab"])
    assert [(run.averaged, run.num_elements) for run in two.runs] == [(True, 4), (False, 4)]
