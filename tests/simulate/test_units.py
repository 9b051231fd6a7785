"""Bandwidths as people write them: b is a bit, B a byte, and a slash parts down from up."""

from __future__ import annotations

import itertools
import math

import pytest

from paramserver.common.errors import UsageError
from paramserver.simulate.machines.units import bandwidth

# 12.5 million bytes per second, and other texts with their millions of bits per second.
MBIT = {
    "100mbit": 100, "100Mbit": 100, "100MBIT": 100, "100 Mbit/s": 100, "100Mb/s": 100, "100mb/s": 100, "100Mbps": 100,
    "12.5MB/s": 100, "12.5mB/s": 100, "12.5MBps": 100, "0.1gbit": 100, "0.1Gb/s": 100, "12500kB/s": 100,
    "5MB/s": 40, "1e3kbit": 1, "none": math.inf,
}  # fmt: skip


@pytest.mark.parametrize(("down", "up"), list(itertools.product(MBIT, repeat=2)))
def test_down_and_up_may_have_units_of_their_own(down: str, up: str) -> None:
    expected = tuple(pytest.approx(MBIT[text] * 1e6 / 8) for text in (down, up))
    assert bandwidth("--bandwidth", f"{down}/{up}") == expected
    assert bandwidth("--bandwidth", down) == (expected[0], expected[0])


@pytest.mark.parametrize(
    "text", ["100", "100Mb", "100MB", "MB/s", "12.5MB/s/", "1mbit/2mbit/3mbit", "-1mbit", "\u0661mbit"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        bandwidth("--bandwidth", text)
    assert "--bandwidth" in caught.value.message and "100mbit" in caught.value.fix
