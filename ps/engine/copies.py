"""Retains copies of versions of this process's weights, outside of the commit path, while readers need them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from ..tensors.model import Model
from ..tensors.thread import TensorThread

_LEASE_S = 300.0  # time limit for a reader to fetch its copy


class Copies:
    """Copies by version. All holders of a version share one copy. `changed` is called after each new copy."""

    def __init__(self, model: Model, tensors: TensorThread, changed: Callable[[], None]) -> None:
        self._model, self._tensors, self._changed = model, tensors, changed
        self._payloads: dict[int, torch.Tensor] = {}  # uint8 [total_bytes]
        self._holders: dict[int, set[str]] = {}  # by version, including copies that are still being made
        self._readers: dict[str, int] = {}  # the version retained for each reader

    def keep(self, version: int, holder: str) -> None:
        """Copy the newest version for this holder. `version` must be its number."""
        is_new = version not in self._holders
        self._holders.setdefault(version, set()).add(holder)  # before submit: an idle tensor thread calls back at once
        if is_new:
            self._tensors.submit(lambda: self._model.copy(False), lambda found: self._put(*found), lambda error: None)

    def keep_for_reader(self, version: int, reader: str) -> None:
        """Copy the newest version for a reader process, with a lease. A reader has at most one version."""
        self.release_reader(reader)
        self._readers[reader] = version
        self.keep(version, f"reader {reader}")
        asyncio.get_running_loop().call_later(_LEASE_S, self._lease_ended, reader, version)

    def _put(self, version: int, payload: torch.Tensor) -> None:
        if version in self._holders:
            self._payloads[version] = payload
            self._changed()

    def get(self, version: int) -> torch.Tensor | None:
        """Returns the copy of this version, uint8 [total_bytes], or None if there is no copy."""
        return self._payloads.get(version)

    def release(self, version: int, holder: str) -> None:
        """End this holder's use of the copy. The copy is freed when its last holder releases it."""
        holders = self._holders.get(version, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(version, None)
            self._payloads.pop(version, None)

    def release_reader(self, reader: str) -> None:
        """Release the version of a reader that has fetched it or has disconnected."""
        if (version := self._readers.pop(reader, None)) is not None:
            self.release(version, f"reader {reader}")

    def num_readers_beside(self, reader: str) -> int:
        """Returns the number of other readers with a retained version."""
        return len(self._readers.keys() - {reader})

    def _lease_ended(self, reader: str, version: int) -> None:
        if self._readers.get(reader) == version:
            self.release_reader(reader)
