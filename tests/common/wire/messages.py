"""Messages, and what protobuf's own classes make of the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.wire.frames import Frame, parse
from paramserver.proto import parameter_server_pb2 as pb

from ...records import contribution_proto, reply_proto

MESSAGES = [pb.WorkerMessage, pb.ServerMessage]


def refused_as_bad_request(call: Any) -> str:
    with pytest.raises(ParamServerError) as caught:
        call()
    assert caught.value.reason is Reason.BAD_REQUEST
    return caught.value.message


def header_of(message_class: Any) -> Any:
    if message_class is pb.WorkerMessage:
        return pb.WorkerMessage(contribution=contribution_proto(7, version=3, num_bytes=11, codec="raw"))
    return pb.ServerMessage(reply=reply_proto(pb.Reply.APPLIED, seq=7, version=9, num_bytes=11, reason="é"))


def assert_same_as_protobuf(parsed: Frame, message: Any) -> None:
    assert parsed.offset == message.offset
    assert bytes(parsed.data) == message.data
    assert parsed.kind == message.WhichOneof("kind")
    if parsed.kind is not None:
        assert parsed.header == getattr(message, parsed.kind)


def check_against_protobuf(message_class: Any, raw: bytes) -> None:
    """Ours reads what protobuf reads, to the same values, and refuses what protobuf refuses."""
    try:
        message = message_class.FromString(raw)
    except DecodeError:
        refused_as_bad_request(lambda: parse(message_class, raw))
    else:
        assert_same_as_protobuf(parse(message_class, raw), message)
