"""Delayed update (policy.delayed_update): computes the next step while an exchange is running.

    training thread   compute 1 | compute 2 | take 1 | compute 3 | take 2 | ...
    helper thread               | exchange 1 ....... | exchange 2 ....... |

A contribution is handed over as a snapshot, and its reply arrives in separate memory (`Shadow`). While a flight is
pending the helper uses the exchange, otherwise the training thread does. The training thread takes a reply just before
the next hand-over, even if it arrived earlier. So two runs with the same replies compute the same.

Gradients: contribution k + 1 is computed on the weights that came with the reply to k - 1, and declares this version
(`base_version`).

Weights (localsgd): when the average of the snapshot has arrived, the model becomes average + (weights now - snapshot).
This is also the next contribution, with the average's version. So the local steps taken meanwhile stay (CoCoD-SGD, Shen
et al. 2019, arXiv:1906.12043). Buffers (BatchNorm statistics) stay the worker's own until the run ends, because a
difference of variances may be negative.

The exchange repeats a flight whose connection was lost. A worker discards the steps it took meanwhile only after a
START: its lease ended, or the server went back to a snapshot.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, wait
from itertools import islice

import torch

from ...common.kinds import ContributionKind
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import Base, Outcome, PayloadInfo, Reply
from ..conversation.messages import Final, Goodbye, Outgoing
from ..conversation.threads import Helper, wait_for
from ..session import Progress
from ..tensors.local_steps import Overlap
from ..tensors.staged import SideStream
from ..tensors.transfer import ModelTensors
from .base import Exchanger, Strategy

# Time for an interrupted worker's flight to reach a safe place. A waiting flight receives a message from the server
# every second.
_STOP_S = 5.0


class Shadow(ModelTensors):
    """A second copy of a model in host memory, which an exchange uses while the model computes.

    Its `tensors` are the newest received weights, and its `sources()` are the newest snapshot. The exchange treats it
    like any model. Each contribution costs two copies on the training thread, into memory that is reused.
    """

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self.layout = layout = model.layout
        self.names = model.names
        self._stream = SideStream(model.tensors)
        self._sent = self.views(self._stream.new_payload(layout.exchange_bytes))
        self.tensors = [view for _, view in layout.views(self._stream.new_payload(layout.total_bytes))]
        self._stream.copy(self.tensors, model.tensors)
        self.settle()

    def sources(self, kind: ContributionKind, indices: range | None = None) -> list[torch.Tensor | None]:
        """The snapshot, whatever its kind."""
        return list(self._sent if indices is None else self._sent[indices.start : indices.stop])

    # ---- on the training thread ---------------------------------------------------------------

    def snapshot(self, kind: ContributionKind) -> None:
        """Copy the next contribution. The model may change as soon as this returns."""
        self._stream.copy(self._sent, self._model.sources(kind))
        self._stream.precede()

    def take(self, start: int = 0, end: int | None = None) -> None:
        """Write the received tensors from `start` to `end` (None: all, also frozen ones) into the model."""
        self._stream.copy(self._model.tensors[start:end], self.tensors[start:end])
        self._stream.precede()

    def rebase(self) -> None:
        """Set each parameter to the received one plus its own change since the snapshot."""
        trained = zip(self._model.tensors, self._sent, self.tensors, strict=False)
        with torch.no_grad(), self._stream.copies():
            for tensor, sent, received in islice(trained, self.num_trained):
                tensor.sub_(sent.to(tensor.device, non_blocking=True))
                tensor.add_(received.to(tensor.device, non_blocking=True))
        self._stream.precede()

    # ---- on the helper thread -----------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the copies. Then the snapshot is complete, and received weights may be overwritten."""
        self._stream.synchronize()


class DelayedUpdate(Strategy):
    """Exchanges one contribution while the training loop computes the next one."""

    _shadow: Shadow

    def __init__(self, exchange: Exchanger) -> None:
        super().__init__(exchange)
        self._helper = Helper()
        self._flight: Future[Reply] | None = None
        self._received_version = 0  # version of the newest received weights
        self._model_version = 0  # version of the weights in the model
        # Assumes that the pending contribution counts. The exchange's own progress is what the server has confirmed.
        self.progress: Progress = copy.copy(exchange.progress)
        # These outcomes discard the local steps taken meanwhile, as they began on weights with NaN or on a lost
        # connection.
        self._discarding = {Outcome.START} | ({Outcome.REJECTED} if self.kind.worker_steps else set())

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        self._shadow = Shadow(model)
        self._exchange.start(self._shadow, optimizer)
        self._received_version = self._exchange.progress.version
        self._begin()

    def _find_model(self) -> None:
        self._model.has_moved()  # the exchange knows the shadow, which does not move

    def _contribute(self, outgoing: Outgoing) -> None:
        landed = self._land()
        taken = self.progress.local_steps
        if landed is not None:
            if not self._goes_on(landed):
                self._begin()
                return
            self.progress.become(self._exchange.progress)
        # The reply's number of steps is for the next ones, as it came after these were taken.
        expected, self.progress.local_steps = self.progress.local_steps, taken
        if not self.kind.worker_steps:
            outgoing = outgoing.changed(payload=PayloadInfo(without_gradient=self._model.without_gradient()))
        base_version = self._turn(landed is not None and landed.has_new_weights)
        self._hand_over(base_version, outgoing)
        if self.progress.assume_counted(expected):
            # Only the reply to the last contribution says whether this worker is done.
            self._land()
            self._begin()

    def _goes_on(self, landed: Reply) -> bool:
        """Whether the steps taken meanwhile stay valid."""
        return landed.result.outcome not in self._discarding and not self._exchange.progress.is_done

    def _begin(self) -> None:
        """Continue from the server's newest reply, without the steps taken meanwhile."""
        self.progress.become(self._exchange.progress)
        self._shadow.take()
        self._model_version = self._received_version

    def _turn(self, has_weights: bool) -> int:
        """Snapshot the contribution, and take arrived weights. Returns the contribution's base version."""
        if not self.kind.worker_steps:  # the gradients were computed on the previous weights
            self._shadow.snapshot(ContributionKind.GRADIENT)
            base_version = self._model_version
            if has_weights:
                self._shadow.take(end=self._shadow.num_exchanged)
                self._model_version = self._received_version
            return base_version
        if has_weights:  # adds the steps taken meanwhile to the average
            self._shadow.rebase()
            self._model_version = self._received_version
        self._shadow.snapshot(ContributionKind.WEIGHTS)
        return self._model_version

    def _hand_over(self, base_version: int, outgoing: Outgoing) -> None:
        exchange, shadow = self._exchange, self._shadow
        exchange.progress.version = base_version

        def fly() -> Reply:
            shadow.settle()
            return exchange.contribute(outgoing)

        self._flight = self._helper.submit(fly)

    def _land(self) -> Reply | None:
        """Wait for the reply to the pending contribution, if any. Raises the error that ended it."""
        if self._flight is None:
            return None
        wait_for(self._flight)  # a signal may raise here; the flight then stays pending
        flight, self._flight = self._flight, None
        reply = flight.result()
        if reply.has_new_weights:
            self._received_version = self._exchange.progress.version
        return reply

    def _finish(self) -> Final | None:
        self._land()
        self._shadow.settle()
        final = self._exchange.finish()
        self._received_version = self._exchange.progress.version
        self._begin()
        return final

    def settle(self) -> int:
        self._land()
        self._begin()
        return self._model_version

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        if not is_interrupted:
            self._land()
        elif self._flight is not None:
            self._helper.stop()
            if not wait([self._flight], timeout=_STOP_S).done:
                self.drop()
                return
        self._exchange.leave(goodbye)


class Overlapped(DelayedUpdate):
    """Exchanges deltas (diloco) of all parameters or one fragment, and merges the reply with later local steps.

        training thread   H steps | measure | tau steps | merge | H - tau steps | measure | ...
        helper thread             | exchange ........ |                       | exchange ...

    The reply is merged after tau steps (policy.overlap_steps), even if it arrived earlier. With tau = H, or H / P for P
    fragments, that is just before the next measurement. If it `waits`, the loop waits for the reply,
    and the parameters of other fragments continue from their own steps. Buffers stay the worker's own until the run
    ends.
    """

    _overlap: Overlap | None = None  # set once the model has the run's weights
    _merged: Reply | None = None  # its weights are in the model, but `_contribute` has not used it yet

    def __init__(self, exchange: Exchanger, waits: bool = False) -> None:
        super().__init__(exchange)
        self._waits = waits

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        super()._start(model, optimizer, is_parted)
        self._overlap = Overlap(model, self.settings.fragments)

    def went_on(self) -> None:
        progress, after = self.progress, self.settings.overlap_steps
        if after and self._flight is not None and progress.local_steps - progress.steps_left == after:
            self.check_model()
            self._merged = self._land()

    def _contribute(self, outgoing: Outgoing) -> None:
        super()._contribute(outgoing)
        if self._waits and (landed := self._land()) is not None:
            if self._goes_on(landed):
                self.progress.become(self._exchange.progress)
                self._shadow.take(self._shadow.num_trained, self._shadow.num_exchanged)
            else:
                self._begin()

    def _land(self) -> Reply | None:
        landed, self._merged = self._merged, None
        if landed is not None:
            return landed
        landed = super()._land()
        if landed is not None and self._overlap is not None and self._goes_on(landed) and landed.has_new_weights:
            self._overlap.merge(self._shadow.tensors)
            self._model_version = self._received_version
        return landed

    def _begin(self) -> None:
        super()._begin()
        if self._overlap is not None:
            self._overlap.note()

    def _turn(self, has_weights: bool) -> int:
        assert self._overlap is not None
        progress, num = self.progress, self.settings.fragments
        taken, total = progress.row.steps + progress.local_steps, progress.total_steps
        # With one fragment, or if no later exchange would carry the rest, all parameters are exchanged.
        is_whole = num == 1 or (total is not None and taken >= total)
        self._without = self._overlap.choose(None if is_whole else progress.version % num)
        self._overlap.measure()
        self._shadow.snapshot(ContributionKind.DELTA)
        self._overlap.depart()
        return self._model_version

    def _hand_over(self, base_version: int, outgoing: Outgoing) -> None:
        # the shadow has all weights of the newest version, while other fragments remain here
        if self.settings.fragments > 1:
            outgoing = outgoing.changed(payload=PayloadInfo(without_gradient=self._without), base=Base(has_all=True))
        super()._hand_over(base_version, outgoing)

    def settle(self) -> int:
        if self._flight is not None:
            wait_for(self._flight)
            if self._flight.exception() is not None or not self._goes_on(self._flight.result()):
                return super().settle()
        self._aside = []  # of an evaluation that did not take place
        self._set_aside()
        self._shadow.take(end=self._shadow.num_exchanged)
        return self._exchange.progress.version
