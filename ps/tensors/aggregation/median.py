"""The median of every element (Yin et al. 2018, arXiv:1803.01498): right while less than half of the workers lie.

Of an even number of values it is the mean of the two in the middle. Where the workers' gradients differ much by chance,
it learns more slowly than the mean, because most values are ignored.
"""

from __future__ import annotations

from .order import OrderAggregator


class Median(OrderAggregator):
    @property
    def fewest(self) -> int:
        return 3

    def _num_left_out(self, count: int) -> int:
        return (count - 1) // 2


ENTRY = Median
