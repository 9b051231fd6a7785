"""What comes on a direct connection, in whatever pieces: messages, and the payloads that follow them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.wire.direct import BUFFER_BYTES, Incoming, OutOfBand, drop_front, take_front, to_buffers
from paramserver.common.wire.frames import MAX_MESSAGE_BYTES

SIZES = st.integers(0, 50) | st.integers(BUFFER_BYTES - 20, BUFFER_BYTES + 20) | st.integers(0, 4 * BUFFER_BYTES)


@given(
    items=st.lists(st.tuples(SIZES, SIZES), max_size=5),
    pieces=st.lists(st.integers(1, 50) | st.integers(1, 3 * BUFFER_BYTES), min_size=1, max_size=5),
    may_unread=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_what_was_sent_is_received(items: list[tuple[int, int]], pieces: list[int], may_unread: bool) -> None:
    """`pieces`: bytes that the system has at each call, by turns."""
    sent = [(bytes([index + 1]) * size, bytes([index + 101]) * rest) for index, (size, rest) in enumerate(items)]
    stream = b"".join(piece for raw, rest in sent for piece in to_buffers(OutOfBand(raw, [memoryview(rest)])))
    incoming, at, num_calls = Incoming(), 0, 0

    def receive(target: memoryview) -> int:
        nonlocal at, num_calls
        assert len(target), "a call without room, which would look like the end"
        found = stream[at : at + min(len(target), pieces[num_calls % len(pieces)])]
        target[: len(found)] = found
        at, num_calls = at + len(found), num_calls + 1
        return len(found)

    for raw, rest in sent:
        num_bytes = 0
        while (message := incoming.next_message(num_bytes)) is None:
            num_bytes = receive(incoming.free)
        if may_unread and len(raw) < BUFFER_BYTES - 4:
            incoming.unread(message)
            message = incoming.next_message()
        assert message == raw
        target, done = memoryview(bytearray(len(rest))), 0
        while done < len(rest):
            done += incoming.take(target[done:]) or receive(target[done:])
        assert target == rest
    assert at == len(stream)


@pytest.mark.parametrize("num_bytes", [MAX_MESSAGE_BYTES + 1, 2**32 - 1])
def test_a_message_that_is_too_large_is_refused_at_its_length(num_bytes: int) -> None:
    incoming = Incoming()
    incoming.free[:4] = num_bytes.to_bytes(4, "little")
    with pytest.raises(ParamServerError, match=f"a message of {num_bytes} bytes") as refused:
        incoming.next_message(4)
    assert refused.value.reason is Reason.LIMIT_EXCEEDED


@given(sizes=st.lists(st.integers(0, 3 << 20), max_size=5), taken=st.integers(1, 1 << 20))
@settings(max_examples=50, deadline=None)
def test_what_a_call_leaves_is_sent_by_the_next(sizes: list[int], taken: int) -> None:
    """However many of the offered bytes the system takes."""
    left, sent = [bytes([index]) * size for index, size in enumerate(sizes)], bytearray()
    whole = b"".join(left)
    while left:
        front = b"".join(take_front(left))
        assert len(front) <= 1 << 20
        num_bytes = min(len(front), taken if len(whole) < taken << 6 else len(front))
        sent += front[:num_bytes]
        left = drop_front(left, num_bytes)
    assert sent == whole
