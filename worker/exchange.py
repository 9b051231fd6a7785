"""The worker's side of the conversation: join, offer the model, contribute, finish; rejoin when lost.

Uses the client for the bytes, the pure session for every decision, a transfer for the tensors.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from typing import Any, NamedTuple

import torch

from ..common.codecs.base import Codec
from ..common.config import WorkerConfig
from ..common.errors import Reason, refusal
from ..common.history import History
from ..common.layout import as_bytes, new_body
from ..common.log import get_logger
from ..common.optimizers import Hyperparameters, OptimizerSpec
from ..common.registry import CODECS
from ..common.segments import SegmentAddress, SegmentError
from ..common.wire import body_frames, placed_frame
from .client import Client, Lost
from .heartbeat import Heartbeat
from .interrupts import sleep
from .messages import (
    Answer,
    Facts,
    Final,
    Settings,
    Welcome,
    beat_bytes,
    begin_frame,
    contribution_frames,
    facts_frame,
    finish_frames,
    initial_weights_frames,
    join_frames,
    leave_frames,
    model_frames,
    read_answer,
    read_final,
    read_welcome,
    repeat_frame,
    taken_frame,
)
from .security import PLAINTEXT, Security
from .session import Progress, Retry
from .sharing import Sharing
from .staged import make_transfer
from .transfer import ModelTensors, Source, Transfer

log = get_logger()

_ATTEMPT_S = 2.0  # one attempt to connect
_SAY_WAITING_AFTER_S = 5.0
_GOODBYE_S = 5.0
_COUNTED = ("APPLIED", "REPEATED")


class Moments(NamedTuple):
    """Of one exchange, perf_counter seconds: what `ps-bench exchange` divides it by."""

    begun: float
    sent: float  # encoded and given to the connection
    answered: float  # the answer has come, its weights have not
    done: float
    held_s: float  # as in Answer


class Exchange:
    """One worker's membership in a run. Blocking; raises the errors of `common/errors.py`."""

    def __init__(
        self, config: WorkerConfig, rank: int | None, history: str | None = None, security: Security = PLAINTEXT
    ) -> None:
        self._config = config
        self._client = Client(config.server, security)
        self._retry = Retry(config.server, config.give_up_s, rank)
        self.progress = Progress(rank=rank, process=secrets.token_hex(8))
        self._heartbeat = Heartbeat(self._client.beat)
        self._history = History(history, "worker")
        self.moments: Moments | None = None  # of the last exchange that was not interrupted
        self._model: ModelTensors | None = None
        self._transfer: Transfer | None = None
        self._optimizer: OptimizerSpec | None = None
        self._codec: Codec = CODECS.load(config.codec)()
        self._sharing = Sharing(config.shared_memory, config.codec)
        self._departed: set[int] = set()  # tensors whose gradients were sent ahead
        self._last_transfer_s = 0.0
        self._counted_step = 0  # as the last welcome said
        self._server_incarnation = 0
        self._sent_hyperparameters: list[Hyperparameters] | None = None
        self.settings: Settings = self._join().settings

    # ---- joining ----------------------------------------------------------------------------

    def _join(self) -> Welcome:
        """Connect and be welcomed, as often as it takes within the give-up time."""
        while True:
            try:
                self._client.open(_ATTEMPT_S)
                self._client.send(join_frames(self.progress, socket.gethostname(), os.getpid(), self._config.device))
                welcome = read_welcome(self._expect("welcome").header)
                break
            except Lost as lost:
                delay_s = self._retry.failed(time.monotonic(), str(lost))
                if self._retry.num_failures == 1:
                    log.info("waiting_for_server", address=self._config.server, gives_up_in_s=self._config.give_up_s)
                sleep(delay_s)
        self.progress.welcomed(welcome.run, welcome.rank, welcome.incarnation)
        self.progress.pull_every = welcome.pull_every
        self._retry.rank = welcome.rank
        self._counted_step, self._server_incarnation = welcome.step, welcome.server_incarnation
        self._heartbeat.start(beat_bytes(self.progress), welcome.lease_s)
        self._sharing.joined(welcome.probe)
        self._departed.clear()
        self._sent_hyperparameters = None
        return welcome

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        """Offer the model and receive the weights to start from."""
        self._model, self._optimizer = model, optimizer
        self._transfer = make_transfer(model)
        try:
            self._offer()
            self._begin()
        except Lost as lost:
            self._return(lost)

    def _offer(self) -> None:
        """Say what this worker trains, and agree on the lane."""
        assert self._model is not None and self._optimizer is not None
        num_bytes = self._model.layout.exchange_bytes
        self._client.send(model_frames(self._model.layout, self._optimizer, self._sharing.offer(num_bytes)))
        if self._sharing.has_offered:
            verdict = self._expect("shared_memory").header
            self._sharing.decided(verdict.accepted, verdict.reason)
        log.info("tensors", lane=self._sharing.lane, reason=self._sharing.reason)

    def _begin(self) -> Answer:
        """Receive the weights to start from; bring them when asked to."""
        assert self._transfer is not None
        while True:
            received = self._expect("answer", "send_weights")
            if received.kind == "answer":
                answer = self._take_answer(received)
                self.progress.started()
                self._note_start()
                return answer
            self._client.send(initial_weights_frames(self._transfer.gather_all()))

    def _return(self, lost: Lost) -> Answer | None:
        """After a lost connection: the answer that says where to start again. None when this worker is still
        a member, at `progress.step` or one step further (`_counted_step`): then nothing is to be started."""
        assert self._transfer is not None
        self._transfer.leave_segment()
        while True:
            log.warning("connection_lost", reason=str(lost), step=self.progress.step)
            sleep(self._retry.failed(time.monotonic(), str(lost)))
            welcome = self._join()
            try:
                self._offer()
                answer = None if welcome.is_resumed else self._begin()
            except Lost as again:
                lost = again
                continue
            log.info(
                "resumed" if answer is None else "rejoined",
                rank=self.progress.rank,
                incarnation=self.progress.incarnation,
                step=self._counted_step,
            )
            return answer

    @property
    def codec_name(self) -> str:
        return self._codec.name

    # ---- exchanging -------------------------------------------------------------------------

    def contribute(
        self, source: Source, num_samples: int, loss: float, compute_s: float, hyperparameters: list[Hyperparameters]
    ) -> Answer:
        """Send this step's contribution; returns when the run lets the worker go on, its weights in the model."""
        assert self._transfer is not None
        started = time.perf_counter()
        facts = Facts(num_samples, loss, compute_s, self._last_transfer_s, hyperparameters)
        try:
            self._send_contribution(source, facts)
            sent = time.perf_counter()
            received = self._expect("answer")
            answered = time.perf_counter()
            answer = self._take_answer(received)
            self.moments = Moments(started, sent, answered, time.perf_counter(), answer.held_s)
        except Lost as lost:
            answer = self._contribute_again(lost, source, facts)
        elapsed_s = time.perf_counter() - started
        self._last_transfer_s = max(0.0, elapsed_s - answer.held_s)
        return answer

    def _contribute_again(self, lost: Lost, source: Source, facts: Facts) -> Answer:
        """The same contribution on a new connection, until it is answered or the run has gone on without it."""
        while True:
            answer = self._return(lost)
            if answer is not None:
                return answer
            try:
                if self._counted_step > self.progress.step:
                    self._client.send([repeat_frame(self._counted_step)])
                else:
                    self._send_contribution(source, facts)
                return self._take_answer(self._expect("answer"))
            except Lost as again:
                lost = again

    def prepare(self, indices: list[int]) -> bool:
        """See `Transfer.prepare`."""
        assert self._transfer is not None
        return self._transfer.prepare(indices, self._sharing.segment)

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
        assert self._model is not None
        num_bytes, in_segment = self._model.layout.exchange_bytes, self._sharing.segment is not None
        self._client.send([begin_frame(num_bytes, "raw", in_segment)])

    def _send_contribution(self, source: Source, facts: Facts) -> None:
        assert self._transfer is not None and self._model is not None
        in_segment, layout = self._sharing.segment is not None, self._model.layout
        if facts.hyperparameters is self._sent_hyperparameters:
            facts = facts._replace(hyperparameters=[])
        else:
            self._sent_hyperparameters = facts.hyperparameters
        self._history.write(
            "send",
            rank=self.progress.rank,
            incarnation=self.progress.incarnation,
            step=self.progress.step + 1,
            base_version=self.progress.version,
        )
        if not self._departed and not in_segment:
            pieces = self._encode(self._transfer.gather(source))
            self._client.send(contribution_frames(self.progress, pieces, self._codec.name, facts))
            return
        rest: list[int] | None = None
        if self._departed:
            num_exchanged = sum(entry.end <= layout.exchange_bytes for entry in layout.entries)
            rest = [index for index in range(num_exchanged) if index not in self._departed]
            self._departed.clear()
        self._client.send([facts_frame(self.progress, layout.exchange_bytes, in_segment, facts)])
        self._send_parts(source, rest)

    def _send_parts(self, source: Source, indices: list[int] | None) -> None:
        """These tensors of a contribution (None: all), in whichever way the lane has."""
        assert self._transfer is not None
        if self._sharing.segment is not None:
            for start, end in self._transfer.place(source, self._sharing.segment, indices):
                self._client.send([placed_frame(start, end - start)])
        else:
            for stretch in self._transfer.gather_some(source, indices):
                self._client.send(body_frames(stretch.pieces, stretch.offset))

    def _encode(self, pieces: list[memoryview]) -> list[memoryview]:
        """The parameters' part as the codec has it; raw pieces go out as they are."""
        if self._codec.name == "raw":
            return pieces
        assert self._model is not None
        layout = self._model.layout
        body = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
        encoded = new_body(self._codec.encoded_bytes(layout))
        self._codec.encode(layout, body, encoded)
        return [as_bytes(encoded), as_bytes(body[layout.parameter_bytes :])]

    def _take_answer(self, received: Any) -> Answer:
        answer = read_answer(received.header)
        if answer.outcome not in _COUNTED:  # what is to be sent again may lie under these weights
            self.progress.server_incarnation = 0
        self._receive_weights(received, answer.body_bytes, answer.segment)
        self.progress.server_incarnation = self._server_incarnation
        self.progress.answered(answer.step, answer.version, answer.next_local_steps, answer.body_bytes > 0)
        self.progress.divided(answer.num_workers, answer.worker_index, answer.training_steps)
        if answer.outcome != "START":  # that one is noted as a start, with whose server's it is
            self._history.write(
                "answered",
                rank=self.progress.rank,
                incarnation=self.progress.incarnation,
                step=answer.step,
                version=answer.version,
                outcome=answer.outcome,
            )
        if answer.outcome == "REJECTED":
            log.warning("rejected", rank=self.progress.rank, step=self.progress.step + 1, reason=answer.reason)
        return answer

    def _receive_weights(self, received: Any, num_bytes: int, address: SegmentAddress | None) -> None:
        assert self._transfer is not None
        assert self._model is not None
        layout = self._model.layout
        if num_bytes not in (0, layout.exchange_bytes, layout.total_bytes):
            raise refusal(
                Reason.BAD_REQUEST, f"the server sends {num_bytes} bytes, this model has {layout.exchange_bytes}"
            )
        try:
            segment = self._sharing.open(address) if address is not None else None
        except SegmentError as error:
            raise Lost(f"the server's memory cannot be shared: {error}") from None
        self._client.receive_body(received, num_bytes, self._transfer.write, segment)
        if num_bytes:
            self._transfer.finish_write(num_bytes)
        if segment is not None:
            self._client.send([taken_frame()])

    def _expect(self, *kinds: str) -> Any:
        """The next frame of one of `kinds`; while only Waiting comes, say so now and then."""
        said_at = time.monotonic() + _SAY_WAITING_AFTER_S
        while True:
            received = self._client.receive()
            if received.kind != "welcome":
                self._retry.reached()
            if received.kind in kinds:
                return received
            if received.kind != "waiting":
                raise refusal(Reason.BAD_REQUEST, f"the server sent {received.kind}, expected {' or '.join(kinds)}")
            if time.monotonic() >= said_at and received.header.reason:
                log.info("waiting", rank=self.progress.rank, reason=received.header.reason)
                said_at = time.monotonic() + 6 * _SAY_WAITING_AFTER_S

    # ---- the end ----------------------------------------------------------------------------

    def finish(self, can_evaluate: bool) -> Final | None:
        """All steps are taken: wait for the others, receive the final weights. None when there are steps to
        take again, because the server was lost and has gone back to a snapshot."""
        while True:
            try:
                self._client.send(finish_frames(self._last_transfer_s, can_evaluate))
                received = self._expect("final")
                final = read_final(received.header)
                self._receive_weights(received, final.body_bytes, final.segment)
            except Lost as lost:
                if self._return(lost) is not None and not self.progress.is_done:
                    return None
                continue
            self.progress.version = final.version
            self._history.write("end", rank=self.progress.rank, step=self.progress.step)
            return final

    def pull_averaged(self, model: ModelTensors) -> None:
        """Write the Polyak average into another instance of the model."""
        transfer = make_transfer(model)
        self._client.pull(True, lambda _: transfer.write)
        transfer.finish_write(model.layout.total_bytes)

    def leave(self, metrics: dict[str, float]) -> None:
        """Say goodbye, with the figures of the final evaluation if there are any."""
        figures = {name: value for name, value in metrics.items() if not math.isnan(value)}
        self._client.send(leave_frames(figures))
        self._client.end_stream(_GOODBYE_S)
        self.drop()

    def drop(self) -> None:
        """Leave without a word, as a process that fails does."""
        self._heartbeat.stop()
        self._client.close()
        self._history.close()

    def _note_start(self) -> None:
        self._history.write(
            "start",
            run=self.progress.run,
            rank=self.progress.rank,
            incarnation=self.progress.incarnation,
            server_incarnation=self._server_incarnation,
            step=self.progress.step,
            version=self.progress.version,
        )
