"""localsgd: every worker takes K steps of its own optimizer, then all weights are averaged.

Local SGD (Stich 2018; federated averaging, McMahan et al. 2017), weighted by samples. The
optimizer's state stays with the worker. A last, shorter round covers a number of steps that
K does not divide. Bytes per step are 1/K of sync's.
"""

from __future__ import annotations

from .rounds import RoundPolicy


class LocalSgdPolicy(RoundPolicy):
    contribution = "weights"

    @property
    def local_steps(self) -> int:
        return self.options.local_steps


ENTRY = LocalSgdPolicy
