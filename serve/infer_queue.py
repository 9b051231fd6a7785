"""Requests for forward passes of named tensors: each is computed alone, unless the task says that rows are independent.

A model may mix the rows of its batch (a matrix of similarities, a mean over the batch), and no shape tells. So requests
of several clients share a forward pass only for a task with `has_independent_rows`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..common.reporting.log import get_logger
from .errors import MOST_PAUSES, Paused, Refused
from .infer import Tensors, compute, signature
from .slots import Version

log = get_logger()

_MAX_BATCH = 8  # requests in one forward pass
_BATCH_S = 0.003  # that a request waits for others

Reply = Future[tuple[Tensors, Version]]


@dataclass(eq=False)
class Inference:
    """A request, and the reply that its client waits for."""

    inputs: Tensors
    reply: Reply = field(default_factory=Future)
    num_pauses: int = 0
    is_alone: bool = False  # it may be the reason why others fail

    def has_begun(self) -> bool:
        """Note that the request is computed now. Return False if its client is gone."""
        return self.reply.running() or self.reply.set_running_or_notify_cancel()


class InferQueue:
    """The requests that wait, at most `size`. `lock` is the engine's."""

    def __init__(self, task: Any, size: int, lock: threading.Condition) -> None:
        self._task, self._size, self._lock = task, max(1, size), lock
        self._is_batched = bool(getattr(task, "has_independent_rows", False))
        self._waiting: deque[Inference] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, inputs: Tensors) -> Reply:
        """Queue a request. Raises Refused if the queue is full."""
        with self._lock:
            self._waiting = deque(item for item in self._waiting if not item.reply.cancelled())
            if len(self._waiting) >= self._size:
                raise Refused(429, f"{len(self._waiting)} requests wait already (serve.queue)", "queue_full")
            self._waiting.append(item := Inference(inputs))
        return item.reply

    def compute(self, model: nn.Module, version: Version) -> None:
        """Compute the request that waits longest, with others of its signature if the task allows it. Raises Paused."""
        if self._is_batched and len(self._waiting) < _MAX_BATCH:
            time.sleep(_BATCH_S)  # more requests may arrive
        with self._lock:
            taken = [self._waiting.popleft()]
            shared = signature(taken[0].inputs) if self._is_batched and not taken[0].is_alone else None
            while shared and self._waiting and len(taken) < _MAX_BATCH:
                if self._waiting[0].is_alone or signature(self._waiting[0].inputs) != shared:
                    break
                taken.append(self._waiting.popleft())
        taken = [item for item in taken if item.has_begun()]
        if not taken:
            return
        try:
            found = compute(self._task, model, [item.inputs for item in taken])
        except Paused as paused:
            for item in taken:
                item.num_pauses += 1
                if item.num_pauses >= MOST_PAUSES:
                    item.reply.set_exception(Refused(500, f"the model failed: {paused}", "model_failed"))
            self._again([item for item in taken if not item.reply.done()])
            raise
        except Refused as refused:
            if len(taken) > 1:  # only the requests that fail alone get an error
                self._again(taken)
                return
            if refused.status == 500:
                log.error("serve_failed", error=refused.message)
            taken[0].reply.set_exception(refused)
            return
        for item, outputs in zip(taken, found, strict=True):
            item.reply.set_result((outputs, version))

    def _again(self, taken: list[Inference]) -> None:
        with self._lock:
            for item in reversed(taken):
                item.is_alone = True
                self._waiting.appendleft(item)

    def refuse(self, reason: Refused) -> None:
        """End all requests that wait."""
        with self._lock:
            for item in self._waiting:
                if item.has_begun():
                    item.reply.set_exception(reason)
            self._waiting.clear()
