"""Several server shards: as values, and with real processes."""

from __future__ import annotations

import signal

from paramserver.tests.launch.plans import plan_of, resolve, settings_of


def test_shards_have_their_numbers_and_their_own_ports() -> None:
    plan = plan_of(resolve(server__shards=4, launch__port=7000))
    shards = plan.shards("127.0.0.1:7000")
    assert [str(spec.child) for spec in shards] == ["server shard 1", "server shard 2", "server shard 3"]
    for index, spec in enumerate(shards, start=1):
        server = settings_of(spec.argv).server
        assert (server.shard, server.shards, server.coordinator) == (index, 4, "127.0.0.1:7000")
        assert server.listen == "127.0.0.1:0"  # the port is the coordinator's
    assert plan.headline().startswith("sync: a server in 4 shards and 4 workers,")


def test_a_run_with_shards(marked) -> None:
    run = marked.run("-n", "2", "--shards", "3")
    assert run.returncode == 0, run.stderr
    output = run.stderr.splitlines()
    assert output[0].startswith("ps-launch: sync: a server in 3 shards and 2 workers,")
    listens = [line for line in output if " listening address=" in line]
    assert sorted(line.partition("]")[0] for line in listens) == ["[server", "[server shard 1", "[server shard 2"]
    first_worker = next(index for index, line in enumerate(output) if line.startswith("[worker"))
    assert first_worker > max(output.index(line) for line in listens)


def test_a_killed_shard_comes_back_at_its_address_and_from_no_snapshot_of_an_earlier_run(marked, read_until) -> None:
    """The coordinator has one of this run, the shard has none yet."""
    argv = ("--shards", "2", "--checkpoint-dir", "kept", "--resume", "never", "--set", "launch.backoff_s=0.01")
    launcher = marked.launch("-n", "1", *argv, FAKE_SHARD="once kill", FAKE_WORKER="hang")
    first, again = (read_until(launcher.stderr, "[server shard 1] listening") for _ in range(2))
    assert first == again and "resume=never" in again
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=120.0)
    assert marked.left() == []
