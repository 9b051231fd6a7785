"""The Open Inference Protocol (KServe v2) for models that write no text: named tensors in, named tensors out.

A model may mix the rows of its batch (a matrix of similarities, a mean over the batch), and no shape tells. So requests
of several clients share a forward pass only for a task with `has_independent_rows`.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..common.reporting.log import get_logger
from .errors import MOST_PAUSES, Paused, Refused
from .slots import Version

Tensors = dict[str, torch.Tensor]

_DTYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32,
    "INT64": torch.int64, "FP16": torch.float16, "FP32": torch.float32, "FP64": torch.float64, "BF16": torch.bfloat16,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_AXES = 32
log = get_logger()
_MAX_BATCH = 8  # requests in one forward pass
_BATCH_S = 0.003  # that a request waits for others
Reply = Future[tuple[Tensors, Version]]


def read_inputs(body: Any) -> Tensors:
    """Return the tensors of a request by name. Raises Refused with the name of the tensor."""
    inputs = body.get("inputs") if isinstance(body, dict) else None
    if not isinstance(inputs, list) or not inputs:
        raise Refused(400, "inputs is a list of {name, shape, datatype, data}", "invalid_type", "inputs")
    found: Tensors = {}
    for entry in inputs:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name in found:
            raise Refused(400, "each input has a name, and no two have the same", "invalid_type", "inputs")
        found[name] = _tensor(name, entry)
    return found


def _tensor(name: str, entry: dict[str, Any]) -> torch.Tensor:
    datatype: Any = entry.get("datatype", "FP32")
    shape: Any = entry.get("shape")

    def wrong(message: str) -> Refused:
        return Refused(400, f"{name[:80]}: {message}", "invalid_value", name)

    dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise wrong(f"datatype {str(datatype)[:20]} is none of {', '.join(_DTYPES)}")
    is_list = isinstance(shape, list) and 0 < len(shape) <= _MOST_AXES
    if not is_list or not all(type(size) is int and size > 0 for size in shape):
        raise wrong(f"shape is a list of at most {_MOST_AXES} sizes, the batch first; a size is at least 1")
    try:
        data, tensor = torch.tensor(entry.get("data")), torch.tensor(entry.get("data"), dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise wrong(f"data are no numbers of {datatype}: {str(error)[:200]}") from None
    if dtype.is_floating_point:
        is_kept = bool(tensor.isfinite().all())
    else:  # torch would cut 1.5 to 1
        is_kept = not data.is_floating_point() and torch.equal(tensor.long(), data.long())
    if not is_kept:
        raise wrong(f"data has values that {datatype} does not have")
    if tensor.numel() != math.prod(shape):
        raise wrong(f"shape {str(shape)[:80]} has {math.prod(shape)} values, and data {tensor.numel()}")
    return tensor.reshape(shape)


def write_outputs(outputs: Tensors) -> list[dict[str, Any]]:
    """Return the tensors of a reply."""
    return [
        {"name": name, "shape": list(tensor.shape), "datatype": _NAMES[tensor.dtype],
         "data": tensor.flatten().tolist()}
        for name, tensor in outputs.items()
    ]  # fmt: skip


def signature(inputs: Tensors) -> Any:
    """Return what requests of one forward pass have in common; None for inputs that differ in the size of the batch."""
    if len({len(tensor) for tensor in inputs.values()}) > 1:
        return None
    return [(name, tensor.dtype, tensor.shape[1:]) for name, tensor in inputs.items()]


def compute(task: Any, model: nn.Module, requests: Sequence[Tensors]) -> list[Tensors]:
    """Return the outputs of each request, by one forward pass. Several requests have one signature.

    Raises Refused, or Paused.
    """
    try:
        if len(requests) == 1:
            return [_outputs(task, model, requests[0])]
        outputs = _outputs(task, model, {name: torch.cat([item[name] for item in requests]) for name in requests[0]})
        sizes = [len(next(iter(item.values()))) for item in requests]
        parts = {name: tensor.split(sizes) for name, tensor in outputs.items()}  # fails for another first axis
        return [{name: tensors[index] for name, tensors in parts.items()} for index in range(len(requests))]
    except (Paused, Refused):
        raise
    except Exception as error:  # a wrong shape, most often
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(400, f"the model failed: {reason}", "model_failed", "inputs") from None


def _outputs(task: Any, model: nn.Module, inputs: Tensors) -> Tensors:
    """Return the outputs of a model that writes no text, from the task's predict(model, inputs) or a forward pass."""
    found = task.predict(model, inputs) if callable(getattr(task, "predict", None)) else _forward(model, inputs)
    outputs = dict(found) if isinstance(found, Mapping) else {"output": found}
    for name, tensor in outputs.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _NAMES:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            message = f"the model failed: output {name} is a {kind}; the task's predict() returns tensors by name"
            raise Refused(500, message, "model_failed")
        if not tensor.isfinite().all():
            has_diverged = not all(bool(item.isfinite().all()) for item in model.parameters())
            reason = "its weights are not finite either" if has_diverged else "the inputs are too large for it"
            message = f"the model failed: {name} has values that are not finite, and {reason}"
            raise Refused(500 if has_diverged else 400, message, "model_failed", None if has_diverged else "inputs")
    return outputs


def _forward(model: nn.Module, inputs: Tensors) -> Any:
    """Call the model with each tensor under its name. A single tensor may have any name."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    unknown = [name for name in inputs if name not in names]
    if unknown and len(inputs) == 1:
        return model(*inputs.values())
    if unknown and not any(item.kind is item.VAR_KEYWORD for item in parameters):
        message = f"the model has no input {unknown[0][:80]}; its inputs are: {', '.join(names)}"
        raise Refused(400, message, "invalid_value", "inputs")
    return model(**inputs)


def described_inputs(task: Any) -> list[dict[str, Any]]:
    """Return name, shape and datatype of the inputs, from a sample of the task's data. -1 stands for the batch."""
    try:
        sample = task.train_data()[0]
    except Exception:  # no data here, or none that can be indexed
        return []
    first = sample[0] if isinstance(sample, tuple | list) else sample
    if not isinstance(first, torch.Tensor):
        return []
    dtype = first.dtype if first.dtype in _NAMES else torch.float32
    return [{"name": "input", "shape": [-1, *first.shape], "datatype": _NAMES[dtype]}]


@dataclass(eq=False)
class Inference:
    """A request, and the reply that its client waits for."""

    inputs: Tensors
    reply: Reply = field(default_factory=Future)
    num_pauses: int = 0  # a request that has seen one is computed alone: it may be the reason

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
        """Queue a request. The caller has the lock. Raises Refused if the queue is full."""
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
            shared = signature(taken[0].inputs) if self._is_batched and not taken[0].num_pauses else None
            while shared and self._waiting and len(taken) < _MAX_BATCH:
                if self._waiting[0].num_pauses or signature(self._waiting[0].inputs) != shared:
                    break
                taken.append(self._waiting.popleft())
        taken = [item for item in taken if item.has_begun()]
        try:
            self._compute(taken, model, version)
        except Paused as paused:
            for item in reversed([item for item in taken if not item.reply.done()]):
                item.num_pauses += 1
                if item.num_pauses >= MOST_PAUSES:
                    item.reply.set_exception(Refused(500, f"the model failed: {paused}", "model_failed"))
                else:
                    with self._lock:
                        self._waiting.appendleft(item)
            raise

    def _compute(self, taken: list[Inference], model: nn.Module, version: Version) -> None:
        if not taken:
            return
        try:
            found = compute(self._task, model, [item.inputs for item in taken])
        except Refused as refused:
            if len(taken) > 1:  # only the requests that fail alone get an error
                for item in taken:
                    self._compute([item], model, version)
                return
            if refused.status == 500:
                log.error("serve_failed", error=refused.message)
            taken[0].reply.set_exception(refused)
            return
        for item, outputs in zip(taken, found, strict=True):
            item.reply.set_result((outputs, version))

    def refuse(self, reason: Refused) -> None:
        """End all requests that wait. The caller has the lock."""
        for item in self._waiting:
            if item.has_begun():
                item.reply.set_exception(reason)
        self._waiting.clear()
