"""What a baseline is, and which of those asked for can be measured here.

A class with a name, what it needs, and one method for each measurement it takes part in:

    exchange(num_floats)         parts up, down, exchange and whole of a flat float32 tensor (exchange.py)
    latency(floats)              part exchange: gradients there and weights back, in one call
    round(num_floats, workers)   part round: all workers have contributed and have the new weights
    allreduce(sizes, workers)    the mean or sum of tensors over all workers, a part for each size in bytes
    profile(size, workers)       parts forward, backward, step and whole of a transformer's training step
    race(racer)                  a module to call and an optimizer to step, in which the exchange is (racer.py)
    xor(options)                 part step: the xor task, asynchronous, s per step of all workers together

All but `race` return a contestant (turns.py). Wherever there is a choice it is the baseline's fastest way: one
flat tensor instead of many, no optimizer where none is said, results left where they arrive.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from . import BASELINES


class Baseline:
    """Base of the baselines; `name` is as typed, `install` the command that brings what is missing."""

    name: ClassVar[str]
    install: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    programs: ClassVar[tuple[str, ...]] = ()
    only: ClassVar[tuple[str, ...]] = ()  # measurements, of a variant of another baseline

    @property
    def is_installed(self) -> bool:
        return all(map(shutil.which, self.programs)) and all(map(_has_module, self.modules))

    def offers(self, measurement: str) -> bool:
        return hasattr(self, measurement) and measurement in (self.only or (measurement,))

    def running(self) -> AbstractContextManager[Any]:
        """Run what this baseline needs during its measurements."""
        return nullcontext()


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def split_names(text: str | None) -> list[str]:
    """`torch-rpc,gloo` or `all` as checked names of files. UsageError with the nearest name for an unknown one."""
    asked = [name.strip().lower().replace("-", "_") for name in (text or "").split(",") if name.strip()]
    names = BASELINES.names() if asked == ["all"] else [BASELINES.check(name) for name in asked]
    return list(dict.fromkeys(names))


def choose(names: Iterable[str], measurement: str) -> tuple[list[Any], list[str]]:
    """The baselines that take part in measurement `what`, and a line for each that does not."""
    chosen, lines = [], []
    for name in names:
        baseline = BASELINES.load(name)()
        if not baseline.offers(measurement):
            lines.append(f"{baseline.name}: has no part in {measurement}")
        elif not baseline.is_installed:
            lines.append(f"{baseline.name}: NOT INSTALLED, not measured ({baseline.install})")
        else:
            chosen.append(baseline)
    return chosen, lines
