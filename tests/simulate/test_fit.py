"""Fitted on the first half of a run, the second is foreseen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paramserver.common.errors import UsageError
from paramserver.common.registry import MODES
from paramserver.simulate.recorded.replay import calibrate
from paramserver.tests.simulate.histories import recorded
from paramserver.tests.simulate.worlds import MB, config_of, world_of

LINKS: dict[str, Any] = {"up": 4.0 * MB, "down": 4.0 * MB, "latency_s": 0.04, "jitter": 0.15}


@pytest.mark.parametrize("mode", [mode for mode in MODES.names() if not MODES.load(mode).kind.has_peers])
def test_of_a_run_with_jitter_and_unequal_workers(mode: str) -> None:
    """Throughput within 10 %, waiting within 5 points, contributions exactly."""
    steps = 48 if config_of(mode, 4, 1).policy.options(mode).model_dump().get("local_steps", 1) == 1 else 800
    lines = recorded(mode, 4, steps, **LINKS, speeds=(1.0, 1.2, 0.9, 1.0))
    found = calibrate(lines, config_of(mode, 4, steps))
    assert abs(found.rate_error) < 0.1
    assert abs(found.foreseen.wait_share - found.recorded.wait_share) < 0.05
    assert found.foreseen.num == found.recorded.num
    assert found.staleness_distance <= 0.1 or mode in ("ssp", "async_diloco")


def test_far_from_what_was_recorded_it_says_so() -> None:
    found = calibrate(recorded("async", 4, 40, **LINKS), config_of("async", 4, 40))
    assert found.outside(world_of(8, up=2.0 * MB, down=2.0 * MB)) == []
    far = replace(world_of(100), up=10_000.0)
    assert [text.split(",")[0] for text in found.outside(far)] == ["100 workers", "an exchange of 101 s"]


def test_what_a_history_does_not_tell_is_said() -> None:
    config = config_of("async", 2, 6)
    with pytest.raises(UsageError, match=r"rank 0 has 3 contributions in the first half of the history, but 4 are"):
        calibrate(recorded("async", 2, 6), config)
    older = [replace(line, fields={**line.fields, "compute_s": 0.0}) for line in recorded("async", 2, 20)]
    with pytest.raises(UsageError, match="has no computing times"):
        calibrate(older, config)
    with pytest.raises(UsageError, match=r"policy\.delayed_update"):
        calibrate(recorded("async", 2, 20), config_of("async", 2, 20, delayed_update=True))
