"""What ours is compared with, one file each; found by their names, as modes and codecs are.

A peer says what it measures by having the method: `exchange`, `latency`, `round`, `allreduce`, `profile` or `xor`
(base.py).
"""

from ...common.registry import Family

BASELINES = Family("paramserver.benchmarks.baselines", "peer", frozenset({"base", "run"}))
