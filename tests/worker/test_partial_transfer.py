"""What of a contribution is sent where the server has some of it."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

from paramserver.common.codecs.raw import ENTRY as Raw
from paramserver.common.tensors.layout import as_bytes
from paramserver.common.wire.frames import parse
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.tensors.staged import make_transfer
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.transports.transport import Transport, Up, between

from ..records import contribution_of

NUM = 600_000


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 10), (3, 7), (4, 5), (9, 10), (5, 10), (8, 99), (99, 10)])
def test_pieces_are_cut_at_the_borders(start: int, end: int) -> None:
    payload = memoryview(bytes(range(10)))
    parts = between([payload[:4], payload[4:5], payload[5:]], start, end)
    assert b"".join(parts) == bytes(payload)[start:end] and all(parts)


def sent(offered: pb.PartialTransfer) -> list[Any]:
    """The frames of a contribution of ones, where the server says that it has this."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(NUM))
    model.w.grad = torch.ones(NUM)
    frames: list[Any] = []
    tensors = ModelTensors(model)
    up = Up(
        Raw(), tensors, make_transfer(tensors), lambda raws: frames.extend(parse(pb.WorkerMessage, r) for r in raws)
    )
    up.joined(Transport(), pb.Welcome(partial_transfer=offered))

    up.contribute(contribution_of(4))
    again = len(frames)
    up.contribute(contribution_of(4))
    assert frames[again].kind == "contribution", "a partial transfer is good for one attempt"
    return frames[:again]


def offered_ones(**otherwise: Any) -> pb.PartialTransfer:
    crc = zlib.crc32(bytes(as_bytes(torch.ones(100_000))))
    fields = {
        "seq": 4, "payload_bytes": 4 * NUM, "codec": "raw", "ranges": [0, 200_000, 800_000, 1_000_000], "crc": crc,
    }  # fmt: skip
    return pb.PartialTransfer(**fields | otherwise)


def test_what_the_server_has_is_not_sent() -> None:
    begin, facts, *pieces = sent(offered_ones())
    assert begin.header.continues == facts.header.seq == 4
    came = sorted((piece.offset, piece.offset + len(piece.data)) for piece in pieces)
    assert (came[0], came[1][0], came[-1][1]) == ((200_000, 800_000), 1_000_000, 4 * NUM)
    assert sum(end - start for start, end in came) == 4 * NUM - 400_000


@pytest.mark.parametrize("otherwise", [{"crc": 1}, {"seq": 3}, {"payload_bytes": 8}, {"codec": "bf16"}])
def test_all_is_sent_where_it_has_something_else(otherwise: dict[str, Any]) -> None:
    facts, *pieces = sent(offered_ones(**otherwise))
    assert facts.kind == "contribution"
    assert sum(len(piece.data) for piece in pieces) == 4 * NUM
