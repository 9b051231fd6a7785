"""Two live jobs that were given one directory for their snapshots: the second says who has it, and ends."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def assert_refused(process, holder, folder: str) -> None:
    assert process.wait() == 14, process.output
    assert f"another server keeps its snapshots in {folder}: process {holder.popen.pid} on " in process.output
    assert "since " in process.output and "its own --checkpoint-dir" in process.output
    assert "Traceback" not in process.output


def second(cluster, name: str, *flags: str):
    argv = ("-m", "paramserver.ps", "--listen", "127.0.0.1:0", "--checkpoint-dir", "kept", *flags)
    return cluster.start(name, *argv, PS_LOG__FORMAT="text")


def test_the_second_job_is_refused_and_a_killed_one_leaves_no_lock(cluster):
    first = cluster.server("--checkpoint-dir", "kept")
    assert_refused(second(cluster, "second"), first, "kept")
    assert_refused(second(cluster, "sharded", "--shards", "2"), first, "kept")
    assert first.popen.poll() is None
    first.kill()
    cluster.server("--checkpoint-dir", "kept")


@pytest.mark.parametrize("shard", [0, 1])
def test_each_shard_has_its_folder_to_itself(cluster, shard):
    first = cluster.server("--checkpoint-dir", "kept", "--shards", "2")
    holder, folder = first, "kept"
    if shard:
        holder, folder = cluster.shard(1, 2, "--checkpoint-dir", "kept"), "kept/shard-1-of-2"
        holder.event("listening")
    other = second(cluster, "other", "--shards", "2", "--shard", str(shard), "--coordinator", "127.0.0.1:1")
    assert_refused(other, holder, folder)
