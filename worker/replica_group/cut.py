"""Cuts a list of layers into the stages of a pipeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Costs(NamedTuple):
    """What each layer takes: seconds for a microbatch, bytes that it keeps, bytes for each microbatch under way."""

    seconds: Sequence[float]
    kept_bytes: Sequence[float]
    batch_bytes: Sequence[float]


class Stage(NamedTuple):
    """What a stage has: its relative speed, microbatches under way in it at once, and a limit of bytes."""

    speed: float = 1.0
    in_flight: int = 1
    limit: float = float("inf")


def cut(costs: Costs, stages: Sequence[Stage]) -> list[int] | None:
    """The number of layers of each stage, at least one. The slowest stage is as fast as possible; of equal cuts the
    earlier one is taken. None where no cut keeps all stages within their limits.

    A dynamic programme over (stage, layers before its end): O(n^2 S) for n layers and S stages."""
    seconds, kept, batch = ([0.0, *accumulate(item)] for item in costs)
    num = len(seconds) - 1
    slowest = {0: 0.0}  # by the number of layers in the stages so far
    chosen: list[dict[int, int]] = []  # of each stage, where it begins, by where it ends
    for stage in stages:
        found: dict[int, float] = {}
        begins: dict[int, int] = {}
        for end in range(1, num + 1):
            for begin, before in slowest.items():
                num_bytes = kept[end] - kept[begin] + stage.in_flight * (batch[end] - batch[begin])
                if begin >= end or num_bytes > stage.limit:
                    continue
                value = max(before, (seconds[end] - seconds[begin]) / stage.speed)
                if end not in found or value < found[end]:
                    found[end], begins[end] = value, begin
        slowest = found
        chosen.append(begins)
    if num not in slowest:
        return None
    ends = [num]
    for begins in reversed(chosen):
        ends.append(begins[ends[-1]])
    ends.reverse()
    return [end - begin for begin, end in pairwise(ends)]


def bubble(num_stages: int, num_microbatches: int, chunks: int = 1) -> float:
    """The part of a step in which a process waits, with equal stages: (S - 1) / (M + S - 1) (Huang et al. 2019); with
    several stages in each process the wait is divided by their number (Narayanan et al. 2021)."""
    wait = (num_stages - 1) / chunks
    return wait / (num_microbatches + wait)
