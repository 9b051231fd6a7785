"""All-reduce with up to K outstanding means (`--mode allreduce --staleness K`).

    training thread   compute 1 | compute 2 | compute 3, step 1 | compute 4, step 2 | ...       (K = 2)
    rounds thread               | average 1, complete 1 | average 2, complete 2 | ...

This is delayed SGD as in Pipe-SGD (Li et al. 2018, arXiv:1811.03619). The gradient of step t is computed on the weights
of version t - 1 - K. The worker steps along its mean after it has computed step t + K, with the hyperparameters of step
t, even if the mean arrived earlier. So all members step along the same means in the same order.

A *flight* is a contribution from its submission until the worker steps along its mean. The rounds thread makes one
round after another, as `AllReduceStrategy` does, with the gradients that the flight keeps. If a member dies during a
round, the next group repeats it. The rounds thread uses the exchange while flights are pending. Only the training
thread uses the model.

Some rounds need the model: a new member copies weights, or a snapshot is due. Then the rounds thread asks the training
thread, which steps along all available means, copies the result and undoes the steps. So training itself does not
change. A new member also gets the outstanding means, and steps along them at once.

Buffers stay each worker's own during training. An upload has the mean of the buffers of its version.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ....common.kinds import ContributionKind
from ....common.tensors.optimizers import OptimizerSpec
from ....common.wire.records import COUNTED, Outcome, Reply
from ...conversation.exchange import Exchange
from ...conversation.messages import Final, Goodbye, Outgoing
from ...conversation.threads import Helper, wait_for
from ...session import Progress
from ...tensors.transfer import ModelTensors
from ..all_reduce import AllReduceStrategy
from ..delayed_update import Shadow
from ..group import Group
from ..peer_state import Mean, StateTransfer, UndoableStep
from .backends import computed

_LOOK_UP_S = 0.2
_READY_S = 5.0  # time for a source to say whether it is ready; a collective may take longer
_STOP_S = 5.0  # time for a flight to reach a safe place

Numbers = list[dict[str, Any]]  # hyperparameters of each parameter group


@dataclass(eq=False)
class Flight:
    outgoing: Outgoing
    base_version: int  # of the weights that the gradients were computed on
    numbers: Numbers  # hyperparameters of this step
    metadata: tuple[int, ...]
    norm: float
    tensors: list[torch.Tensor | None]  # the gradients; after the round, their mean
    is_made: bool = False
    progress: Progress = field(init=False)  # the progress after its reply
    reply: Future[Reply | None] = field(init=False)


class DelayedStep(UndoableStep):
    """A step with the hyperparameters of an earlier moment."""

    def numbers(self) -> Numbers:
        """A copy of the current hyperparameters."""
        found = []
        for group in self.optimizer.param_groups:
            values = {key: value for key, value in group.items() if key != "params"}
            tensors = {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
            found.append(values | tensors)
        return found

    def apply_with(self, numbers: Numbers, mean: Mean, has_buffers: bool = False) -> None:
        """Step with these hyperparameters, because the script's schedule may have moved on."""
        groups = self.optimizer.param_groups
        now = [dict(group) for group in groups]
        try:
            for group, then in zip(groups, numbers, strict=True):
                group.update(then)
            self.apply(mean, has_buffers)
        finally:
            for group, current in zip(groups, now, strict=True):
                group.update(current)


class DelayedTransfer(StateTransfer):
    """Moves weights, optimizer state and the outstanding means. The training thread dumps and loads them."""

    step: DelayedStep

    def __init__(self, strategy: Delayed, exchange: Exchange, step: DelayedStep) -> None:
        super().__init__(exchange, strategy._lifecycle, step)
        self._strategy = strategy

    def broadcast(self, group: Group, source: int) -> dict[str, Any]:
        """Broadcast the source's state. While its training thread is not ready, the members poll it.

        A collective does not wait for the training thread, because that may take longer than a collective's timeout.
        """
        future: Future[dict[str, Any]] | None = self._strategy.ask(self.dump) if source == group.index else None
        while True:
            is_ready = int(future is None or bool(wait([future], _READY_S).done))
            if all(self._lifecycle.run(lambda is_ready=is_ready: group.gather_numbers(is_ready))):  # type: ignore[misc]
                break
        values = future.result() if future is not None else None
        return self._lifecycle.run(lambda: group.broadcast_values(values, source))

    def dump(self) -> dict[str, Any]:
        """Copy the state, because the training thread continues while the state is sent."""
        means = [(numbers, list(mean)) for numbers, mean in self._strategy.made()]
        return copy.deepcopy({**super().dump(), "means": means})

    def load(self, values: dict[str, Any]) -> None:
        def load() -> None:
            StateTransfer.load(self, values)
            for numbers, mean in values["means"]:
                self.step.apply_with(numbers, mean)

        future = self._strategy.ask(load)
        wait_for(future)
        future.result()


class Delayed(AllReduceStrategy):
    """Lets a training loop continue without the means of its last K contributions."""

    _shadow: Shadow
    _step: DelayedStep

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, may_leave_early=False)
        self._rounds = Helper("rounds")
        self._flights: list[Flight] = []  # oldest first; used by the training thread
        self._spare: list[list[torch.Tensor | None]] = []  # memory of completed flights
        self._model_version = 0
        self._flying: Flight | None = None  # the flight whose round is running
        self._is_over = False  # pending flights are discarded without a round
        # jobs for the training thread
        self._requests: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._undo: Callable[[], None] | None = None  # removes the weights that an evaluation uses
        # Assumes that pending contributions count. The exchange's own progress is what the server has confirmed.
        self.progress: Progress = copy.copy(exchange.progress)

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        self._shadow = Shadow(model)
        super()._start(self._shadow, optimizer, is_parted)
        self._begin()

    def _make_parts(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        self._step = DelayedStep(self._model, optimizer, step)
        self._transfer = DelayedTransfer(self, self._exchange, self._step)

    def _find_model(self) -> None:
        self._model.has_moved()  # the exchange knows the shadow, which does not move

    def _begin(self) -> None:
        """Continue from the server's newest reply."""
        self.progress.become(self._confirmed)
        self._shadow.take()

    def _enter(self) -> None:
        self._begin()
        super()._enter()
        self.progress.become(self._confirmed)
        self._model_version = self._step.version

    # ---- a step, on the training thread -------------------------------------------------------

    def _contribute(self, outgoing: Outgoing) -> None:
        while not self._requests.empty():
            self._serve_one()
        self._hand_over(outgoing)
        is_last = self.progress.assume_counted()
        while len(self._flights) > (0 if is_last or self.progress.is_done else self.settings.outstanding):
            self._step_once()
        if is_last:  # only the reply to the last contribution says whether this worker is done
            self.progress.become(self._confirmed)

    def _step_once(self) -> None:
        """Step along the oldest mean, when it is available."""
        self._land(self._flights[0])
        if self._flights:
            flight = self._flights.pop(0)
            self._step.apply_with(flight.numbers, flight.tensors)
            self._model_version += 1
            self._spare.append(flight.tensors)

    def _hand_over(self, outgoing: Outgoing) -> None:
        sources = self._model.sources(ContributionKind.GRADIENT)
        tensors: list[torch.Tensor | None] = self._spare.pop() if self._spare else [None] * len(sources)
        for index, tensor in enumerate(sources):
            _put(tensors, index, tensor if tensor is None else tensor.detach(), None)
        computed(self._device)
        metadata = self._check.metadata(outgoing, self._model_version, self._change)
        numbers, norm = self._step.numbers(), self._check.weights.norm()
        flight = Flight(outgoing, self._model_version, numbers, metadata, norm, tensors)
        self._flights.append(flight)
        flight.reply = self._rounds.submit(lambda: self._fly(flight))
        flight.reply.add_done_callback(lambda _: self._requests.put((Future(), int)))  # wakes the training thread

    def _land(self, flight: Flight) -> None:
        """Wait until a flight's round is complete. After a START or at the end of the run no flights remain."""
        self._await(flight.reply)
        reply = flight.reply.result()
        is_start = reply is not None and reply.result.outcome is Outcome.START
        if reply is None or is_start:
            for pending in self._flights:
                self._await(pending.reply)
            self._flights.clear()
            self._is_over = False
            if self._confirmed.is_done and not is_start:
                self.progress.become(self._confirmed)
            else:
                self._enter()
            return
        self.progress.become(flight.progress)
        for _ in self._flights[self._flights.index(flight) + 1 :]:
            if not self.progress.is_done:
                self.progress.assume_counted()

    # ---- a round, on its thread ---------------------------------------------------------------

    def _fly(self, flight: Flight) -> Reply | None:
        if self._is_over:
            return None
        self._flying = flight
        try:
            reply = self._until_taken(flight.tensors, flight.outgoing)
            flight.progress = copy.copy(self._confirmed)
            self._is_over = reply.result.outcome is Outcome.START or flight.progress.is_done
            return reply
        except BaseException:
            self._is_over = True
            raise
        finally:
            self._flying = None

    def _metadata(self, outgoing: Outgoing) -> tuple[int, ...]:
        assert self._flying is not None
        return *self._flying.metadata, self._flags(outgoing)

    def _norm(self) -> float:
        assert self._flying is not None
        return self._flying.norm

    def _complete(self, kind: ContributionKind, outgoing: Outgoing) -> Reply:
        if self._flying is not None:
            self._confirmed.version = self._flying.base_version
        return super()._complete(kind, outgoing)

    def _take_step(self, mean: Mean) -> None:
        """All members have the mean: keep it until its step is due."""
        flight = self._flying
        assert flight is not None
        for index, tensor in enumerate(mean):
            _put(flight.tensors, index, tensor, self._model.tensors[index].device)
        self._step.version += 1
        self._step.has_stepped = self._step.has_state = flight.is_made = True

    def _upload(self, outgoing: Outgoing, mean: Mean) -> Reply:
        flight = self._flying
        assert flight is not None

        def snapshot() -> Outgoing:
            undo = self._step_ahead((flight.numbers, mean))
            self._shadow.snapshot(ContributionKind.WEIGHTS)
            has_state = self._exchange.group_view.info.uploads_optimizer
            found = outgoing._replace(optimizer=self._step.state_for_server()) if has_state else outgoing
            undo()
            return found

        future = self.ask(snapshot)
        wait_for(future)
        reply = self._complete(ContributionKind.WEIGHTS, future.result())
        if reply.result.outcome in COUNTED:
            self._take_step(mean)
        return reply

    def _step_ahead(self, *extra: tuple[Numbers, Mean]) -> Callable[[], None]:
        """Step along all available means, then along `extra`. Returns the function that undoes the steps."""
        undo = self._step.copy()
        for numbers, mean in [*self.made(), *extra]:
            self._step.apply_with(numbers, mean, has_buffers=True)
        return undo

    def made(self) -> list[tuple[Numbers, Mean]]:
        """The outstanding means that are available."""
        return [(flight.numbers, flight.tensors) for flight in self._flights if flight.is_made]

    # ---- work for the training thread ---------------------------------------------------------

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the training thread do this work at its next step."""
        future: Future[Any] = Future()
        self._requests.put((future, work))
        if self._flying is None:  # this is the training thread
            self._await(future)
        return future

    def _serve_one(self) -> None:
        with suppress(queue.Empty):
            future, work = self._requests.get(timeout=_LOOK_UP_S)  # a signal may raise here
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _await(self, future: Future[Any]) -> None:
        while not future.done():
            self._serve_one()

    # ---- evaluations, and the end -------------------------------------------------------------

    def settle(self) -> int:
        for flight in list(self._flights):
            if flight in self._flights:
                self._land(flight)
        if self._flights:
            self._undo = self._step_ahead()
        return self._step.version

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        super().measured(version, metrics, failure, exit_code)

    def _drain(self) -> None:
        while self._flights:
            self._step_once()

    def _finish(self) -> Final | None:
        self._drain()
        final = super()._finish()
        if final is not None:
            self._begin()
        return final

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        pending = [flight.reply for flight in self._flights]
        if pending and not is_interrupted and not goodbye.failure:
            self._drain()
        elif pending:
            self._is_over = True
            self._rounds.stop()
            if wait(pending, timeout=_STOP_S).not_done:
                self.drop()
                return
        super().leave(goodbye, is_interrupted)
        self._rounds.end()

    def drop(self) -> None:
        self._is_over = True
        self._rounds.stop()
        super().drop()
        self._rounds.end()


def _put(tensors: list[torch.Tensor | None], index: int, tensor: torch.Tensor | None, device: Any) -> None:
    """Copy a tensor into the memory at this index. `device`: for new memory; None: the tensor's device."""
    target = tensors[index]
    if tensor is None or target is None:
        tensors[index] = None if tensor is None else tensor.to(device or tensor.device, copy=True)
    else:
        target.copy_(tensor)
