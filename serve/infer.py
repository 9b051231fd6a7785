"""The Open Inference Protocol (KServe v2) for models that write no text: named tensors in, named tensors out."""

from __future__ import annotations

from typing import Any

import torch

from .engine import Refused

_DTYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32,
    "INT64": torch.int64, "FP16": torch.float16, "FP32": torch.float32, "FP64": torch.float64, "BF16": torch.bfloat16,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_inputs(body: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a request by name. Raises Refused with the name of the tensor."""
    inputs = body.get("inputs") if isinstance(body, dict) else None
    if not isinstance(inputs, list) or not inputs:
        raise Refused(400, "inputs is a list of {name, shape, datatype, data}", "invalid_type", "inputs")
    return dict(_tensor(entry) for entry in inputs)


def _tensor(entry: Any) -> tuple[str, torch.Tensor]:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise Refused(400, "an input has no name", "invalid_type", "inputs")
    dtype, shape = _DTYPES.get(entry.get("datatype", "FP32")), entry.get("shape")
    if dtype is None:
        raise Refused(400, f"{name}: datatype {str(entry['datatype'])[:20]} is none of {', '.join(_DTYPES)}",
                      "invalid_value", name)  # fmt: skip
    is_shape = isinstance(shape, list) and shape and all(type(size) is int and size > 0 for size in shape)
    if not is_shape:
        raise Refused(400, f"{name}: shape is a list of sizes, the batch first", "invalid_value", name)
    try:
        tensor = torch.tensor(entry.get("data"), dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise Refused(400, f"{name}: data are no numbers: {error}", "invalid_value", name) from None
    num_values = torch.Size(shape).numel()
    if tensor.numel() != num_values:
        message = f"{name}: shape {shape} has {num_values} values, and data {tensor.numel()}"
        raise Refused(400, message, "invalid_value", name)
    return name, tensor.reshape(shape)


def write_outputs(outputs: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return the tensors of a reply. Raises Refused for values that JSON does not have."""
    for name, tensor in outputs.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise Refused(500, f"the model failed: {name} has values that are not finite", "model_failed")
    return [
        {"name": name, "shape": list(tensor.shape), "datatype": _NAMES[tensor.dtype],
         "data": tensor.flatten().tolist()}
        for name, tensor in outputs.items()
    ]  # fmt: skip


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
