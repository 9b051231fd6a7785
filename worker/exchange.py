"""The worker's side of the conversation: join, offer the model, contribute, finish; rejoin when lost.

Uses the client for the bytes, the pure session for every decision, a transfer for the tensors.
"""

from __future__ import annotations

import math
import os
import socket
import time
from typing import Any, NamedTuple

import torch

from ..common.codecs.base import Codec
from ..common.config import WorkerConfig
from ..common.errors import Reason, refusal
from ..common.layout import as_bytes, new_body
from ..common.log import get_logger
from ..common.optimizers import Hyperparameters, OptimizerSpec
from ..common.registry import CODECS
from .client import Client, Lost
from .messages import (
    Answer,
    Final,
    Settings,
    contribution_frames,
    finish_frames,
    initial_weights_frames,
    join_frames,
    leave_frames,
    model_frames,
    read_answer,
    read_final,
    read_settings,
)
from .session import Progress, Retry
from .transfer import ModelTensors, Source, Transfer, make_transfer

log = get_logger()

_ATTEMPT_S = 2.0  # one attempt to connect
_SAY_WAITING_AFTER_S = 5.0
_GOODBYE_S = 5.0


class Moments(NamedTuple):
    """Of one exchange, perf_counter seconds: what `ps-bench exchange` divides it by."""

    begun: float
    sent: float  # encoded and given to the connection
    answered: float  # the answer has come, its weights have not
    done: float
    held_s: float  # as in Answer


class Exchange:
    """One worker's membership in a run. Blocking; raises the errors of `common/errors.py`."""

    def __init__(self, config: WorkerConfig, rank: int | None) -> None:
        self._config = config
        self._client = Client(config.server)
        self._retry = Retry(config.server, config.give_up_s, rank)
        self.progress = Progress(rank=rank)
        self.moments: Moments | None = None  # of the last exchange that was not interrupted
        self._model: ModelTensors | None = None
        self._transfer: Transfer | None = None
        self._optimizer: OptimizerSpec | None = None
        self._codec: Codec = CODECS.load(config.codec)()
        self._last_transfer_s = 0.0
        self._sent_hyperparameters: list[Hyperparameters] | None = None
        self.settings: Settings = self._join()

    # ---- joining ----------------------------------------------------------------------------

    def _join(self) -> Settings:
        """Connect and be welcomed, as often as it takes within the give-up time."""
        while True:
            try:
                self._client.open(_ATTEMPT_S)
                self._client.send(join_frames(self.progress, socket.gethostname(), os.getpid(), self._config.device))
                welcome = self._expect("welcome").header
                break
            except Lost as lost:
                delay_s = self._retry.failed(time.monotonic(), str(lost))
                if self._retry.num_failures == 1:
                    log.info("waiting_for_server", address=self._config.server, gives_up_in_s=self._config.give_up_s)
                time.sleep(delay_s)
        self._retry.reached()
        self.progress.welcomed(welcome.run, welcome.rank, welcome.incarnation, welcome.step)
        self.progress.pull_every = max(1, welcome.settings.pull_every)
        self._retry.rank = welcome.rank
        return read_settings(welcome.settings)

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        """Offer the model and receive the weights to start from."""
        self._model, self._optimizer = model, optimizer
        self._transfer = make_transfer(model)
        try:
            self._enter()
        except Lost as lost:
            self._rejoin(lost)

    def _enter(self) -> Answer:
        assert self._model is not None
        assert self._optimizer is not None
        assert self._transfer is not None
        self._client.send(model_frames(self._model.layout, self._optimizer))
        self._sent_hyperparameters = None
        while True:
            received = self._expect("answer", "send_weights")
            if received.kind == "answer":
                return self._take_answer(received)
            self._client.send(initial_weights_frames(self._transfer.gather_all()))

    def _rejoin(self, lost: Lost) -> Answer:
        """After a lost connection: back to where the server says we are, on its weights."""
        while True:
            log.warning("connection_lost", reason=str(lost), step=self.progress.step)
            time.sleep(self._retry.failed(time.monotonic(), str(lost)))
            self._join()
            try:
                answer = self._enter()
            except Lost as again:
                lost = again
                continue
            log.info(
                "rejoined", rank=self.progress.rank, incarnation=self.progress.incarnation, step=self.progress.step
            )
            return answer

    # ---- exchanging -------------------------------------------------------------------------

    def contribute(
        self, source: Source, num_samples: int, loss: float, compute_s: float, hyperparameters: list[Hyperparameters]
    ) -> Answer:
        """Send this step's contribution; returns when the run lets the worker go on, its weights in the model."""
        assert self._transfer is not None
        started = time.perf_counter()
        changed = hyperparameters if hyperparameters is not self._sent_hyperparameters else []
        pieces = self._encode(self._transfer.gather(source))
        sent = time.perf_counter()
        try:
            self._client.send(
                contribution_frames(
                    self.progress, pieces, self._codec.name, max(1, num_samples), changed,
                    (loss, compute_s, self._last_transfer_s),
                )
            )  # fmt: skip
            received = self._expect("answer")
            answered = time.perf_counter()
            answer = self._take_answer(received)
            self._sent_hyperparameters = hyperparameters
            self.moments = Moments(started, sent, answered, time.perf_counter(), answer.held_s)
        except Lost as lost:
            answer = self._rejoin(lost)
        elapsed_s = time.perf_counter() - started
        self._last_transfer_s = max(0.0, elapsed_s - answer.held_s)
        return answer

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
        self._receive_weights(received, answer.body_bytes)
        self.progress.answered(answer.step, answer.version, answer.next_local_steps, answer.body_bytes > 0)
        self.progress.divided(answer.num_workers, answer.worker_index, answer.training_steps)
        if answer.outcome == "REJECTED":
            log.warning("rejected", rank=self.progress.rank, step=self.progress.step + 1, reason=answer.reason)
        return answer

    def _receive_weights(self, received: Any, num_bytes: int) -> None:
        assert self._transfer is not None
        assert self._model is not None
        layout = self._model.layout
        if num_bytes not in (0, layout.exchange_bytes, layout.total_bytes):
            raise refusal(
                Reason.BAD_REQUEST, f"the server sends {num_bytes} bytes, this model has {layout.exchange_bytes}"
            )
        self._client.receive_body(received, num_bytes, self._transfer.write)
        if num_bytes:
            self._transfer.finish_write()

    def _expect(self, *kinds: str) -> Any:
        """The next frame of one of `kinds`; while only Waiting comes, say so now and then."""
        said_at = time.monotonic() + _SAY_WAITING_AFTER_S
        while True:
            received = self._client.receive()
            if received.kind in kinds:
                return received
            if received.kind != "waiting":
                raise refusal(Reason.BAD_REQUEST, f"the server sent {received.kind}, expected {' or '.join(kinds)}")
            if time.monotonic() >= said_at and received.header.reason:
                log.info("waiting", rank=self.progress.rank, reason=received.header.reason)
                said_at = time.monotonic() + 6 * _SAY_WAITING_AFTER_S

    # ---- the end ----------------------------------------------------------------------------

    def finish(self, can_evaluate: bool) -> Final:
        """All steps are taken: wait for the others, receive the final weights."""
        while True:
            try:
                self._client.send(finish_frames(self._last_transfer_s, can_evaluate))
                received = self._expect("final")
                final = read_final(received.header)
                self._receive_weights(received, final.body_bytes)
            except Lost as lost:
                self._rejoin(lost)
                continue
            self.progress.version = final.version
            return final

    def pull_averaged(self, model: ModelTensors) -> None:
        """Write the Polyak average into another instance of the model."""
        transfer = make_transfer(model)
        self._client.pull(True, lambda _: transfer.write)
        transfer.finish_write()

    def leave(self, metrics: dict[str, float]) -> None:
        """Say goodbye, with the figures of the final evaluation if there are any."""
        figures = {name: value for name, value in metrics.items() if not math.isnan(value)}
        self._client.send(leave_frames(figures))
        self._client.end_stream(_GOODBYE_S)
        self._client.close()

    def drop(self) -> None:
        """Leave without a word, as a process that fails does."""
        self._client.close()
