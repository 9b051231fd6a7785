"""One worker's link loses packets or is slow: it falls behind, and nothing else happens."""

from __future__ import annotations

import pytest
import torch

PADDING = 25_000  # floats: an exchange is 100 kB each way
STEPS = 60


def begin(rig, mode: str):
    server = rig.serve(mode, 2, STEPS, *(("--set", "policy.staleness=2") if mode == "ssp" else ()))
    workers = [rig.work(rank, 0.01, PADDING) for rank in range(2)]
    rig.until(lambda: all(rig.history.last_step(rank) >= 3 for rank in range(2)), "first steps")
    return server, workers


def finish(rig, mode: str, server, workers) -> None:
    """All end well; the status has named the straggler, nobody was let go, nobody saw an error."""
    rig.end(*workers, server)
    assert rig.history.ends_of(0) == rig.history.ends_of(1) == ["goodbye"]
    warnings = [e for p in (*workers, server) for e in p.events() if e["level"] in ("warning", "error")]
    assert {event["event"] for event in warnings} <= {"insecure"}, warnings
    rig.check()
    assert torch.equal(rig.applied(), torch.full((2, STEPS), 0.5 if mode == "sync" else 1.0))


def named(server) -> dict[str, int]:
    """What the status says of rank 0, the one that is not slow: how often it waits, and for how long it leads."""
    rows = [row for event in server.events("status") for row in event["workers"] if row["rank"] == 0]
    reasons = [row["waiting_for"] for row in rows if row["waiting_for"]]
    return {
        "waits for rank 1": sum("rank 1" in reason for reason in reasons),
        "waits for something else": sum("rank 1" not in reason for reason in reasons),
        "lead": max(row["lead"] for row in rows),
    }


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
@pytest.mark.parametrize("percent", [1, 5])
@pytest.mark.campaign
def test_lost_packets_make_it_slower_and_nothing_else(rig, mode, percent):
    server, workers = begin(rig, mode)
    rig.net.lose(1, percent)
    finish(rig, mode, server, workers)


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
@pytest.mark.campaign
def test_a_slow_link_is_a_straggler_with_a_name(rig, mode):
    server, workers = begin(rig, mode)
    rig.net.limit(1, 8)
    finish(rig, mode, server, workers)
    named_ranks = named(server)
    if mode == "async":
        assert named_ranks["lead"] >= 10
    else:
        assert named_ranks["waits for rank 1"] >= 3 * max(1, named_ranks["waits for something else"])
