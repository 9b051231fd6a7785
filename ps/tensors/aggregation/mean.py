"""The weighted mean, which is the exact gradient of all samples. One malicious worker can move it without limit.

At most one payload waits to be added, so memory does not grow with the number of workers.
"""

from __future__ import annotations

import torch

from .base import Aggregator, Kept


class Mean(Aggregator):
    def _add(self, kept: Kept, may_keep: bool) -> list[torch.Tensor]:
        reusable = self._take_in()
        self._kept.append(kept)
        return reusable if may_keep else reusable + self._take_in()

    def _take_in(self) -> list[torch.Tensor]:
        reusable = [kept.payload for kept in self._kept]
        if reusable:
            for window in self._windows:
                self.complete(window)
            self._kept.clear()
            self._first, self._is_read_only = self.result, False
        return reusable


ENTRY = Mean
