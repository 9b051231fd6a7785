"""Peers that average encoded gradients (`--mode allreduce`, worker.codec), as real processes: equal to one process that
encodes each rank's gradient with error feedback, also where one is killed and comes back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, new_payload
from paramserver.tests.loopback.test_allreduce import gradients, killed_and_back, make, start, versions_of


class Reference:
    """One rank: what its codec makes of its gradients, with what it left out before."""

    def __init__(self, codec):
        self.codec, shapes = CODECS.load(codec)(), make()[0].named_parameters()
        self.layout = Layout([TensorSpec(name, Kind.PARAMETER, "float64", tuple(p.shape)) for name, p in shapes])
        self.residual = [torch.zeros_like(p) for p in make()[0].parameters()]
        self.coder = self.codec.encoder(self.layout)

    def encoded(self, gradient):
        payload, decoded = (new_payload(self.layout.exchange_bytes) for _ in range(2))
        wanted = [item + rest for item, rest in zip(gradient, self.residual, strict=True)]
        for (_, view), item in zip(self.layout.views(payload), wanted, strict=True):
            view.copy_(item)
        out = new_payload(self.codec.encoded_bytes(self.layout))
        self.coder.begin(payload, out)
        self.coder.commit()
        self.codec.decode(self.layout, out, decoded)
        found = [view.clone() for _, view in self.layout.views(decoded)]
        if self.codec.has_feedback:
            self.residual = [item - other for item, other in zip(wanted, found, strict=True)]
        return found


def alone(codec, versions):
    """The weights that come of these contributions, (rank, number), of each version. A rank that was away begins with
    no residual."""
    model, optimizer = make()
    ranks, before = {}, []
    for contributions in versions:
        ranks = {rank: ranks[rank] if rank in before else Reference(codec) for rank, _ in contributions}
        before = list(ranks)
        found = [(ranks[rank].encoded(gradients(rank, number)[0]), 3 + rank) for rank, number in contributions]
        total = sum(weight for _, weight in found)
        for index, p in enumerate(model.parameters()):
            p.grad = sum(item[index] * weight for item, weight in found) / total
        optimizer.step()
    return model.state_dict()


def difference(cluster, codec, versions):
    got, expected = load_file(cluster.folder / "w.safetensors"), alone(codec, versions)
    return max(float((got[key] - expected[key]).abs().max()) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "q4", "bf16"])
def test_it_equals_one_process_that_encodes_for_all(cluster, codec):
    server, worker = start(cluster, 3, 40, flags=("--summary", "s.json"), PS_WORKER__CODEC=codec)
    workers = [worker(rank) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0], workers[0].output
    assert server.wait() == 0
    assert difference(cluster, codec, versions_of(cluster)) <= 1e-9
    assert [len(version) for version in versions_of(cluster)] == [3] * 40
    summary = json.loads((cluster.folder / "s.json").read_text())
    encoded_bytes = CODECS.load(codec)().encoded_bytes(Reference(codec).layout)
    for item in summary["workers"]:  # to two others; and what members announce
        num_announced = 1 if item["rank"] else 2
        assert 0 <= item["peer_bytes"] - 40 * 2 * encoded_bytes < 40 * 300 * num_announced


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "q4"])
def test_one_is_killed_in_the_middle_and_comes_back(cluster, codec):
    """The others send the same bytes once more; it begins again without a residual."""
    server, worker = start(cluster, 3, 40, "leaves", PS_WORKER__CODEC=codec)
    killed_and_back(cluster, server, worker)
    versions = versions_of(cluster)
    assert [len(version) for version in versions] == [3] * 10 + [2] * 11 + [3] * 19
    assert difference(cluster, codec, versions) <= 1e-9


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (("worker.codec=q4", "worker.zero=1"), "worker.zero is 1, and worker.codec is q4"),
        (("worker.codec=q4", "policy.staleness=2"), "worker.codec is q4, and policy.staleness is 2"),
        (("worker.codec=onebit_adam",), "worker.codec is onebit_adam, and mode allreduce"),
        (("worker.reply_codec=q4",), "worker.reply_codec is q4, and mode allreduce, whose workers"),
    ],
)
def test_settings_that_do_not_go_together(cluster, settings, fix):
    flags = [word for setting in settings for word in ("--set", setting)]
    ended = cluster.command("ps", "--mode", "allreduce", "--listen", "127.0.0.1:0", *flags)
    assert (ended.returncode, fix in ended.stderr) == (2, True), ended.stderr


def test_one_with_another_codec_is_refused(cluster):
    server, worker = start(cluster, 2, 5)
    first, second = worker(0), worker(1, PS_WORKER__CODEC="int8")
    assert second.wait() == 2 and "worker.codec is int8 for rank 1, but rank 0" in second.output
    assert (first.wait(), server.wait()) == (0, 0)
