"""Returns the bytes of transfers: for a task's model or a given size, in the codecs of the configuration.

torch is loaded only for a task's model or a codec.
"""

from __future__ import annotations

from typing import Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from .framing import Sizes

_ROW = 1024  # float32 of a row


def payload_sizes(config: Config, megabytes: float | None) -> Sizes:
    """Returns the sizes of a run whose model has so many megabytes; None: as the task's model."""
    worker = config.worker
    if megabytes is not None and worker.codec == worker.reply_codec == "raw":
        whole = round(megabytes * 1e6)
        return Sizes(whole, whole, whole)
    layout = _layout(config, megabytes)
    whole = layout.exchange_bytes
    return Sizes(_encoded(worker.codec, layout), _encoded(worker.reply_codec, layout), whole)


def _encoded(name: str, layout: Any) -> int:
    from ...common.codecs.base import payload_bytes
    from ...common.registry import CODECS

    return payload_bytes(CODECS.load(name)(), layout)


def _layout(config: Config, megabytes: float | None) -> Any:
    from ...common.tensors.layout import Kind, Layout, TensorSpec

    if megabytes is not None:
        # A matrix, like most of a model. Tensors with one dimension travel in other codecs.
        rows = -(-round(megabytes * 1e6 / 4) // _ROW)
        return Layout([TensorSpec("weights", Kind.PARAMETER, "float32", (rows, _ROW))])
    import torch

    from ...worker.tensors.transfer import ModelTensors
    from ...worker.training.tasks.loading import load_task

    try:
        task = load_task(config.task.name, config.task.args, seed=config.run.seed, device=torch.device("cpu"))
    except UsageError as error:
        message = f"the size of the model of task {config.task.name} is unknown: {error.message}"
        raise UsageError(message, fix="give the size: --mb 10") from None
    return ModelTensors(task.model()).layout
