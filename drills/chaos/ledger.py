"""Compares the weights of a `ledger` run with the contributions in its history.

It imports neither torch nor numpy: a safetensors file is a JSON header and raw little-endian numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import OutputError
from ...common.wire.json_text import read_json
from ..lineage import Lineage

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Epoch:
    """The work of a ledger run: one epoch. `has_rounds`, `may_scale`: traits of the mode (`Policy`)."""

    steps: int  # of each worker
    batch_size: int
    local_steps: int  # in one contribution
    has_rounds: bool = False
    may_scale: bool = False


def read_floats(path: Path, name: str) -> array[float]:
    """A float32 tensor of a safetensors file, flat. Raises OutputError."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            begin, end = read_json(file.read(header_bytes))[name]["data_offsets"]
            file.seek(8 + header_bytes + begin)
            values = array("f", file.read(end - begin))
    except (OSError, ValueError, KeyError) as error:
        raise OutputError(f"the weights in {path} cannot be read: {error}") from None
    if sys.byteorder == "big":
        values.byteswap()
    return values


def audit(path: Path, epoch: Epoch, lineage: Lineage, num_samples: int | None = None) -> tuple[list[str], str]:
    """Compare the saved weights with the contributions of the run's final lineage. Returns problems, and a summary.

    Each sample of a contribution is worth 1, or 1/n in a version of n contributions. Only the workers know which
    samples those are, so both sides are sorted. This still shows lost and repeated samples. Where the mode scales
    contributions, only the number of samples is compared. `num_samples`: in all contributions, where their numbers of
    steps differ.
    """
    applied, clock = sorted(read_floats(path, "applied")), read_floats(path, "clock")
    if epoch.may_scale:
        applied = [float(value != 0) for value in applied]
    expected = [1.0] * num_samples if num_samples is not None else sorted(_expected(epoch, lineage))
    problems = []
    if len(expected) > len(applied):
        problems.append(f"{len(expected):,} samples were committed, but an epoch has {len(applied):,}")
    expected = [0.0] * (len(applied) - len(expected)) + expected
    if repeated := sum(value > 1 + _TOLERANCE for value in applied):
        problems.append(f"{repeated:,} samples were applied more than once")
    if different := sum(abs(item - other) > _TOLERANCE for item, other in zip(applied, expected, strict=False)):
        problems.append(f"{different:,} of {len(applied):,} weights differ from the committed contributions")
    missing = sum(value == 0 for value in applied)
    if missing and not epoch.has_rounds:
        problems.append(f"{missing:,} samples are missing")
    steps = sum(_local_steps(epoch, version) for version in lineage.sizes())
    if (low := min(clock)) != (high := max(clock)):
        problems.append(f"a worker read weights of two versions: the clock shows {low:g} and {high:g}")
    elif not epoch.may_scale and abs(low - steps) >= _TOLERANCE:
        problems.append(f"the clock shows {low:g} steps, committed were {steps}")
    left = f", {missing:,} belong to rounds that closed without their worker" if missing else ""
    passed = f"{len(applied) - missing:,} of {len(applied):,} samples were applied exactly once{left}"
    return problems, f"ledger: {'; '.join(problems) or passed}"


def _expected(epoch: Epoch, lineage: Lineage) -> Iterator[float]:
    """Yields the worth of each applied sample."""
    for version, size in lineage.sizes().items():
        num_samples = size * _local_steps(epoch, version) * epoch.batch_size
        yield from [1.0 if epoch.may_scale else 1 / size] * num_samples


def _local_steps(epoch: Epoch, version: int) -> int:
    """Returns the steps of each contribution in a version; the last round may be shorter."""
    done = (version - 1) * epoch.local_steps if epoch.has_rounds else 0
    return min(epoch.local_steps, epoch.steps - done)
