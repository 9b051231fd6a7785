"""One server process as a worker sees it: a connection, a part of the model, and how its tensors travel.

Where the server is one process there is one of these, and its part is the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...common.codecs.base import Codec
from ...common.config.schema import WorkerConfig
from ...common.errors import Reason, refusal
from ...common.registry import CODECS
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout, as_bytes, new_body
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec
from ...common.wire.frames import body_frames, placed_frame
from ...common.wire.segments import SegmentAddress, SegmentError
from ..lanes.shared import Sharing
from ..session import Progress
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors, Source, Transfer
from .client import Client, Lost
from .messages import (
    Answer,
    Facts,
    Final,
    Welcome,
    begin_frame,
    contribution_frames,
    facts_frame,
    finish_frames,
    initial_weights_frames,
    leave_frames,
    model_frames,
    read_answer,
    read_final,
    read_welcome,
    repeat_frame,
    taken_frame,
)
from .security import Security

log = get_logger()

_SAY_WAITING_AFTER_S = 5.0
_GOODBYE_S = 5.0


class Shard:
    """Used by one thread at a time. `on_answer` is told of each answer before its weights are written."""

    model: ModelTensors
    transfer: Transfer

    def __init__(self, number: int, config: WorkerConfig, security: Security, address: str, progress: Progress) -> None:
        self.number = number
        self.client = Client(address, security)
        self.sharing = Sharing(config.shared_memory, config.codec)
        self.codec: Codec = CODECS.load(config.codec)()
        self.on_answer: Callable[[Answer], object] = lambda answer: None
        self.on_reached: Callable[[], object] = lambda: None
        self._progress = progress
        self._departed: set[int] = set()  # tensors whose gradients were sent ahead
        self._sent_hyperparameters: list[Hyperparameters] | None = None

    # ---- joining ----------------------------------------------------------------------------

    def join(self, frames: list[bytes], timeout_s: float) -> Welcome:
        """Connect, ask to join, and be welcomed. Raises Lost."""
        self.client.open(timeout_s)
        self.client.send(frames)
        welcome = read_welcome(self._expect("welcome").header)
        self.sharing.joined(welcome.probe)
        self._departed.clear()
        self._sent_hyperparameters = None
        return welcome

    def hold(self, model: ModelTensors) -> None:
        """The part of the model that lies here."""
        self.model = model
        self.transfer = make_transfer(model)

    def offer(self, whole: Layout, optimizer: OptimizerSpec) -> None:
        """Say what this worker trains, and agree on the lane."""
        num_bytes = self.model.layout.exchange_bytes
        self.client.send(model_frames(whole, optimizer, self.sharing.offer(num_bytes)))
        if self.sharing.has_offered:
            verdict = self._expect("shared_memory").header
            self.sharing.decided(verdict.accepted, verdict.reason)

    def begin(self) -> Answer:
        """Receive the weights to start from; bring them when asked to."""
        while True:
            received = self._expect("answer", "send_weights")
            if received.kind == "answer":
                return self._take_answer(received)
            self.client.send(initial_weights_frames(self.transfer.gather_all()))

    # ---- exchanging -------------------------------------------------------------------------

    def prepare(self, indices: list[int]) -> bool:
        """See `Transfer.prepare`."""
        return self.transfer.prepare(indices, self.sharing.segment)

    def depart(self, indices: list[int]) -> None:
        """Send the gradients of these tensors ahead of the contribution they belong to."""
        if not self._departed:
            self._send_begin()
        self._departed.update(indices)
        self._send_parts("gradient", indices)

    def recall(self) -> None:
        """What has departed is not what is to be contributed."""
        if self._departed:
            self._departed.clear()
            self._send_begin()

    def _send_begin(self) -> None:
        num_bytes, in_segment = self.model.layout.exchange_bytes, self.sharing.segment is not None
        self.client.send([begin_frame(num_bytes, "raw", in_segment)])

    def contribute(self, source: Source, facts: Facts) -> None:
        """Send this part of the step's contribution."""
        in_segment, layout = self.sharing.segment is not None, self.model.layout
        if facts.hyperparameters is self._sent_hyperparameters:
            facts = facts._replace(hyperparameters=[])
        else:
            self._sent_hyperparameters = facts.hyperparameters
        if not self._departed and not in_segment:
            pieces = self._encode(self.transfer.gather(source))
            self.client.send(contribution_frames(self._progress, pieces, self.codec.name, facts))
            return
        rest: list[int] | None = None
        if self._departed:
            num_exchanged = sum(entry.end <= layout.exchange_bytes for entry in layout.entries)
            rest = [index for index in range(num_exchanged) if index not in self._departed]
            self._departed.clear()
        self.client.send([facts_frame(self._progress, layout.exchange_bytes, in_segment, facts)])
        self._send_parts(source, rest)

    def ask_again(self, step: int) -> None:
        """For the answer to a contribution that counts already."""
        self.client.send([repeat_frame(step)])

    def _send_parts(self, source: Source, indices: list[int] | None) -> None:
        """These tensors of a contribution (None: all), in whichever way the lane has."""
        if self.sharing.segment is not None:
            for start, end in self.transfer.place(source, self.sharing.segment, indices):
                self.client.send([placed_frame(start, end - start)])
        else:
            for stretch in self.transfer.gather_some(source, indices):
                self.client.send(body_frames(stretch.pieces, stretch.offset))

    def _encode(self, pieces: list[memoryview]) -> list[memoryview]:
        """The parameters' part as the codec has it; raw pieces go out as they are."""
        if self.codec.name == "raw":
            return pieces
        layout = self.model.layout
        body = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
        encoded = new_body(self.codec.encoded_bytes(layout))
        self.codec.encode(layout, body, encoded)
        return [as_bytes(encoded), as_bytes(body[layout.parameter_bytes :])]

    def receive(self) -> Any:
        """The next answer, of which the weights have not been taken yet."""
        return self._expect("answer")

    def take(self, received: Any) -> Answer:
        """The weights that came with it are in the model when this returns."""
        return self._take_answer(received)

    def _take_answer(self, received: Any) -> Answer:
        answer = read_answer(received.header)
        self.on_answer(answer)
        self._receive_weights(received, answer.body_bytes, answer.segment)
        return answer

    def _receive_weights(self, received: Any, num_bytes: int, address: SegmentAddress | None) -> None:
        layout = self.model.layout
        if num_bytes not in (0, layout.exchange_bytes, layout.total_bytes):
            raise refusal(
                Reason.BAD_REQUEST, f"the server sends {num_bytes} bytes, this model has {layout.exchange_bytes}"
            )
        try:
            segment = self.sharing.open(address) if address is not None else None
        except SegmentError as error:
            raise Lost(f"the server's memory cannot be shared: {error}") from None
        self.client.receive_body(received, num_bytes, self.transfer.write, segment)
        if num_bytes:
            self.transfer.finish_write(num_bytes)
        if segment is not None:
            self.client.send([taken_frame()])

    def _expect(self, *kinds: str) -> Any:
        """The next frame of one of `kinds`; while only Waiting comes, say so now and then."""
        said_at = time.monotonic() + _SAY_WAITING_AFTER_S
        while True:
            received = self.client.receive()
            if received.kind != "welcome":
                self.on_reached()
            if received.kind in kinds:
                return received
            if received.kind != "waiting":
                raise refusal(Reason.BAD_REQUEST, f"the server sent {received.kind}, expected {' or '.join(kinds)}")
            if self.number == 0 and time.monotonic() >= said_at and received.header.reason:
                log.info("waiting", rank=self._progress.rank, reason=received.header.reason)
                said_at = time.monotonic() + 6 * _SAY_WAITING_AFTER_S

    # ---- the end ----------------------------------------------------------------------------

    def finish(self, transfer_s: float, can_evaluate: bool) -> Final:
        """All steps are taken: wait for the others, receive the final weights."""
        self.client.send(finish_frames(transfer_s, can_evaluate))
        received = self._expect("final")
        final = read_final(received.header)
        self._receive_weights(received, final.body_bytes, final.segment)
        return final

    def pull_averaged(self, model: ModelTensors) -> None:
        """Write this part of the Polyak average into another instance of the part."""
        transfer = make_transfer(model)
        self.client.pull(True, lambda _: transfer.write)
        transfer.finish_write(model.layout.total_bytes)

    def leave(self, figures: dict[str, float]) -> None:
        """Say goodbye."""
        self.client.send(leave_frames(figures))
        self.client.end_stream(_GOODBYE_S)
