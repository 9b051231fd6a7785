"""The launcher with a real server of several shards, one of which is killed in the middle of a run."""

from __future__ import annotations

import json

import psutil
import pytest

DEADLINE_S = 120.0
NUM_STEPS = 300


@pytest.mark.slow
def test_a_killed_shard_comes_back_and_the_run_is_whole(marked, read_until) -> None:
    argv = ("--task", "xor", "--mode", "async", "--steps", str(NUM_STEPS), "--summary", "summary.json")
    launcher = marked.start(
        *("-m", "paramserver.launch", "-n", "2", "--shards", "2", *argv),
        *("--checkpoint-dir", "kept", "--checkpoint-every", "20"),
        *("--set", "launch.backoff_s=0.01", "--set", "slowdown.base_s=0.02"),
    )
    listening = read_until(launcher.stderr, "[server shard 1] listening")
    for _ in range(2):  # by the second one all shards have the first
        read_until(launcher.stderr, "[server shard 1] snapshot")
    children = psutil.Process(launcher.pid).children(recursive=True)
    (shard,) = [process for process in children if "server.shard=1" in process.cmdline()]
    shard.kill()
    read_until(launcher.stderr, "server shard 1 failed: killed by SIGKILL; started again in 0.01 s (restart 1 of 3)")
    again = read_until(launcher.stderr, "[server shard 1] listening")
    assert again.split("address=")[1].split()[0] == listening.split("address=")[1].split()[0]
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, err
    summary = json.loads((marked.folder / "summary.json").read_text())
    assert summary["version"] == 2 * NUM_STEPS
    assert marked.left() == []
