"""Baselines of the benchmarks, a file each, found by name.

A baseline has a method for each measurement that it takes part in: `exchange`, `latency`, `round`, `allreduce`,
`profile` or `xor` (base.py).
"""

from ...common.registry import Family

BASELINES = Family("paramserver.benchmarks.baselines", "baseline", frozenset({"base", "run"}))
