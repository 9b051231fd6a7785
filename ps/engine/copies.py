"""Copies of versions of this process's weights, outside of the commit path, while readers or an evaluation need them.

Of the evaluated versions, the best is kept and written (`output.best_weights`). Each shard keeps copies of its part, of
the same versions.
"""

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

log = get_logger()

_LEASE_S = 300.0  # time limit for a reader to fetch its copy
_MEASURED = None  # holds the versions that are measured; other holders are readers, by name
_MAX_MEASURED = 2  # at once; each is a copy of the weights
# Collects the whole model of a version by name, from the tensors here and on the other shards. Raises OutputError.
Gather = Callable[[int, dict[str, torch.Tensor]], Awaitable[dict[str, torch.Tensor]]]


class Copies:
    """Copies by version. All holders of a version share one copy. `changed` is called after each new copy.

    The coordinator has `gather`: it fetches the other parts of the best weights and writes the file. `keeps_best`: the
    best weights are kept."""

    gather: Gather | None = None

    def __init__(
        self, config: Config, keeps_best: bool, model: Model, tensors: TensorThread, changed: Callable[[], None]
    ) -> None:
        self._config, self._keeps_best, self._changed = config, keeps_best, changed
        self._model, self._tensors = model, tensors
        self._payloads: dict[int, torch.Tensor] = {}  # uint8 [total_bytes]
        self._holders: dict[int, set[str | None]] = {}  # by version, including copies that are still being made
        self._leases: dict[str, asyncio.TimerHandle] = {}  # by reader
        self._best: tuple[int, torch.Tensor] | None = None  # written, or pulled by the coordinator
        self._writing: asyncio.Future[None] | None = None

    def keep(self, version: int, reader: str = "") -> None:
        """Copy the newest version, whose number is `version`: for a reader process with a lease, or for an evaluation.

        A reader has at most one version."""
        if reader:
            self.release_reader(reader)
            self._leases[reader] = asyncio.get_running_loop().call_later(_LEASE_S, self.release_reader, reader)
        is_new = version not in self._holders
        holders = self._holders.setdefault(version, set())  # before submit: an idle tensor thread calls back at once
        holders.add(reader or _MEASURED)
        if is_new:
            self._tensors.submit(lambda: self._model.copy(False), lambda found: self._put(*found), lambda error: None)
        measured = [item for item, holders in self._holders.items() if _MEASURED in holders]
        for old in measured[:-_MAX_MEASURED]:
            self.release(old, _MEASURED)

    def _put(self, version: int, payload: torch.Tensor) -> None:
        if version in self._holders:
            self._payloads[version] = payload
            self._changed()

    def get(self, version: int) -> torch.Tensor | None:
        """Returns the copy of this version's weights here, uint8 [total_bytes]; None where it is not kept."""
        best = self._best[1] if self._best is not None and self._best[0] == version else None
        return self._payloads.get(version, best)

    def release(self, version: int, holder: str | None) -> None:
        """End this holder's use of the copy. The copy is freed when its last holder releases it."""
        holders = self._holders.get(version, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(version, None)
            self._payloads.pop(version, None)

    def release_reader(self, reader: str) -> None:
        """Release the version of a reader that has fetched it, or whose lease is over."""
        if (lease := self._leases.pop(reader, None)) is not None:
            lease.cancel()
        for version in [version for version, holders in self._holders.items() if reader in holders]:
            self.release(version, reader)

    def num_readers_beside(self, reader: str) -> int:
        """Returns the number of other readers with a retained version."""
        return len(set[str | None]().union(*self._holders.values()) - {_MEASURED, reader})

    # ---- the best ---------------------------------------------------------------------------

    def measured(self, version: int, is_best: bool) -> None:
        """Keep or drop the copy of an evaluated version. The final weights may have no copy."""
        payload = self._payloads.get(version) if _MEASURED in self._holders.get(version, ()) else None
        self.release(version, _MEASURED)
        if not (is_best and self._keeps_best):
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

    async def best_written(self, is_cut_short: bool = False) -> None:
        """Wait until the best weights are written or given up. A lost shard may never send its part."""
        if self._writing is not None:
            if is_cut_short:
                self._writing.cancel()
            await asyncio.wait([self._writing])
