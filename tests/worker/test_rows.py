"""Tables of rows in a training loop: what is asked for, what is sent, and when it is forgotten. Without a server."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.config.schema import Config
from paramserver.common.errors import UsageError
from paramserver.common.tensors.tables import make_spec
from paramserver.common.wire.frames import CHUNK_BYTES, parse
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.messages import RowGradients, rows_frames
from paramserver.worker.training.alone import AloneSession
from paramserver.worker.training.rows import Rows, refuse_scaler

SPEC = make_spec("items", 10, 2, "float32", 0.1, "sgd", {"lr": 1.0})


def table() -> Rows:
    """Row i is (i, i)."""
    return Rows(SPEC, lambda ids: ids.float()[:, None].repeat(1, 2))


def test_every_row_is_asked_for_once_a_call_and_sent_once_a_step() -> None:
    rows = table()
    found = rows(torch.tensor([[3, 1], [3, 3]], dtype=torch.int32))
    assert found.shape == (2, 2, 2) and found[..., 0].tolist() == [[3.0, 1.0], [3.0, 3.0]]
    assert rows.num_received == 2 * 2 * 4
    (found.sum() + (2 * rows(torch.tensor(1))).sum()).backward()
    ids, gradients = rows.take()
    assert ids.tolist() == [1, 3] and gradients[:, 0].tolist() == [3.0, 3.0]
    assert rows.take() is None


def test_gradients_add_up_until_they_are_taken_or_dropped() -> None:
    rows = table()
    for _ in range(2):  # accumulation
        rows(torch.tensor([4])).sum().backward()
    assert rows.take()[1].tolist() == [[2.0, 2.0]]
    rows(torch.tensor([4])).sum().backward()
    rows.drop()
    assert rows.take() is None
    found = rows(torch.tensor([5])).sum()
    rows.drop()  # zero_grad between forward and backward
    found.backward(retain_graph=True)
    found.backward()
    assert rows.take()[1].tolist() == [[2.0, 2.0]]


def test_what_backward_does_not_reach_is_not_sent() -> None:
    rows = table()
    with torch.no_grad():
        assert not rows(torch.tensor([1])).requires_grad
    rows(torch.tensor([2]))
    assert rows.take() is None
    assert rows(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([10], "row 10 of table 'items' does not exist: it has rows 0 to 9"),
        ([0, -1], "row -1"),
        ([0.5], "was given ids of torch.float32"),
    ],
)
def test_what_is_not_there_is_refused(ids: list, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        table()(torch.tensor(ids))


def test_scaled_gradients_are_refused() -> None:
    with pytest.raises(UsageError, match="GradScaler"):
        refuse_scaler([table()])
    assert refuse_scaler([]) is False
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(UsageError, match="float16 with a GradScaler"):
        table()(torch.tensor([1]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        table()(torch.tensor([1]))


def test_alone_the_table_is_here() -> None:
    session = AloneSession(Config())
    rows = session.rows("items", 10, 2, optimizer="sgd", lr=0.1, init_std=0.0)
    with pytest.raises(UsageError, match="a second table 'items'"):
        session.rows("items", 10, 2)
    model = torch.nn.Linear(2, 1)
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    rows(torch.tensor([2])).sum().backward()
    rows.lr = 0.5
    optimizer.step()
    assert rows(torch.arange(4)).tolist() == [[0.0, 0.0], [0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("kind", ["step", "one cycle", "by hand"])
def test_a_schedule_of_the_model_s_optimizer_is_the_table_s_too(kind: str) -> None:
    """As one of torch's own for each of two optimizers; a rate set by hand stays."""
    schedules = {
        "step": lambda item: torch.optim.lr_scheduler.StepLR(item, 2, gamma=0.5),
        "one cycle": lambda item: torch.optim.lr_scheduler.OneCycleLR(
            item, item.param_groups[0]["lr"], total_steps=9, cycle_momentum=False
        ),
    }
    schedule_of = schedules.get(kind, schedules["step"])
    ids = [torch.tensor(item) for item in ([1, 2], [2, 3], [0, 2], [3], [2, 1, 0])]
    session, model = AloneSession(Config()), torch.nn.Linear(2, 1).double()
    rows = session.rows("items", 4, 2, optimizer="sparse_adam", lr=0.3, dtype=torch.float64)
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.nn.Embedding(4, 2, sparse=True, _weight=rows(torch.arange(4)).detach())
    other = torch.optim.SparseAdam(plain.parameters(), lr=0.3)
    schedule = schedule_of(optimizer)
    others = [] if kind == "by hand" else [schedule_of(other)]
    if kind == "by hand":
        rows.lr = 0.3
    for batch in ids:
        for table, entry in ((rows, optimizer), (plain, other)):
            entry.zero_grad()
            model(table(batch)).square().sum().backward()
        assert rows.lr == pytest.approx(other.param_groups[0]["lr"], rel=1e-12)
        other.step()
        optimizer.step()  # the model's changes: in the next batch for both
        for entry in (schedule, *others):
            entry.step()
        assert torch.allclose(rows(torch.arange(4)), plain.weight, rtol=1e-12, atol=0)


def test_messages_have_the_rows_of_a_shard_and_are_not_too_large() -> None:
    num_rows, dim = 100_000, 16
    spec = make_spec("items", num_rows, dim, "float32", 0.1, "sgd", {})
    ids = torch.arange(0, num_rows, 2)
    gradients = torch.randn(len(ids), dim)
    found = []
    for shard in range(3):
        part = spec.part(shard, 3)
        for raw in rows_frames([part], [RowGradients(0, ids, gradients)]):
            assert len(raw) < CHUNK_BYTES + 100
            frame = parse(pb.WorkerMessage, raw)
            count = frame.of(pb.Rows).count
            here = torch.frombuffer(bytearray(frame.data), dtype=torch.int64, count=count)
            assert part.first <= here[0] and here[-1] < part.end
            found.append(
                torch.frombuffer(bytearray(frame.data), dtype=torch.float32, offset=8 * count).view(count, dim)
            )
    assert torch.equal(torch.cat(found), gradients)
