"""Weights that are being evaluated, and the file of the best of them (`output.best_weights`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from ...common.config.schema import Config
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_best
from ..tensors.model import Model
from ..tensors.thread import TensorThread

log = get_logger()

_MAX_KEPT = 2  # evaluations under way; each is a copy of the weights


class Best:
    """Of one server process. Of several shards nobody has all the weights: there it keeps none."""

    def __init__(self, config: Config, model: Model, tensors: TensorThread) -> None:
        self._mode, self._model, self._tensors = config.run.mode, model, tensors
        self._path = config.output.best if config.server.shards == 1 else None
        if config.server.shards > 1 and config.server.shard == 0 and config.run.eval_every and config.output.best:
            log.warning(
                "no_best_weights", reason="the model is divided among shards: figures are kept, weights are not"
            )
        self._kept: dict[int, torch.Tensor] = {}  # by version, uint8 [total_bytes]
        self._writer: ThreadPoolExecutor | None = None

    def keep(self, version: int) -> None:
        """The weights of this version, the newest that is decided, are about to be evaluated."""
        if self._path is not None and version not in self._kept:
            self._tensors.submit(lambda: self._model.copy(False), lambda found: self.put(*found), lambda error: None)

    def put(self, version: int, body: torch.Tensor) -> None:
        """A copy of the weights, uint8 [total_bytes]."""
        if self._path is None:
            return
        self._kept[version] = body
        while len(self._kept) > _MAX_KEPT:
            del self._kept[min(self._kept)]

    def evaluated(self, version: int, is_best: bool) -> None:
        """Of those that were kept; the final weights need not have been."""
        body = self._kept.pop(version, None)
        if not is_best or self._path is None:
            return
        if body is not None:
            self._write(version, body)
        elif version == self._model.store.version:
            self._tensors.submit(lambda: self._model.copy(False), lambda found: self._write(*found), lambda error: None)
        else:
            log.warning("best_not_kept", version=version, reason="too many evaluations were under way")

    def _write(self, version: int, body: torch.Tensor) -> None:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="best")
        self._writer.submit(self._write_file, version, body)

    def _write_file(self, version: int, body: torch.Tensor) -> None:
        assert self._path is not None
        views = self._model.store.layout.views(body)
        tensors = {name: tensor for spec, tensor in views for name in (spec.name, *spec.aliases)}
        write_best(self._path, tensors, {"mode": self._mode, "version": str(version)})

    def close(self) -> None:
        """Waits for what is being written."""
        if self._writer is not None:
            self._writer.shutdown(wait=True)
