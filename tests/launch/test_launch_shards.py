"""Several server shards: when each starts, what its failure means; as transcripts and with real processes."""

from __future__ import annotations

import pytest

from paramserver.common.config.sources import load_config
from paramserver.launch.plan.runs import Machine, Request, plan_runs
from paramserver.launch.supervise.supervisor import Supervisor
from paramserver.tests.launch.transcripts import transcripts

DEADLINE_S = 120.0
SOON = ("--set", "launch.backoff_s=0.01")

UP = """
    begin                -> start server (the workers need its address)
    listening server     -> start server shard 1, start server shard 2 (the coordinator is listening)
    listening shard 2    ->
    listening shard 1    -> start worker 0, start worker 1 (every shard of the server is listening)
"""

TRANSCRIPTS = transcripts("shards.txt")


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_life_of_shards(name: str, check_transcript) -> None:
    check_transcript(Supervisor(num_workers=2, num_shards=3, keeps_snapshots=True), UP + TRANSCRIPTS[name])


def test_a_shard_that_never_listens_ends_the_job(check_transcript) -> None:
    transcript = """
        begin                -> start server (the workers need its address)
        listening server     -> start server shard 1 (the coordinator is listening)
        exit shard 1 10      -> end server (server shard 1 failed: exit code 10 (cannot listen on the address))
        exit server 143      -> finish 10 (server shard 1 failed: exit code 10 (cannot listen on the address))
    """
    check_transcript(Supervisor(num_workers=2, num_shards=2, keeps_snapshots=True), transcript)


def test_without_snapshots_a_lost_shard_ends_the_job(check_transcript) -> None:
    transcript = """
        exit shard 2 -9      -> end server, end server shard 1, end worker 0, end worker 1 (server shard 2 failed: killed by SIGKILL; no snapshots)
    """  # noqa: E501
    check_transcript(Supervisor(num_workers=2, num_shards=3), UP + transcript)


def test_the_coordinator_dies_before_its_shards_were_there(check_transcript) -> None:
    transcript = """
        begin                -> start server (the workers need its address)
        listening server     -> start server shard 1 (the coordinator is listening)
        exit server -9 at 1  -> await server for 0.5 s, restart 1 of 3
        tick at 1.5          -> start server (restart 1 of 3)
        listening server     ->
        listening shard 1    -> start worker 0 (every shard of the server is listening)
    """
    check_transcript(Supervisor(num_workers=1, num_shards=2, keeps_snapshots=True), transcript)


def test_shards_on_this_machine_share_its_cores() -> None:
    resolved = load_config(None, {"run.workers": 2, "server.shards": 4, "launch.port": 7000}, [], {})
    (plan,) = plan_runs(resolved, Request(modes=("sync",)), Machine(python="python"))
    assert plan.server is not None
    shards = plan.shards("127.0.0.1:7000")
    assert [str(spec.child) for spec in shards] == ["server shard 1", "server shard 2", "server shard 3"]
    assert {spec.sharing for spec in (plan.server, *shards)} == {4}
    for index, spec in enumerate(shards, start=1):
        sets = [spec.argv[at + 1] for at, word in enumerate(spec.argv) if word == "--set"]
        server = load_config(None, {}, sets, {}).config.server
        assert (server.shard, server.shards, server.coordinator) == (index, 4, "127.0.0.1:7000")
        assert server.listen == "127.0.0.1:0"  # the port is the coordinator's
    assert plan.headline().startswith("sync: a server in 4 shards and 2 workers,")


# ---- real processes ---------------------------------------------------------------------------------


def test_a_run_with_shards(marked) -> None:
    run = marked.run("-n", "2", "--shards", "3")
    assert run.returncode == 0, run.stderr
    output = run.stderr.splitlines()
    assert output[0].startswith("ps-launch: sync: a server in 3 shards and 2 workers,")
    listens = [line for line in output if " listening address=" in line]
    assert sorted(line.partition("]")[0] for line in listens) == ["[server", "[server shard 1", "[server shard 2"]
    first_worker = next(index for index, line in enumerate(output) if line.startswith("[worker"))
    assert first_worker > max(output.index(line) for line in listens)


def test_a_killed_shard_comes_back_at_its_address(marked, read_until) -> None:
    argv = ("-n", "2", "--shards", "2", "--checkpoint-dir", "kept", *SOON)
    launcher = marked.launch(*argv, FAKE_SHARD_1="once kill", FAKE_WORKER="flood 0")
    first = read_until(launcher.stderr, "[server shard 1] listening")
    read_until(launcher.stderr, "server shard 1 failed: killed by SIGKILL; started again in 0.01 s (restart 1 of 3)")
    assert read_until(launcher.stderr, "[server shard 1] listening") == first
    (marked.folder / "flood").touch()
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, err
    assert marked.left() == []
