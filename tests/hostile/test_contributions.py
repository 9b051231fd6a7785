"""Contributions that were said before, elsewhere, in pieces, or not at all: at most one effect, or a reason."""

from __future__ import annotations

import pytest

from . import conftest as wire

both_transports = pytest.mark.parametrize("server", ["grpc", "direct"], indirect=True)


def version(server) -> int:
    """Of the weights, as a new worker is told."""
    peer = server.peer(90)
    peer.join()
    peer.close()
    return peer.version


@both_transports
def test_a_contribution_replayed_on_another_connection_counts_once(server):
    """Whoever recorded a worker's bytes and plays them again fences that worker, and changes nothing else."""
    victim = server.peer(20)
    victim.join()
    recorded = list(wire.contribution(victim.seq + 1, victim.version))
    victim.send(*recorded)
    assert victim.reply() == "APPLIED"
    before = version(server)
    thief = server.peer(20)
    assert thief.join().seq == victim.seq
    for _ in range(2):
        thief.send(*recorded)
        assert thief.reply() == "REPEATED"
    assert victim.ended()[1] == "REPLACED"
    assert version(server) == before


@both_transports
@pytest.mark.parametrize("ahead", [1, 2**40, 2**63])
def test_a_version_that_nobody_was_given(server, ahead):
    """It would make the contribution look computed in the future, in the staleness and in the history."""
    peer = server.peer(26)
    peer.join()
    peer.send(*wire.contribution(peer.seq + 1, peer.version + ahead))
    assert peer.ended()[:2] == ("INVALID_ARGUMENT", "BAD_REQUEST")
    assert version(server) == peer.version
