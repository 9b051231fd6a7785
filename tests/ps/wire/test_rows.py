"""Gradients of rows wait for memory as the payload does that they come with: they count as one of server.max_staged."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.tensors.tables import make_spec
from paramserver.common.wire.frames import frame
from paramserver.common.wire.segments import new_segment
from paramserver.proto import parameter_server_pb2 as pb

from ..streams import SMALL, Server, Worker, served

TABLE = make_spec("items", 12, 2, "float32", 0.1, "sgd", {"lr": 1.0})


def tell(worker: Worker, *ids: int) -> None:
    values = torch.ones(len(ids), 2)
    data = torch.tensor(ids).numpy().tobytes() + values.numpy().tobytes()
    worker.stream.send(frame(pb.WorkerMessage(rows=pb.Rows(table=0, count=len(ids))), 0, [memoryview(data)]))


def ones_of(server: Server, before: torch.Tensor) -> list[int]:
    """Rows that a step along 1 has moved, as often as it has."""
    assert server.engine.model.store.tables is not None
    moved = before - server.engine.model.store.tables.state()["weight/items"]
    return [round(float(row[0])) for row in moved]


@pytest.mark.parametrize("is_shared", [False, True])
@served(workers=3, layout=SMALL, max_staged=1, mode="async")
async def test_rows_of_a_second_worker_wait_for_the_first_ones(server: Server, is_shared: bool) -> None:
    """In whatever memory the payloads themselves come; and rows without a contribution go with their worker."""
    workers = [Worker(server, rank) for rank in range(3)]
    for worker in workers:
        worker.segment = new_segment(SMALL.exchange_bytes) if is_shared else None
        await worker.join(worker.segment and worker.segment.address, tables=[TABLE])
        await server.engine.until(lambda: server.engine.model.has_weights, 10)  # tables are made on a thread
    await server.settle()
    staging, tables = server.engine.model.staging, server.engine.model.store.tables
    assert tables is not None
    before = tables.state()["weight/items"]
    for worker in workers:
        tell(worker, 1, 2)
        tell(worker, 5)
        await server.settle()
    assert (staging.num_lent, staging.num_waiting) == (1, 2)
    workers[0].stream.close()
    await server.settle()
    assert (staging.num_lent, staging.num_waiting) == (1, 1)
    for worker in workers[1:]:
        worker.write_to_segment(1) if is_shared else worker.contribute(1)
        await server.settle()
        assert worker.outcomes == ["START", "APPLIED"]
    assert ones_of(server, before) == [0, 2, 2, 0, 0, 2, *[0] * 6]
    server.check_no_memory_is_kept()
    assert [server.engine.traffic[rank].transport for rank in (1, 2)] == ["shared memory" if is_shared else "grpc"] * 2
