"""The median of every element (Yin et al. 2018, arXiv:1803.01498). It is robust to less than half of malicious workers.

For an even number of values it is the mean of the two middle values. With noisy gradients it learns more slowly than
the mean, because it ignores most values.
"""

from __future__ import annotations

from .trimmed_mean import TrimmedMean


class Median(TrimmedMean):
    @property
    def fewest(self) -> int:
        return 3

    def _num_left_out(self, count: int) -> int:
        return (count - 1) // 2


ENTRY = Median
