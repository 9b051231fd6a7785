"""Codecs that remember, against references of a few lines: what their papers say, a worker by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paramserver.common.codecs.base import decode_payload
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from paramserver.common.tensors.onebit import OneBitAdam
from paramserver.worker.tensors.transfer import Stretch
from paramserver.worker.transports.encoding import Encoding


class Way:
    """One matrix from a worker to what a server makes of it."""

    def __init__(self, name: str, *shape: int) -> None:
        self.layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", shape)])
        self.codec = CODECS.load(name)()
        self.encoding = Encoding(self.codec, self.layout, 1)

    def send(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(bytes as float32, what they are decoded to)."""
        payload, found = (
            torch.from_numpy(values.astype(np.float32)).view(torch.uint8),
            new_payload(self.layout.total_bytes),
        )
        sent = torch.frombuffer(bytearray(self.encoding.whole(Stretch(0, [as_bytes(payload)]))), dtype=torch.uint8)
        decode_payload(self.codec, self.layout, sent, found)
        return sent.view(torch.float32).numpy(), found.view(torch.float32).numpy()


def test_powersgd_is_a_step_of_the_power_method_each_time() -> None:
    rng, way = np.random.default_rng(0), Way("powersgd", 40, 6, 10)
    e, q = np.zeros((40, 60)), torch.randn(60, generator=torch.Generator().manual_seed(0)).numpy().astype(float)
    for step in range(6):
        gradient = rng.normal(size=(40, 60))
        matrix = gradient + e
        p = matrix @ q
        p /= np.linalg.norm(p)
        sent, decoded = way.send(gradient.reshape(-1))
        assert np.allclose(sent, np.concatenate([p, matrix.T @ p]), rtol=1e-3, atol=1e-4)
        assert np.allclose(decoded.reshape(40, 60), np.outer(p, matrix.T @ p), atol=1e-3)
        if step == 3:
            way.encoding.rollback()  # dropped: nothing is remembered of it
            continue
        way.encoding.commit()
        e, q = matrix - np.outer(p, matrix.T @ p), matrix.T @ p
        if step == 4:
            way.encoding.start()
            e, q = np.zeros((40, 60)), torch.randn(60, generator=torch.Generator().manual_seed(0)).numpy().astype(float)


def test_powersgd_finds_what_is_of_rank_one_and_survives_zeros() -> None:
    rng, way = np.random.default_rng(0), Way("powersgd", 64, 32)
    assert not way.send(np.zeros(64 * 32))[1].any()
    way.encoding.commit()
    matrix = np.outer(rng.normal(size=64), rng.normal(size=32))
    assert np.allclose(way.send(matrix.reshape(-1))[1].reshape(64, 32), matrix, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_of_a_matrix_is_seen(bad: float) -> None:
    values = np.ones(64 * 32)
    values[77] = bad
    assert not np.isfinite(Way("powersgd", 64, 32).send(values)[1]).all()


def test_what_would_hardly_shrink_is_bf16() -> None:
    assert CODECS.load("powersgd")().encoded_bytes(Way("powersgd", 1000, 2).layout) == 2 * 2000
    assert CODECS.load("powersgd")().encoded_bytes(Way("powersgd", 1000, 4).layout) == 2 * 4 * 1004 - 4 * 1004


def test_one_bit_adam_is_adam_with_a_second_moment_that_stands_still() -> None:
    """Against the paper's lines, and no element further than the rate; of one worker, without a codec."""
    rng, weight = np.random.default_rng(0), torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    unused = torch.nn.Parameter(torch.ones(1))
    optimizer = OneBitAdam([weight, unused], lr=0.1, eps=0.01, weight_decay=0.5, warmup_steps=3)
    theta, m, v = np.ones(5), np.zeros(5), np.zeros(5)
    for step in range(1, 8):
        gradient = rng.normal(size=5)
        weight.grad = torch.from_numpy(gradient)
        unused.grad = torch.full((1,), float(step > 5))
        optimizer.step()
        m = 0.9 * m + 0.1 * gradient
        if step <= 3:
            v = 0.999 * v + 0.001 * gradient**2
        m_hat = m / (1 - 0.9**step) if step <= 3 else m
        change = m_hat / (np.sqrt(v / (1 - 0.999 ** min(step, 3))) + 0.01)
        theta = theta * (1 - 0.1 * 0.5) - 0.1 * (change if step <= 3 else change.clip(-1, 1))
        assert np.allclose(weight.detach().numpy(), theta, atol=1e-12), step
    assert torch.allclose(unused, torch.tensor(0.95**7)), "what had no gradient in the warm steps decays only"
    with pytest.raises(ValueError, match=r"warmup_steps is 0\.5"):
        OneBitAdam([weight], warmup_steps=0.5)


def test_one_bit_adam_sends_gradients_then_signs_of_momentum() -> None:
    rng, way = np.random.default_rng(0), Way("onebit_adam", 32, 64)
    encoding = way.encoding
    encoding.of_optimizer([{"betas": [0.8, 0.99], "warmup_steps": 3.0}])
    hyperparameters = ({"betas": [0.8, 0.99], "lr": 0.1},)
    m = e = np.zeros(2048)
    for version in range(8):
        encoding.ready(version)
        gradient = rng.normal(size=2048)
        way.codec = encoding.codec
        decoded = way.send(gradient)[1]
        new_m = 0.8 * m + 0.2 * gradient
        c = (gradient if version < 3 else new_m) + e
        wanted = c if version < 3 else np.sqrt((c * c).mean()) * np.where(c < 0, -1, 1)
        assert np.allclose(decoded, wanted, rtol=2**-8, atol=1e-6), version
        assert encoding.prepared(hyperparameters) == (
            hyperparameters if version < 3 else ({"betas": [0.0, 0.99], "lr": 0.1},)
        )
        assert encoding.prepared(hyperparameters) is encoding.prepared(hyperparameters)
        if version == 5:
            encoding.rollback()
            continue
        encoding.commit()
        m, e = new_m, c - decoded
        if version == 6:
            encoding.start()
            m = e = np.zeros(2048)
