"""Gradients that leave while backward is still running.

Each gradient that is ready goes into a bucket; a full bucket leaves at once, ahead of the contribution it belongs to
(as PyTorch's DistributedDataParallel does, Li et al. 2020). At `step()` only the rest is left to send.

A gradient may change after it has left: clipping, unscaling, a second backward that accumulates. Torch counts every
change of a tensor in place, so this is noticed at `step()`: everything is sent again, and from then on nothing leaves
early. What goes around that count (`grad.data`) is not noticed, therefore scripts of one's own must ask for this
(worker.overlap).
"""

from __future__ import annotations

from functools import partial

import torch

from ...common.reporting.log import get_logger
from ...common.tensors.layout import Kind
from ..conversation.exchange import Exchange
from ..tensors.transfer import ModelTensors

log = get_logger()

# Small buckets leave little for the end, but every one costs messages: at least so much, and 64 of them at most.
# 4 MB over 400 Mbit/s with a real backward: 0.79 of the plain step with 256 KiB, 0.83 with 1 MiB.
_BUCKET_BYTES = 256 << 10
_MAX_BUCKETS = 64
# Smaller models are sent faster than watched.
MIN_MODEL_BYTES = 1 << 20


class EarlySender:
    """Watches the gradients of a model and sends full buckets through the exchange."""

    def __init__(self, exchange: Exchange, model: ModelTensors) -> None:
        self._exchange = exchange
        self._model = model
        self._bucket: list[int] = []
        self._bucket_bytes = 0
        self._full_bytes = max(_BUCKET_BYTES, model.layout.exchange_bytes // _MAX_BUCKETS)
        self._waiting: list[int] = []  # a bucket on its way out of the device
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}  # gradients when they left: how often they had changed
        self._is_wrong = self.is_paused = False  # what is computed is not to be sent
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._ready, index))
            for index, (entry, tensor) in enumerate(zip(model.layout.entries, model.tensors, strict=True))
            if entry.spec.kind is Kind.PARAMETER and tensor.requires_grad
        ]

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated; called in the middle of backward."""
        gradient = parameter.grad
        self._is_wrong |= index in self._seen or gradient is None or gradient.is_sparse
        if self._is_wrong or self.is_paused or gradient is None:
            return
        self._seen[index] = (gradient, gradient._version)
        self._bucket.append(index)
        self._bucket_bytes += self._model.layout.entries[index].num_bytes
        if self._bucket_bytes >= self._full_bytes:
            self._send_bucket()

    def _send_bucket(self) -> None:
        bucket, self._bucket, self._bucket_bytes = self._bucket, [], 0
        if self._exchange.prepare(bucket):
            # Its copy off the device has begun; the one before has had time.
            bucket, self._waiting = self._waiting, bucket
        self._depart(bucket)

    def _depart(self, bucket: list[int]) -> None:
        if not bucket:
            return
        self._exchange.depart(bucket)
        for index in bucket:  # it may lie in shared memory now
            gradient = self._model.tensors[index].grad
            assert gradient is not None
            self._seen[index] = (gradient, gradient._version)

    def settle(self) -> None:
        """Called by `step()`: what has left may count, or is sent again."""
        if self._is_wrong or any(self._has_changed(index) for index in self._seen):
            self._exchange.recall()
            self.stop()
            log.info("overlap_off", reason="gradients change between backward and step(): they are sent at step()")
        self._seen, self._bucket, self._bucket_bytes, self._waiting = {}, [], 0, []

    def _has_changed(self, index: int) -> bool:
        gradient, (seen, num_changes) = self._model.tensors[index].grad, self._seen[index]
        return gradient is not seen or seen._version != num_changes

    def stop(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
