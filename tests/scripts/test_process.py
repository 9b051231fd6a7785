"""A session belongs to the process that made it: children leave without effect, and use it with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster, end_well

HERE = Path(__file__).parent / "process"


@pytest.mark.parametrize(
    ("how", "code"), [("exit", 0), ("fail", 1), ("close", 0), ("finish", 2), ("step", 2), ("record", 2), ("shard", 2)]
)
def test_a_forked_child_does_not_leave_for_its_parent_or_train_for_it(cluster: Cluster, how: str, code: int) -> None:
    server = cluster.server("--mode", "sync", "--workers", "1", "--steps", "8")
    script = cluster.script(0, HERE / "forks.py", how)
    end_well(script, server)
    assert f"child {code}" in script.output
    assert script.output.count("belongs to process") == (code == 2), script.output
    assert "weights [[-0.8" in script.output, script.output
    assert "Traceback" not in script.output or how == "fail"
    assert server.event("summary")["workers"][0]["training_steps"] == 8


def test_a_spawned_child_that_runs_the_script_again_does_not_join(cluster: Cluster) -> None:
    server = cluster.server("--mode", "sync", "--workers", "1", "--steps", "4")
    script = cluster.script(0, HERE / "spawns.py")
    end_well(script, server)
    assert "steps 4" in script.output
    assert not server.events("replaced")


def test_a_spawned_child_that_uses_the_session_is_told_of_the_guard(cluster: Cluster) -> None:
    server = cluster.server("--mode", "sync", "--workers", "1", "--steps", "4")
    script = cluster.script(0, HERE / "spawns.py", "used")
    assert script.wait() != 0
    assert script.output.count('if __name__ == "__main__":') == 1, script.output
    assert "belongs to process" in script.output
    assert not server.events("replaced")
