"""The commands behind what docs say about learning; what they find in full is in docs/log.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paramserver.benchmarks.claims.codecs import run


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_four_bits_of_a_gradient_learn_as_well_as_all() -> None:
    raw, q4 = run("raw", "momentum", 0, 50), run("q4", "momentum", 0, 50)
    assert raw.accuracy > 0.7, raw
    assert abs(q4.accuracy - raw.accuracy) < 0.05, q4
    assert q4.ratio > 7.5
