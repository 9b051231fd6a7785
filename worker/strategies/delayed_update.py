"""Computing the next step while an exchange is in flight (policy.delayed_update).

    training thread   compute 1 | compute 2 | take 1 | compute 3 | take 2 | ...
    helper thread               | exchange 1 ....... | exchange 2 ....... |

A contribution is handed over as a snapshot and replied into memory of its own (`Shadow`). The exchange belongs to the
helper while a flight is pending, to the training thread otherwise. A reply is taken at a fixed place, before the next
hand-over, whenever it came: two runs that get the same replies compute the same.

Gradients: contribution k + 1 is computed on the weights that came with the reply to k - 1, and says so
(`base_version`).

Weights (localsgd): after the average of the snapshot has come, the model is average + (weights now - snapshot), which
is also what is contributed next, on the average's version: the local steps taken meanwhile are kept (CoCoD-SGD, Shen
et al. 2019, arXiv:1906.12043). Buffers (BatchNorm statistics) stay the worker's own until the run ends: a difference of
variances may be negative. Deltas (diloco) are another file's (`overlapped.py`).

A flight whose connection was lost is flown again, by the exchange. Only a worker that is told where to
start (its lease had ended, or the server went back to a snapshot) throws away what it computed meanwhile.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, wait

from ...common.kinds import ContributionKind
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import Outcome, Reply
from ..conversation.exchange import Exchange
from ..conversation.messages import Final, Goodbye, Outgoing
from ..conversation.pool import Helper, wait_for
from ..session import Progress
from ..tensors.transfer import ModelTensors
from .direct import Direct
from .shadow import Shadow

# An interrupted worker waits this long for its flight to reach a safe place; a waiting one hears
# from its server every second.
_STOP_S = 5.0


class DelayedUpdate(Direct):
    """A contribution gets its reply before the next one is handed over: the training loop is a step ahead."""

    _shadow: Shadow

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, may_send_early=False)
        self._helper = Helper()
        self._flight: Future[Reply] | None = None
        self._received_version = 0  # of the weights received last
        self._held_version = 0  # of those in the model
        # As if the contribution in flight had been applied; the exchange's own says what is known.
        self.progress: Progress = copy.copy(exchange.progress)
        # After these there is nothing to build on: not on weights that held NaN, nor across a lost connection.
        self._ends_a_line = {Outcome.START} | ({Outcome.REJECTED} if self.kind.worker_steps else set())

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self._shadow = Shadow(model)
        self._exchange.start(self._shadow, optimizer)
        self._received_version = self._exchange.progress.version
        self._begin()

    def _look_again(self) -> None:
        self._model.has_moved()  # the exchange knows the shadow, which has not

    def _contribute(self, outgoing: Outgoing) -> None:
        landed = self._land()
        taken, is_cut = self.progress.local_steps, self.progress.is_cut_short
        if landed is not None:
            if not self._goes_on(landed):
                self._begin()
                return
            self.progress.become(self._exchange.progress)
        told = self.progress.local_steps
        if is_cut or told != taken:  # the loop has ended since, or it was told too late
            self.progress.local_steps, self.progress.is_cut_short = taken, True
        base_version = self._turn(landed is not None and landed.has_new_weights)
        self._hand_over(base_version, outgoing)
        if self.progress.assume_counted(told):
            # The last one: whether the run is over for this worker only its reply says.
            self._land()
            self._begin()

    def _goes_on(self, landed: Reply) -> bool:
        """What was computed meanwhile is of use."""
        return landed.result.outcome not in self._ends_a_line and not self._exchange.progress.is_done

    def _begin(self) -> None:
        """Go on from what the server said last, and nothing else."""
        self.progress.become(self._exchange.progress)
        self._shadow.take_all()
        self._held_version = self._received_version

    def _turn(self, has_weights: bool) -> int:
        """Snapshot what is to be contributed, and take what has come. Returns the version that it stands on."""
        return self._turn_weights(has_weights) if self.kind.worker_steps else self._turn_gradient(has_weights)

    def _turn_gradient(self, has_weights: bool) -> int:
        """Snapshot the gradients, then take weights that have come. Returns the version these were computed on."""
        self._shadow.snapshot(ContributionKind.GRADIENT)
        base_version = self._held_version
        if has_weights:
            self._shadow.take()
            self._held_version = self._received_version
        return base_version

    def _turn_weights(self, has_weights: bool) -> int:
        """Put the average under the steps taken meanwhile, then snapshot. Returns the average's version."""
        if has_weights:
            self._shadow.rebase()
            self._held_version = self._received_version
        self._shadow.snapshot(ContributionKind.WEIGHTS)
        return self._held_version

    def _hand_over(self, base_version: int, outgoing: Outgoing) -> None:
        exchange, shadow = self._exchange, self._shadow
        said, own = exchange.progress, self.progress
        said.version, said.local_steps, said.is_cut_short = base_version, own.local_steps, own.is_cut_short

        def exchange_it() -> Reply:
            shadow.settle()
            return exchange.contribute(outgoing)

        self._flight = self._helper.submit(exchange_it)

    def _land(self) -> Reply | None:
        """The reply to the contribution in flight; raises what went wrong with it."""
        if self._flight is None:
            return None
        wait_for(self._flight)  # a signal may raise here: the flight stays pending then
        flight, self._flight = self._flight, None
        reply = flight.result()
        if reply.has_new_weights:
            self._received_version = self._exchange.progress.version
        return reply

    def _finish(self, can_evaluate: bool) -> Final | None:
        self._land()
        self._shadow.settle()
        final = self._exchange.finish(can_evaluate)
        self._received_version = self._exchange.progress.version
        self._begin()
        return final

    def settle(self) -> int:
        self._land()
        self._begin()
        self._note()
        return self._held_version

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        if not is_interrupted:
            self._land()
        elif self._flight is not None:
            self._helper.stop()
            if not wait([self._flight], timeout=_STOP_S).done:
                self.drop()
                return
        self._exchange.leave(goodbye)
        self._helper.end()

    def drop(self) -> None:
        self._helper.stop()
        self._exchange.drop()
        self._helper.end()
