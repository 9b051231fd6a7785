"""Weights that still come while the next forward pass is under way.

`step()` returns as soon as the answer is here; its weights are received by another thread, in the order of the body.
Whatever in torch reads a tensor that is not whole waits for it first (`tensors/waiting.py`): a layer in its forward
pass, a parent that uses a child's weight, `state_dict()`, another optimizer, a list of parameters that a script holds.
Besides, a hook on each module that owns tensors waits for these before its forward pass, for what torch does not see
there (an extension's kernel, torch.func). Where others may read unseen, weights are waited for in `step()`, and a line
of the log says why.

If the connection is lost in the middle, the rest comes with the same answer, asked for again. Where that is of a newer
version, or the server has gone back, what is computed meanwhile is of two versions: it is not sent, but computed again.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, wait
from functools import partial

import torch

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Kind, Layout
from ..conversation.client import Lost
from ..conversation.crew import Helper, wait_for
from ..conversation.exchange import Exchange
from ..conversation.messages import Answer
from ..tensors.arrival import Arrival
from ..tensors.transfer import ModelTensors
from ..tensors.waiting import MAY_WAIT, BeforeCompiling, hidden, lacking, make_usual, make_wait, num_users
from ..tensors.watch import Watch
from .early import MIN_MODEL_BYTES
from .usage import Usage

log = get_logger()

# Waiting for a tensor takes 10 to 20 us: as long as so many bytes of it should take to come, at the least.
_MIN_TENSOR_BYTES = 64 << 10
# A worker that fails waits this long for the rest of the weights.
_MOMENT_S = 1.0
# An interrupted worker waits this long for what comes to reach a safe place.
_STOP_S = 5.0


class LateWeights:
    """Of one model; of none, and in nobody's way, before it `meets` one that this can be done with."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._helper = Helper("weights")
        self._flight: Future[None] | None = None
        self._arrival: Arrival | None = None
        self._awaited: set[int] = set()  # tensors that have not been taken into the model
        self._num_awaited = 0  # in the beginning
        self._version = 0
        self._lock = threading.RLock()  # a forward pass may be computed once more on a thread of autograd
        self._process = os.getpid()
        self._has_begun = False  # something of what came has been read
        self._is_void = False  # what is computed is of two versions
        self._buffers: dict[int, torch.Tensor] = {}  # as the server said where to start, if it is
        self._waited_s = 0.0
        self._reason = ""
        self._is_off = True  # for good, but for `meet`
        self._before_compiling: BeforeCompiling | None = None

    def meet(self, model: ModelTensors) -> None:
        """Before there is anything of ours that shares the memory of its tensors."""
        if not is_worth_it(model.layout):
            return
        if missing := lacking():
            _say_off(f"this torch is without {missing}")
            return
        self._is_off, self._model, self._usage = False, model, Usage(model, self._come)
        self._before_compiling = BeforeCompiling(self.settle)
        self._num_users = [num_users(tensor) for tensor in model.tensors]

    def started(self, watch: Watch | None) -> None:
        """There is all of ours."""
        if self._is_off:
            return
        self._watch = watch
        pairs = zip(self._model.tensors, self._num_users, strict=True)
        self._num_users = [2 + num_users(tensor) - before for tensor, before in pairs]

    def may_come(self) -> bool:
        """Whether nothing is in the way of the next weights' being late."""
        if self._is_off:
            return False
        why_not = self._why_not()
        if why_not and why_not != self._reason:
            _say_off(why_not)
        self._reason = why_not or self._reason
        return not why_not

    def _why_not(self) -> str:
        assert self._before_compiling is not None
        if why_not := hidden(self._model.module) or self._before_compiling.why_not():
            self._is_off = True
            return why_not
        for index in range(self._model.num_exchanged):
            tensor = self._model.tensors[index]
            name = self._model.layout.entries[index].spec.name
            if tensor.device.type != "cpu":
                return f"the model is on {tensor.device}, where a replayed graph reads weights unseen"
            if type(tensor) not in MAY_WAIT:
                return f"'{name}' is a {type(tensor).__name__}"
            if num_users(tensor) != self._num_users[index]:
                return f"something else shares the memory of '{name}' (p.data, a state dict or a NumPy array is kept)"
        return ""

    @property
    def order(self) -> tuple[int, ...]:
        """In which tensors are used; empty until that is known."""
        return self._usage.order if not self._is_off else ()

    def take_waited(self) -> float:
        """Seconds that readers have waited since this was asked last."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    # ---- what comes -------------------------------------------------------------------------------

    @property
    def is_coming(self) -> bool:
        return self._flight is not None

    def begin(self) -> None:
        """The newest answer's weights begin to come, if there are any."""
        self._has_begun = False
        if not self._exchange.is_coming:
            return
        self._version = self._exchange.progress.version
        self._arrival, receive = self._exchange.expect()
        self._awaited = set(self._arrival.awaited)
        self._num_awaited = len(self._awaited)
        for index in self._awaited:
            make_wait(self._model.tensors[index], partial(self._come, index))

        def arrive(arrival: Arrival) -> None:
            try:
                receive()
            finally:
                arrival.end()

        self._usage.look()
        self._flight = self._helper.submit(partial(arrive, self._arrival))

    def _come(self, index: int) -> None:
        """Returns when this tensor is whole."""
        with self._lock:
            if index not in self._awaited or self._arrival is None:
                return
            if os.getpid() != self._process:
                raise UsageError(
                    "a forked process reads weights that had not come when it was forked",
                    fix="set worker.overlap=false (PS_WORKER__OVERLAP=false)",
                )
            self._has_begun = True
            self._usage.used(index)
            started = time.perf_counter()
            is_whole = self._arrival.wait(index)
            self._waited_s += time.perf_counter() - started
            flight = self._flight
            is_sound = flight is not None and flight.done() and flight.exception() is None
            if flight is None or not is_whole or (is_sound and self._usage.order):
                self._land()  # all at once costs less
            else:
                self._take([index])

    def _take(self, indices: list[int]) -> None:
        assert self._arrival is not None
        are_all = len(indices) == self._num_awaited
        # Whatever transform the reader is in; and other threads wait until it is done.
        with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunctionSubclass():
            for index in indices:
                self._arrival.take(index)
                if self._watch is not None and not are_all:
                    self._watch.note_one(index)
            if self._watch is not None and are_all:
                self._watch.note()
        for index in indices:
            self._give_back(index)

    def _give_back(self, index: int) -> None:
        """The tensor is as any other."""
        self._awaited.remove(index)
        make_usual(self._model.tensors[index])

    def land(self) -> bool:
        """All weights are in the model when this returns. False, once, when what was computed since the last answer is
        not to be sent; the model is as the server said then."""
        with self._lock:
            self._land()
            if not self._is_void:
                return True
            self._is_void = False
            for index, buffer in self._buffers.items():
                self._model.tensors[index].data.copy_(buffer)
            self._buffers = {}
            self._exchange.progress.begin_again()
            return False

    def settle(self) -> None:
        """All weights are in the model when this returns."""
        with self._lock:
            self._land()

    def forget(self) -> None:
        """Nothing has been computed since the server said where to start."""
        self._is_void, self._buffers = False, {}

    def _land(self) -> None:
        if self._flight is None:
            return
        wait_for(self._flight)  # a signal may raise here: what comes stays on its way then
        flight, self._flight = self._flight, None
        self._usage.look_away(was_whole=flight.exception() is None)
        try:
            flight.result()
        except Lost as lost:
            self._recover(lost)
        except BaseException:
            self._break_off()
            raise
        self._take(list(self._awaited))
        self._arrival = None

    def _recover(self, lost: Lost) -> None:
        """All weights once more. What a forward pass has done to buffers it has not done to these."""
        entries = enumerate(self._model.layout.entries)
        buffers = [index for index, entry in entries if entry.spec.kind is Kind.BUFFER]
        used = {index: self._model.tensors[index].clone() for index in buffers if index not in self._awaited}
        for index in list(self._awaited):
            self._give_back(index)
        answer = self._exchange.fetch_again(lost)
        if not self._has_begun:
            pass
        elif answer.outcome != Answer.START and answer.version == self._version:
            for index, buffer in used.items():
                self._model.tensors[index].data.copy_(buffer)
        else:
            if answer.outcome != Answer.START:
                self._exchange.start_again(f"weights of version {self._version} were lost in the middle")
            self._is_void = True
            self._buffers = {index: self._model.tensors[index].clone() for index in buffers}
        if self._watch is not None:
            self._watch.note()

    # ---- the end ----------------------------------------------------------------------------------

    def abide(self) -> bool:
        """What comes may come for a moment more: who looks at the model after a failure finds one version."""
        return self._flight is None or bool(wait([self._flight], timeout=_MOMENT_S).done)

    def interrupt(self) -> bool:
        """What does not come in a moment is given up; True when the connection is of use still."""
        if not self.abide():
            self._helper.stop()
        return self._flight is None or bool(wait([self._flight], timeout=_STOP_S).done)

    def end(self) -> None:
        """Nothing comes any more, and the connections are closed."""
        if self._before_compiling is not None:
            self._usage.look_away(was_whole=False)
            self._before_compiling.end()
            self._before_compiling = None
        self._is_off = True
        self._helper.stop()
        self._helper.end()
        self._flight = None
        self._break_off()

    def _break_off(self) -> None:
        """Of what has not come whole some bytes are the old version's: nobody is to take it for either."""
        arrival = self._arrival
        if arrival is not None:
            self._take([index for index in self._awaited if arrival.has_come(index)])
        for index in self._awaited:
            make_wait(self._model.tensors[index], partial(self._raise_missing, index))

    def _raise_missing(self, index: int) -> None:
        name = self._model.layout.entries[index].spec.name
        raise UsageError(
            f"the new value of '{name}' was on its way when the session was ended in the middle of a step, and the old "
            "one is gone",
            fix="take the weights from a snapshot (ps-server --checkpoint-dir DIR), or set PS_WORKER__OVERLAP=false",
        )


def _say_off(why: str) -> None:
    log.info("overlap_down_off", reason=why, meaning="weights are waited for in step()")


def is_worth_it(layout: Layout) -> bool:
    """Whether a model is large enough, and its tensors are on average."""
    num_tensors = sum(entry.spec.kind is not Kind.FROZEN for entry in layout.entries)
    return layout.exchange_bytes >= max(MIN_MODEL_BYTES, num_tensors * _MIN_TENSOR_BYTES)
