"""Copies of versions of this process's weights, outside of the commit path, each for as long as it has a holder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from ..tensors.model import Model
from ..tensors.thread import TensorThread

_LEASE_S = 300.0  # within which a reader fetches its copy


class Copies:
    """The copies by version; holders of one version share it. `changed` is called for each new copy."""

    def __init__(self, model: Model, tensors: TensorThread, changed: Callable[[], None]) -> None:
        self._model, self._tensors, self._changed = model, tensors, changed
        self._payloads: dict[int, torch.Tensor] = {}  # uint8 [total_bytes]
        self._holders: dict[int, set[str]] = {}  # of each version, also of those on their way
        self._readers: dict[str, int] = {}  # the version that each reader holds

    def keep(self, version: int, holder: str) -> None:
        """Copy the newest version, which is `version`, for this holder."""
        is_new = version not in self._holders
        self._holders.setdefault(version, set()).add(holder)  # first: an idle tensor thread calls back at once
        if is_new:
            self._tensors.submit(lambda: self._model.copy(False), lambda found: self._put(*found), lambda error: None)

    def keep_for_reader(self, version: int, reader: str) -> None:
        """The same for a process that reads: it has one version at most, and a lease."""
        self.release_reader(reader)
        self._readers[reader] = version
        self.keep(version, f"reader {reader}")
        asyncio.get_running_loop().call_later(_LEASE_S, self._lease_ended, reader, version)

    def _put(self, version: int, payload: torch.Tensor) -> None:
        if version in self._holders:
            self._payloads[version] = payload
            self._changed()

    def get(self, version: int) -> torch.Tensor | None:
        """Returns the copy of this version, uint8 [total_bytes]; None where there is none."""
        return self._payloads.get(version)

    def release(self, version: int, holder: str) -> None:
        """This holder needs the copy no more. The last one frees its memory."""
        holders = self._holders.get(version, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(version, None)
            self._payloads.pop(version, None)

    def release_reader(self, reader: str) -> None:
        """This reader has fetched its version, or is gone."""
        if (version := self._readers.pop(reader, None)) is not None:
            self.release(version, f"reader {reader}")

    def num_readers_beside(self, reader: str) -> int:
        """How many other readers hold a version."""
        return len(self._readers.keys() - {reader})

    def _lease_ended(self, reader: str, version: int) -> None:
        if self._readers.get(reader) == version:
            self.release_reader(reader)
