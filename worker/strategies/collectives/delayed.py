"""Averaging among all-reduce peers with up to K means outstanding (`--mode allreduce --staleness K`).

    training thread   compute 1 | compute 2 | compute 3, step 1 | compute 4, step 2 | ...       (K = 2)
    rounds thread               | average 1, report 1 | average 2, report 2 | ...

Delayed SGD as of Pipe-SGD (Li et al. 2018, arXiv:1811.03619): the gradient of step t is computed on the weights of
version t - 1 - K, and the mean of all is stepped along after step t + K has been computed, with the hyperparameters of
step t. Always then, whenever it came: so all members step along the same means in the same order.

A *flight* is a contribution from its step until its mean is stepped along. Rounds are made one after another, each as
`AllReduceStrategy` makes one, with the gradients that its flight holds: what a death breaks off is averaged once more
in the next
group, and the next flight's round begins when this one's is made. The exchange belongs to the rounds thread while
flights are under way; the model to the training thread, always. Where a round wants the model (who joins is given
weights; a snapshot is due) it asks the training thread, which does it at its next step: steps along all means that
there are, shows what comes of it, and goes back. So neither changes what is trained. Who joins is given the outstanding
means too, and steps along them at once.

Buffers stay each worker's own while it trains; what is brought has the mean of those of its version.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ....common.kinds import ContributionKind
from ....common.tensors.optimizers import OptimizerSpec
from ....common.wire.records import COUNTED, Outcome, Reply
from ...conversation.exchange import Exchange
from ...conversation.messages import Final, Goodbye, Outgoing
from ...conversation.pool import Helper, wait_for
from ...session import Progress
from ...tensors.transfer import ModelTensors
from ..all_reduce import AllReduceStrategy
from ..group import Group
from ..shadow import Shadow
from .backends import computed

_LOOK_UP_S = 0.2
_READY_S = 5.0  # in which a giver says whether it is ready; a collective may take longer
_STOP_S = 5.0  # for a flight to reach a safe place

Mean = Sequence[torch.Tensor | None]
Numbers = list[dict[str, Any]]  # of each parameter group


@dataclass(eq=False)
class Flight:
    outgoing: Outgoing
    base_version: int  # of the weights it was computed on
    numbers: Numbers  # of the step
    metadata: tuple[int, ...]
    norm: float
    held: list[torch.Tensor | None]  # the gradients, and once its round is made their mean
    is_made: bool = False
    progress: Progress | None = None  # as it got its reply
    reply: Future[Reply | None] | None = None


class Delayed(AllReduceStrategy):
    """A training loop goes on without the means of its last K contributions."""

    _shadow: Shadow

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, may_leave_early=False)
        self._rounds = Helper("rounds")
        self._flights: list[Flight] = []  # oldest first; training thread's
        self._spare: list[list[torch.Tensor | None]] = []  # memory of flights that are over
        self._at = 0  # the version that the model is at
        self._flying: Flight | None = None  # whose round is being made
        self._is_over = False  # nothing that was computed so far is of use: rounds are made of it no more
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # of the training thread
        self._undo: Callable[[], None] | None = None  # of what an evaluation is shown
        # As if what is under way counted; the exchange's own says what is known.
        self.progress: Progress = copy.copy(exchange.progress)

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self._shadow = Shadow(model)
        super()._start(self._shadow, optimizer)
        self._begin()

    def _look_again(self) -> None:
        self._model.has_moved()  # the exchange knows the shadow, which has not

    def _begin(self) -> None:
        """Go on from what the server said last, and nothing else."""
        self.progress.become(self._said)
        self._shadow.take_all()

    def _enter(self) -> None:
        self._begin()
        super()._enter()
        self.progress.become(self._said)
        self._at = self._held_version

    # ---- a step, on the training thread -------------------------------------------------------

    def _contribute(self, outgoing: Outgoing) -> None:
        self._serve()
        self._hand_over(outgoing)
        is_last = self.progress.assume_counted()
        while len(self._flights) > (0 if is_last or self.progress.is_done else self.settings.outstanding):
            self._step_once()
        if is_last:  # whether the run is over for this worker only its reply says
            self.progress.become(self._said)

    def _step_once(self) -> None:
        """Along the oldest mean, when it is there."""
        self._land(self._flights[0])
        if self._flights:
            flight = self._flights.pop(0)
            self._step_with(flight.numbers, flight.held)
            self._at += 1
            self._spare.append(flight.held)

    def _hand_over(self, outgoing: Outgoing) -> None:
        sources = self._model.sources(ContributionKind.GRADIENT)
        held: list[torch.Tensor | None] = self._spare.pop() if self._spare else [None] * len(sources)
        for index, (tensor, place) in enumerate(zip(sources, held, strict=True)):
            if tensor is None or place is None:
                held[index] = None if tensor is None else tensor.detach().clone()
            else:
                place.copy_(tensor.detach())
        computed(self._device)
        metadata = (*super()._metadata(outgoing)[:-1], self._at)
        flight = Flight(outgoing, self._at, self._numbers(), metadata, super()._norm(), held)
        self._flights.append(flight)
        flight.reply = self._rounds.submit(lambda: self._fly(flight))
        flight.reply.add_done_callback(lambda _: self._asked.put(None))

    def _numbers(self) -> Numbers:
        return [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in self._groups()
        ]

    def _groups(self) -> Numbers:
        """As they lie."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.own[0].param_groups]

    def _step_with(self, numbers: Numbers, mean: Mean, has_buffers: bool = False) -> None:
        """The script's schedule may be further by now."""
        groups, now = self.own[0].param_groups, self._groups()
        try:
            for group, then in zip(groups, numbers, strict=True):
                group.update(then)
            self._apply(mean, has_buffers)
        finally:
            for group, mine in zip(groups, now, strict=True):
                group.update(mine)

    def _land(self, flight: Flight) -> None:
        """Its round is made; where there is another START, or no step to come, there are no flights afterwards."""
        assert flight.reply is not None
        self._await(flight.reply)
        reply = flight.reply.result()
        if reply is None or reply.result.outcome == Outcome.START:
            self._end_flights()
            if self._said.is_done and (reply is None or reply.result.outcome != Outcome.START):
                self.progress.become(self._said)
            else:
                self._enter()
            return
        assert flight.progress is not None
        self.progress.become(flight.progress)
        for _ in self._flights[self._flights.index(flight) + 1 :]:
            if not self.progress.is_done:
                self.progress.assume_counted()

    def _end_flights(self) -> None:
        """Of those that are left nothing comes."""
        for flight in self._flights:
            assert flight.reply is not None
            self._await(flight.reply)
        self._flights.clear()
        self._is_over = False

    # ---- a round, on its thread ---------------------------------------------------------------

    def _fly(self, flight: Flight) -> Reply | None:
        if self._is_over:
            return None
        self._flying = flight
        try:
            reply = self._until_taken(flight.held, flight.outgoing)
            flight.progress = copy.copy(self._said)
            self._is_over = reply.result.outcome == Outcome.START or flight.progress.is_done
            return reply
        except BaseException:
            self._is_over = True
            raise
        finally:
            self._flying = None

    def _metadata(self, outgoing: Outgoing) -> tuple[int, ...]:
        assert self._flying is not None
        return self._flying.metadata

    def _norm(self) -> float:
        assert self._flying is not None
        return self._flying.norm

    def _say(self, kind: ContributionKind, outgoing: Outgoing) -> Reply:
        if self._flying is not None:
            self._said.version = self._flying.base_version
        return super()._say(kind, outgoing)

    def _step(self, mean: Mean) -> None:
        """All have the mean: it is kept until its time comes."""
        flight = self._flying
        assert flight is not None
        for index, tensor in enumerate(mean):
            place = flight.held[index]
            if tensor is None or place is None:
                flight.held[index] = None if tensor is None else tensor.to(self._model.tensors[index].device, copy=True)
            else:
                place.copy_(tensor)
        self._held_version += 1
        self._has_stepped = self._has_state = flight.is_made = True

    def _bring(self, outgoing: Outgoing, mean: Mean) -> Reply:
        flight = self._flying
        assert flight is not None

        def show() -> Outgoing:
            undo = self._ahead((flight.numbers, mean))
            self._shadow.snapshot(ContributionKind.WEIGHTS)
            has_optimizer = self._exchange.group.uploads_optimizer
            shown = outgoing._replace(optimizer=self._remembered()) if has_optimizer else outgoing
            undo()
            return shown

        reply = self._say(ContributionKind.WEIGHTS, self._there(show))
        if reply.result.outcome in COUNTED:
            self._step(mean)
        return reply

    def _ahead(self, *more: tuple[Numbers, Mean]) -> Callable[[], None]:
        """Step along all means that there are, and `more`; returns what undoes it."""
        undo = self._copy()
        for numbers, mean in [*self._made(), *more]:
            self._step_with(numbers, mean, has_buffers=True)
        return undo

    def _made(self) -> list[tuple[Numbers, Mean]]:
        return [(flight.numbers, flight.held) for flight in self._flights if flight.is_made]

    def _given_by(self, group: Group, giver: int) -> dict[str, Any]:
        """As long as the giver's training thread takes to come by; nobody's collective waits for that."""
        future: Future[dict[str, Any]] | None = self._ask(self._gift) if giver == group.index else None
        while True:
            is_ready = future is None or bool(wait([future], _READY_S).done)
            if all(self._here(lambda is_ready=is_ready: group.told(int(is_ready)))):  # type: ignore[misc]
                break
        return self._here(lambda: group.give(future.result() if future is not None else None, giver))

    def _gift(self, **more: Any) -> dict[str, Any]:
        """A copy: the training thread goes on while it is given."""
        means = [(numbers, list(mean)) for numbers, mean in self._made()]
        return copy.deepcopy(super()._gift(means=means, **more))

    def _learn(self, found: dict[str, Any]) -> None:
        self._there(lambda: self._learn_there(found))

    def _learn_there(self, found: dict[str, Any]) -> None:
        super()._learn(found)
        for numbers, mean in found["means"]:
            self._step_with(numbers, mean)

    # ---- what one thread asks of the other ----------------------------------------------------

    def _there(self, work: Callable[[], Any]) -> Any:
        """On the training thread."""
        future = self._ask(work)
        wait_for(future)
        return future.result()

    def _ask(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def serve() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        if self._flying is None:  # this is the training thread
            serve()
        else:
            self._asked.put(serve)
        return future

    def _serve(self) -> None:
        while not self._asked.empty():
            self._serve_one()

    def _serve_one(self) -> None:
        with suppress(queue.Empty):
            future = self._asked.get(timeout=_LOOK_UP_S)  # a signal may raise here
            if future is not None:
                future()

    def _await(self, future: Future[Any]) -> None:
        while not future.done():
            self._serve_one()

    # ---- evaluations, and the end -------------------------------------------------------------

    def settle(self) -> int:
        for flight in list(self._flights):
            if flight in self._flights:
                self._land(flight)
        if self._flights:
            self._undo = self._ahead()
        return self._held_version

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        super().measured(version, metrics, failure, exit_code)

    def _drain(self) -> None:
        while self._flights:
            self._step_once()

    def _finish(self, can_evaluate: bool) -> Final | None:
        self._drain()
        final = super()._finish(can_evaluate)
        if final is not None:
            self._begin()
        return final

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        pending = [flight.reply for flight in self._flights if flight.reply is not None]
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
