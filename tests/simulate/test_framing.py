"""Bytes by formula are those of the real messages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.tensors.layout import new_payload
from paramserver.common.wire.frames import frame, payload_frames
from paramserver.common.wire.messages import contribution_message, reply_message
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core import effects
from paramserver.simulate.traffic.sizes import Framing, Sizes

from ..records import contribution_of, reply_of

COUNT = st.integers(0, 1 << 40)
SIZES = st.sampled_from([1, 4096, 64 << 10, (64 << 10) + 1, 1 << 20, (3 << 20) + 77])


def sent(message: pb.WorkerMessage | pb.ServerMessage, num_bytes: int) -> int:
    payload = memoryview(new_payload(num_bytes).numpy())
    if num_bytes <= 64 << 10:
        return len(frame(message, 0, [payload] if num_bytes else []))
    return len(frame(message)) + sum(map(len, payload_frames([payload])))


@settings(max_examples=60, deadline=None)
@given(COUNT, COUNT, st.integers(1, 1 << 20), SIZES, st.booleans(), st.sampled_from([0.0, 0.5]), st.booleans())
def test_a_contribution(
    number: int, version: int, samples: int, num_bytes: int, wants: bool, transfer_s: float, has_base: bool
) -> None:
    contribution = contribution_of(
        number, version, samples, loss=1.0, compute_s=0.25, transfer_s=transfer_s, has_all=has_base,
        wants_weights=wants, codec="raw", num_bytes=num_bytes, iteration=number,
    )  # fmt: skip
    framing = Framing(Sizes(up=num_bytes), is_direct=False, has_base=has_base)
    assert framing.up(contribution) == sent(contribution_message(contribution), num_bytes)


@settings(max_examples=60, deadline=None)
@given(COUNT, COUNT, st.integers(0, 1000), SIZES, st.booleans(), st.sampled_from([0.0, 0.5]), st.text(max_size=200))
def test_an_reply(
    number: int, version: int, steps: int, num_bytes: int, has_weights: bool, gate_wait_s: float, reason: str
) -> None:
    reply = reply_of(
        number, version, 1, num_bytes if has_weights else None, staleness=steps, gate_wait_s=gate_wait_s, reason=reason,
        training_steps=steps, num_workers=4, worker_index=3, run_steps=steps,
    )  # fmt: skip
    num = num_bytes if has_weights else 0
    framing = Framing(Sizes(down=num_bytes), is_direct=False)
    assert framing.down(effects.SendReply(3, 1, reply, has_weights)) == sent(reply_message(reply), num)
