"""Peers that average encoded gradients (`--mode allreduce`, worker.codec), as real processes: equal to one process that
encodes each rank's gradient with error feedback, also where one is killed and comes back."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, new_payload
from paramserver.tests.cluster import Cluster, end_well
from paramserver.tests.loopback.scripts.peers import Encode, make
from paramserver.tests.loopback.test_allreduce import killed_and_back, prove, sizes_of, start, versions_of


class Reference:
    """One rank: what its codec makes of its gradients, with what it left out before."""

    def __init__(self, codec: str) -> None:
        self.codec, parameters = CODECS.load(codec)(), dict(make()[0].named_parameters())
        specs = [TensorSpec(name, Kind.PARAMETER, "float64", tuple(p.shape)) for name, p in parameters.items()]
        self.layout, self.residual = Layout(specs), [torch.zeros_like(p) for p in parameters.values()]
        self.coder = self.codec.encoder(self.layout)

    def encoded(self, gradient: list[torch.Tensor]) -> list[torch.Tensor]:
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


def encoding(codec: str, sizes: list[int]) -> Encode:
    """Of three ranks, in versions of so many contributions. A rank that was away begins with no residual."""
    ranks = {rank: Reference(codec) for rank in range(3)}
    left = iter([size for size in sizes for _ in range(size)])

    def encode(rank: int, gradient: list[torch.Tensor]) -> list[torch.Tensor]:
        if next(left) == 2:
            ranks[2] = Reference(codec)
        return ranks[rank].encoded(gradient)

    return encode


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "q4", "bf16"])
def test_it_equals_one_process_that_encodes_for_all(cluster: Cluster, codec: str) -> None:
    server, worker = start(cluster, 3, 40, PS_WORKER__CODEC=codec)
    end_well(*(worker(rank) for rank in range(3)), server)
    versions = versions_of(cluster)
    assert sizes_of(versions) == [3] * 40
    prove(cluster, versions, encode=encoding(codec, sizes_of(versions)))
    encoded_bytes = CODECS.load(codec)().encoded_bytes(Reference(codec).layout)
    for item in cluster.summary()["workers"]:  # to two others; and what members announce
        num_announced = 1 if item["rank"] else 2
        assert 0 <= item["peer_bytes"] - 40 * 2 * encoded_bytes < 40 * 300 * num_announced


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "q4"])
def test_one_is_killed_in_the_middle_and_comes_back(cluster: Cluster, codec: str) -> None:
    """The others send the same bytes once more; it begins again without a residual."""
    server, worker = start(cluster, 3, 40, "adam", "leaves", PS_WORKER__CODEC=codec)
    killed_and_back(cluster, server, worker)
    versions = versions_of(cluster)
    assert sizes_of(versions) == [3] * 10 + [2] * 11 + [3] * 19
    prove(cluster, versions, encode=encoding(codec, sizes_of(versions)))


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (("worker.codec=q4", "worker.zero=1"), "worker.zero is 1, and worker.codec is q4"),
        (("worker.codec=q4", "policy.staleness=2"), "worker.codec is q4, and policy.staleness is 2"),
        (("worker.codec=onebit_adam",), "worker.codec is onebit_adam, and mode allreduce"),
        (("worker.reply_codec=q4",), "worker.reply_codec is q4, and mode allreduce, whose workers"),
    ],
)
def test_settings_that_do_not_go_together(cluster: Cluster, settings: tuple[str, ...], fix: str) -> None:
    flags = [word for setting in settings for word in ("--set", setting)]
    ended = cluster.command("ps", "--mode", "allreduce", "--listen", "127.0.0.1:0", *flags)
    assert (ended.returncode, fix in ended.stderr) == (2, True), ended.stderr
