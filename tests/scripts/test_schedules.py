"""A process that takes a rank, and whose schedule begins anew because the script registered nothing: it is stopped, or
the log says so. A script that goes on where its rank was is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster, Process, at_gates

SCRIPT = Path(__file__).parent / "state" / "schedule.py"
slow = pytest.mark.slow
FIX = "session.state(scheduler=scheduler)"


def run(cluster: Cluster, mode: str, how: str, *flags: str, workers: int = 1) -> tuple[Process, list[Process]]:
    """The last worker waits at the gate, after six steps."""
    server = cluster.server("--mode", mode, "--workers", str(workers), "--steps", "16", *flags)
    ranks = [cluster.script(rank, SCRIPT, HOW=how) for rank in range(workers - 1)]
    ranks.append(cluster.script(workers - 1, SCRIPT, HOW=how, GATE_AT="6"))
    at_gates(ranks[-1])
    return server, ranks


def replaced(cluster: Cluster, server: Process, old: Process, how: str, rank: int = 0, **env: str) -> Process:
    """Another process has the rank; it waits nowhere."""
    old.kill()
    server.event("left")
    return cluster.script(rank, SCRIPT, HOW=how, **env)


def stopped(process: Process, *texts: str) -> None:
    assert process.wait() == 2, process.output
    assert "Traceback" not in process.output
    for text in ("resumes at training step", FIX, "session.step", "worker.accept_restarted_schedule", *texts):
        assert text in process.output, process.output


LOCAL = ("--local-steps", "2")


@pytest.mark.parametrize(
    ("mode", "how", "flags"),
    [
        ("sync", "cosine", ()),
        pytest.param("async", "inner", (), marks=slow),
        pytest.param("ssp", "counter", (), marks=slow),
        pytest.param("sync", "plateau", (), marks=slow),
        pytest.param("buffered", "epochs", ("--buffer", "1"), marks=slow),
        ("localsgd", "cosine", LOCAL),
        pytest.param("diloco", "inner", LOCAL, marks=slow),
        pytest.param("async_diloco", "counter", LOCAL, marks=slow),
    ],
)
def test_a_process_that_takes_a_rank_with_a_schedule_that_begins_anew_is_stopped(
    cluster: Cluster, mode: str, how: str, flags: tuple[str, ...]
) -> None:
    server, (first,) = run(cluster, mode, how, *flags)
    second = replaced(cluster, server, first, how)
    names = {"cosine": "CosineAnnealingLR", "inner": "StepLR", "plateau": "ReduceLROnPlateau"}
    stopped(second, names.get(how, "learning rate"), "0.1")


@pytest.mark.parametrize("how", ["constant", pytest.param("by hand", marks=slow)])
def test_a_script_that_registers_nothing_is_warned_once(cluster: Cluster, how: str) -> None:
    """Its counters cannot be seen. A rate that was changed by hand stops nobody."""
    server, (first,) = run(cluster, "sync", how)
    assert not first.events("nothing_registered"), "a new run"
    second = replaced(cluster, server, first, how)
    assert (second.wait(), server.wait()) == (0, 0), second.output
    (event,) = second.events("nothing_registered")
    assert event["level"] == "warning" and event["step"] == 6 and FIX in event["fix"]
    assert ("learning rate restarts at 0.1 instead of 0.02" in event["meaning"]) == (how == "by hand")


@pytest.mark.parametrize("how", ["registered", "warm-up"])
def test_a_script_that_goes_on_where_its_rank_was_hears_nothing(cluster: Cluster, how: str) -> None:
    server, (first,) = run(cluster, "sync", how)
    second = replaced(cluster, server, first, how)
    assert (second.wait(), server.wait()) == (0, 0), second.output
    assert not second.events("nothing_registered") and "finished at 16" in second.output


@slow
def test_workers_that_average_among_themselves_are_stopped_too(cluster: Cluster) -> None:
    """A live member has given it the optimizer, rate included; its own schedule differs from the next step on."""
    server, ranks = run(cluster, "allreduce", "cosine", "--set", "policy.min_workers=2", workers=2)
    second = replaced(cluster, server, ranks[1], "cosine", rank=1)
    assert second.wait() == 2, second.output
    assert "the optimizer of rank 1 would step with other hyperparameters" in second.output
    assert "session.state(scheduler=...)" in second.output
