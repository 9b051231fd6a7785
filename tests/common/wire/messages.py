"""Messages, and what protobuf's own classes make of the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.wire.frames import parse
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


def check_against_protobuf(message_class: Any, raw: bytes) -> None:
    """Ours reads what protobuf reads, to the same values, and refuses what protobuf refuses."""
    try:
        message = message_class.FromString(raw)
    except DecodeError:
        refused_as_bad_request(lambda: parse(message_class, raw))
        return
    parsed, kind = parse(message_class, raw), message.WhichOneof("kind")
    assert (parsed.kind, parsed.offset, bytes(parsed.data)) == (kind, message.offset, message.data)
    assert kind is None or parsed.header == getattr(message, kind)
