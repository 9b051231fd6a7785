"""Workers started by a real torchrun, which starts all of them again when one fails: nothing is applied twice."""

from __future__ import annotations

import os
import signal

import pytest

from paramserver.tests.engines.conftest import EngineRun
from paramserver.tests.ports import free_port

WORKER = ("-m", "paramserver.worker")


def _two_agents(run: EngineRun, port: int, num_each: int, *argv: str, **env: str) -> list:
    return [
        run.program(
            f"agent{node}", "torchrun", "--nnodes=2", f"--nproc-per-node={num_each}", f"--node-rank={node}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1",
            "--max-restarts=3", *WORKER, *argv, **env,
        )
        for node in range(2)
    ]  # fmt: skip


# Where workers step together, training is to wait for all of them: otherwise the first that is back goes on alone.
ALL_OF_3 = ("--set", "policy.min_workers=3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "flags"),
    [("async", ()), ("ssp", ()), ("sync", ALL_OF_3), ("localsgd", (*ALL_OF_3, "--local-steps", "4"))],
    ids=["async", "ssp", "sync", "localsgd"],
)
def test_nothing_is_lost_or_repeated_when_torchrun_starts_all_workers_again(
    run: EngineRun, mode: str, flags: tuple[str, ...]
) -> None:
    """SIGKILL of one worker in the middle: torchrun ends the others and starts all again; the server goes on."""
    server = run.serve(mode, 3, 80, *flags)
    torchrun = _start_three(run)
    _kill_one(run, server, rank=1)
    assert torchrun.wait() == 0, torchrun.output + server.output
    assert server.wait() == 0
    _all_started_twice([torchrun], server, 3)
    again = sorted(event["rank"] for event in torchrun.events("place") if event.get("restarts") == "1")
    assert again == [0, 1, 2]
    run.prove(restarts=1)


def _start_three(run: EngineRun):
    return run.program(
        "torchrun", "torchrun", "--standalone", "--nproc-per-node=3", "--max-restarts=2", *WORKER,
        "--history", run.history, PS_SERVER=run.address, PS_SLOWDOWN__BASE_S="0.02",
    )  # fmt: skip


@pytest.mark.slow
def test_the_agents_of_two_hosts_start_all_workers_again(run: EngineRun) -> None:
    server = run.serve("async", 4, 60)
    agents = _two_agents(
        run, free_port(), 2, "--history", run.history, PS_SERVER=run.address, PS_SLOWDOWN__BASE_S="0.03"
    )
    _kill_one(run, server, rank=3)
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].output + agents[1].output
    assert server.wait() == 0
    _all_started_twice(agents, server, 4)
    run.prove(restarts=1)


def _kill_one(run: EngineRun, server, rank: int) -> None:
    server.until(lambda: run.num_commits() >= 10, "commits")
    victim = next(event["pid"] for event in server.events("joined") if event["rank"] == rank)
    os.kill(victim, signal.SIGKILL)


def _all_started_twice(launchers: list, server, num_workers: int) -> None:
    places = [event for launcher in launchers for event in launcher.events("place")]
    assert sorted(event["rank"] for event in places) == sorted([*range(num_workers)] * 2)
    assert len(server.events("joined")) == 2 * num_workers
    assert len(server.events("listening")) == 1
    killed = [event for event in server.events("left") if event["reason"] == "connection lost"]
    assert killed  # and perhaps who was in an exchange when torchrun ended it
