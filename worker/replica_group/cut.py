"""Cuts a list of layers into the stages of a pipeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Costs(NamedTuple):
    """The costs of each layer: seconds per microbatch, bytes of its state, bytes per microbatch in flight."""

    seconds: Sequence[float]
    kept_bytes: Sequence[float]
    batch_bytes: Sequence[float]


class Stage(NamedTuple):
    """The limits of a stage: its relative speed, the most microbatches in flight at once, and its memory in bytes."""

    speed: float = 1.0
    in_flight: int = 1
    limit: float = float("inf")


def cut(costs: Costs, stages: Sequence[Stage]) -> list[int] | None:
    """Returns the number of layers of each stage, at least one, or None if no cut fits all stages into their limits.

    The cut minimizes the time of the slowest stage. Among equal cuts it takes the earlier one. It uses dynamic
    programming over (stage, layers before its end): O(n^2 S) for n layers and S stages.
    """
    seconds, kept, batch = ([0.0, *accumulate(item)] for item in costs)
    num = len(seconds) - 1
    slowest = {0: 0.0}  # the time of the slowest stage, by the number of layers in the stages so far
    chosen: list[dict[int, int]] = []  # for each stage: the first layer by the end layer
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
    """Returns the part of a step in which a process waits, 0..1, if all stages take the same time.

    With one stage per process it is (S - 1) / (M + S - 1) (Huang et al. 2019). Several stages in each process divide
    the waiting time by their number (Narayanan et al. 2021).
    """
    wait = (num_stages - 1) / chunks
    return wait / (num_microbatches + wait)
