"""The mean without the `trim` largest and smallest values of every element (Yin et al. 2018, arXiv:1803.01498).

It is robust to at most `trim` malicious workers, and closer to the mean's precision than the median.
"""

from __future__ import annotations

from .order import OrderAggregator


class TrimmedMean(OrderAggregator):
    @property
    def fewest(self) -> int:
        return 2 * self.trim + 1

    def _num_left_out(self, count: int) -> int:
        return min(self.trim, (count - 1) // 2)


ENTRY = TrimmedMean
