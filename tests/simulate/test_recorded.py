"""A real run, of real processes: every decision again, and its second half foreseen from the first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.simulate.plan import Flags, framing_of, resolve, worlds
from paramserver.simulate.recorded.replay import calibrate, config_of, cycles, measured, read_trace, replay

CONFIG = Path(__file__).parents[2] / "configs" / "linear.yaml"
SETTINGS = ("slowdown.base_s=0.04", "slowdown.jitter_s=0.02", "log.level=error", "worker.transports=grpc")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_real_run_is_replayed_and_foreseen(mode: str, tmp_path: Path) -> None:
    """Throughput within 10 %, waiting within 5 points, contributions exactly."""
    history, summary = str(tmp_path / "history.jsonl"), str(tmp_path / "summary.json")
    flags = ["-n", "3", "--mode", mode, "--steps", "60", "--history", history, "--summary", summary]
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    code = "from paramserver.launch.main import main; main()"
    command = [sys.executable, "-c", code, str(CONFIG), *flags, *sets]
    subprocess.run(command, check=True, capture_output=True, timeout=200, cwd=tmp_path)

    lines = read_trace(history)
    verdict = replay(lines)
    assert (verdict.problem, verdict.decided, verdict.notes) == (None, "", [])
    result = json.loads(Path(summary).read_text())
    accepted = sum(line.op == "accept" for line in lines)
    assert accepted == sum(worker["training_steps"] for worker in result["workers"]) == 180

    sets = ["worker.transports=grpc"]
    config, world = worlds(resolve(str(CONFIG), mode, 3, {"run.steps": 60}, sets, {}), Flags())[0]
    recorded = config_of(lines, config)
    found = calibrate(lines, recorded, framing_of(recorded, world.sizes))
    was = found.recorded
    assert found.foreseen.num_sent == was.num_sent > 0
    # Two bytes of a reply are its staleness, which is 0 or not as workers happened to meet; in rounds it always is.
    assert abs(found.foreseen.num_received - was.num_received) <= (0 if mode == "sync" else 2 * was.num)
    assert found.foreseen.num == found.recorded.num == 90
    # What the machine itself did differently in the second half, nobody can foresee from the first.
    first = cycles((line.op, line["t"], line.fields) for line in lines)[:90]
    before = measured(first, first[0].at)
    drift = abs(found.recorded.rate / before.rate - 1)
    assert abs(found.rate_error) < 0.1 + drift
    share = found.recorded.wait_share
    assert abs(found.foreseen.wait_share - share) < 0.05 + abs(share - before.wait_share)
