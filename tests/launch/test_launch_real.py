"""The launcher with the real ps-server and ps-worker, which are killed in the middle of a run."""

from __future__ import annotations

import json

import psutil
import pytest

from paramserver.common.reporting.summary import Summary

DEADLINE_S = 120.0
NUM_STEPS = 300


@pytest.mark.slow
def test_a_killed_server_and_a_killed_worker_come_back_and_the_run_is_whole(marked, read_until) -> None:
    argv = ("--task", "xor", "--mode", "async", "--steps", str(NUM_STEPS), "--summary", "summary.json")
    launcher = marked.start(
        *("-m", "paramserver.launch", "-n", "2", *argv, "--checkpoint-dir", "kept", "--checkpoint-every", "20"),
        *("--set", "launch.backoff_s=0.01", "--set", "slowdown.base_s=0.01"),
    )

    def kill(words: str) -> None:
        children = psutil.Process(launcher.pid).children(recursive=True)
        (victim,) = [process for process in children if words in " ".join(process.cmdline())]
        victim.kill()

    read_until(launcher.stderr, "[server] snapshot")
    kill("paramserver.ps")
    read_until(launcher.stderr, "server failed: killed by SIGKILL; started again in 0.01 s (restart 1 of 3)")
    read_until(launcher.stderr, "[worker 1] rejoined")
    kill("--rank 1")
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, err
    assert "worker 1 failed: killed by SIGKILL; started again in 0.01 s (restart 1 of 3)" in err
    summary = Summary.model_validate(json.loads((marked.folder / "summary.json").read_text()))
    assert summary.version == 2 * NUM_STEPS
    assert [worker.restarts for worker in summary.workers] == [0, 1], "worker 0 joined the second server, and lived"
    assert marked.left() == []
