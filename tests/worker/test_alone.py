"""A script without a server: how long it trains, and what it is told of that."""

from __future__ import annotations

import torch
from structlog.testing import capture_logs
from torch.utils.data import TensorDataset

from paramserver.common.config.schema import Config
from paramserver.worker.training.alone import AloneSession


def epochs(session: AloneSession, stop_at: int | None = None) -> list[int]:
    """Steps of two loops over the same data; the session is stopped at one of them."""
    model = torch.nn.Linear(2, 1)
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []
    for _ in range(3):
        counts.append(0)
        for (x,) in session.shard(TensorDataset(torch.ones(8, 2)), batch_size=4):
            model(x).sum().backward()
            optimizer.step()
            counts[-1] += 1
            if counts[-1] == stop_at:
                session.stop("enough")
    return counts


def test_a_length_that_nobody_has_set_is_said_before_and_when_it_is_over() -> None:
    with capture_logs() as logs:
        assert epochs(AloneSession(Config(), has_length=False)) == [500, 0, 0]
    assert [line["event"] for line in logs] == ["length", "no_batches"]
    assert "500 training steps, the default of run.steps" in logs[0]["reason"]
    assert "all 500 training steps" in logs[1]["reason"]


def test_one_that_is_stopped_says_no_more() -> None:
    session = AloneSession(Config())
    with capture_logs() as logs:
        assert epochs(session, stop_at=3) == [3, 0, 0]
    assert (logs, session.ended_by, session.is_done) == ([], "stopped: enough", True)
