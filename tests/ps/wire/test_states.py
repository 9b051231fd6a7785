"""What a script remembers counts with its contribution, and goes to the process that takes its rank."""

from __future__ import annotations

from typing import Any

import pytest

from paramserver.common.wire.records import Contribution, ContributionId, Position, Row
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.folding import States

from ...records import contribution_proto
from ..streams import LARGE, Server, Worker, served, turns


def contribute(worker: Worker, step: int, offset: int | None = None, **fields: Any) -> None:
    at = {} if offset is None else {"position": pb.Position(step=offset, local_steps=1, batches=4 * offset, epoch=0)}
    worker.contribute(step, **at, **fields)


def begun(worker: Worker) -> tuple[int, bytes] | None:
    """What came with the START."""
    start = next(message.header for message in worker.stream.received if message.kind == "reply")
    payload = b"".join(message.header.piece for message in worker.stream.received if message.kind == "state")
    return (start.start.position.step, payload) if start.start.HasField("position") else None


async def replaced(server: Server, rank: int) -> Worker:
    worker = Worker(server, rank)
    await worker.join()
    await server.settle()
    return worker


@served(workers=1)
async def test_the_next_process_begins_where_the_last_contribution_that_counts_did(server: Server) -> None:
    (worker,) = await server.workers(1)
    assert begun(worker) is None
    worker.tell("state", b"at the beginning", 3)
    contribute(worker, 1, 0)
    await server.settle()
    assert begun(await replaced(server, 0)) == (0, b"at the beginning")
    worker = await replaced(server, 0)
    worker.tell("state", b"then", 2)
    contribute(worker, 2, 1, version=1)
    await server.settle()
    contribute(worker, 3, 2, version=2)  # the same as before: only its place is said
    await server.settle()
    worker.tell("state", b"never mind", 3)  # dies before its contribution
    await turns()
    assert begun(await replaced(server, 0)) == (2, b"then")
    worker = await replaced(server, 0)
    contribute(worker, 4, version=3)  # a script that remembers nothing any more
    await server.settle()
    assert begun(await replaced(server, 0)) is None


@served(workers=2)
async def test_what_was_dropped_or_refused_is_not_remembered(server: Server) -> None:
    worker, other = await server.workers(2)
    worker.tell("state", b"one", 3)
    contribute(worker, 1, 0)
    contribute(other, 1)
    await server.settle()
    worker.tell("state", b"two", 3)
    contribute(worker, 2, 1, version=0)  # its round has closed
    await server.settle()
    assert worker.outcomes == ["START", "APPLIED", "DROPPED"]
    assert begun(await replaced(server, 0)) == (0, b"one")


@served(LARGE, workers=1)
async def test_it_may_come_between_the_pieces_of_a_payload(server: Server) -> None:
    (worker,) = await server.workers(1)
    worker.begin()
    worker.piece(0, 200_000)
    worker.tell("state", b"state", 3)
    worker.send(contribution=contribution_proto(
        1, num_samples=1, wants_weights=True, num_bytes=400_000, position=pb.Position(step=0, local_steps=1)
    ))  # fmt: skip
    worker.piece(200_000, 200_000)
    await server.settle()
    assert begun(await replaced(server, 0)) == (0, b"state")
    server.check_no_memory_is_kept()


WRONG = [{"offset": 7}, {"num_bytes": 4}, {"num_bytes": 2**40}, {"piece": b"much more than was said to come"}]


@pytest.mark.parametrize("fields", WRONG, ids=str)
@served(workers=1)
async def test_pieces_that_cannot_be_are_refused(server: Server, fields: dict[str, Any]) -> None:
    (worker,) = await server.workers(1)
    worker.tell("state", b"sound", 3, **fields)
    contribute(worker, 1, 0)
    await server.settle()
    assert await worker.end() == ("LIMIT_EXCEEDED" if fields.get("num_bytes") == 2**40 else "BAD_REQUEST")
    server.check_no_memory_is_kept()


@served(workers=1)
async def test_a_contribution_before_all_of_it_is_refused(server: Server) -> None:
    (worker,) = await server.workers(1)
    worker.send(state=pb.State(num_bytes=9, piece=b"half"))
    contribute(worker, 1, 0)
    assert await worker.end() == "BAD_REQUEST"


def test_what_is_kept_is_what_a_snapshot_may_need() -> None:
    """In a round that is open one contribution more counts than a version holds."""
    states = States()
    for number in range(1, 6):
        contribution = Contribution(ContributionId(0, 1, number), position=Position(step=number - 1))
        states.counted(contribution, b"%d" % number if number % 2 else None, num_committed=number - 1)
        assert len(states.of_rank[0]) <= 2
    (kept,), newest = states.saved({0: 4, 1: 3}).values(), states.at(0, 5)
    assert (kept.position["step"], kept.payload) == (3, b"3")
    assert newest is not None and (newest.position["step"], newest.payload) == (4, b"5")
    restored = States()
    restored.restore({0: Row(4)}, {"0": {"step": 3}}, {0: b"3", 2: b"of a place that is not known"})
    assert restored.saved({0: 4, 2: 9}) == {0: ({"step": 3}, b"3")}
    restored.counted(Contribution(ContributionId(0, 3, 5)), None, 5)
    assert restored.at(0, 5) is None
