"""Baselines of the benchmarks, a file each, found by name.

A peer says what it measures by having the method: `exchange`, `latency`, `round`, `allreduce`, `profile` or `xor`
(base.py).
"""

from ...common.registry import Family

BASELINES = Family("paramserver.benchmarks.baselines", "peer", frozenset({"base", "run"}))
