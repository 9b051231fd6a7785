"""Keeps the weights under evaluation, and writes the best of them (`output.best_weights`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from ...common.config.schema import Config
from ...common.errors import OutputError
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_best
from ..tensors.model import Model
from ..tensors.thread import TensorThread
from .copies import Copies

log = get_logger()

_HOLDER = "evaluation"
_MAX_KEPT = 2  # evaluations under way; each is a copy of the weights
# Collects the whole model of a version by name, from the tensors here and on the other shards. Raises OutputError.
Gather = Callable[[int, dict[str, torch.Tensor]], Awaitable[dict[str, torch.Tensor]]]


class Best:
    """The evaluated weights of one server process.

    Each shard keeps copies of its part, of the same versions. The coordinator has `gather`: it fetches the other parts
    and writes the file. `is_kept`: the best weights are kept."""

    gather: Gather | None = None

    def __init__(self, config: Config, is_kept: bool, model: Model, tensors: TensorThread, copies: Copies) -> None:
        self._config, self._is_kept = config, is_kept
        self._model, self._tensors, self._copies = model, tensors, copies
        self._under_way: list[int] = []  # versions of which a copy is kept
        self._best: tuple[int, torch.Tensor] | None = None  # written, or pulled by the coordinator
        self._writing: asyncio.Future[None] | None = None

    def keep(self, version: int) -> None:
        """Copy the weights of this version, the newest one, before they are evaluated."""
        if version not in self._under_way:
            self._under_way.append(version)
            self._copies.keep(version, _HOLDER)
        while len(self._under_way) > _MAX_KEPT:
            self._copies.release(self._under_way.pop(0), _HOLDER)

    def get(self, version: int) -> torch.Tensor | None:
        """Returns the copy of this version's weights here, uint8 [total_bytes]; None where it is not kept."""
        best = self._best[1] if self._best is not None and self._best[0] == version else None
        copy = self._copies.get(version)
        return best if copy is None else copy

    def evaluated(self, version: int, is_best: bool) -> None:
        """Keep or drop the copy of an evaluated version. The final weights may have no copy."""
        self._tensors.then(lambda: self._evaluated(version, is_best and self._is_kept))

    def _evaluated(self, version: int, is_best: bool) -> None:
        payload = self._copies.get(version) if version in self._under_way else None
        if version in self._under_way:
            self._under_way.remove(version)
            self._copies.release(version, _HOLDER)
        if not is_best:
            return
        if payload is not None:
            self._found(version, payload)
        elif version == self._model.store.version:
            self._tensors.submit(lambda: self._model.copy(False), lambda found: self._found(*found), lambda error: None)
        elif self._config.server.shard == 0:
            log.warning("best_not_kept", version=version, reason="too many evaluations were under way")

    def _found(self, version: int, payload: torch.Tensor) -> None:
        if self._best is None and self._model.store.tables is not None:
            log.warning("best_without_tables", meaning="of the tables only the final rows are saved")
        self._best = version, payload
        if self._config.server.shard == 0:
            self._writing = asyncio.ensure_future(self._write(version, payload, self._writing))

    async def _write(self, version: int, payload: torch.Tensor, before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        path, views = self._config.output.best, self._model.store.layout.views(payload)
        if path is None or self._best is None or self._best[0] != version:
            return  # a better one has come
        tensors = {name: tensor for spec, tensor in views for name in (spec.name, *spec.aliases)}
        try:
            if self.gather is not None:
                tensors = await self.gather(version, tensors)
            metadata = {"mode": self._config.run.mode, "version": str(version)}
            await asyncio.to_thread(write_best, path, tensors, metadata)
        except OutputError as error:
            log.error("best_not_saved", path=path, reason=error.message)
        except Exception as error:  # no caller awaits this task, and the next best must still be written
            log.error("best_not_saved", path=path, version=version, reason=f"{type(error).__name__}: {error}")

    async def written(self, is_cut_short: bool = False) -> None:
        """Wait until the best weights are written or given up. A lost shard may never send its part."""
        if self._writing is not None:
            if is_cut_short:
                self._writing.cancel()
            await asyncio.wait([self._writing])
