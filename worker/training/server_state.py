"""The state of an optimizer that the server runs, as a script reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch

from ...common.errors import UsageError
from ...common.tensors.optimizers import IN_WORKERS
from ..strategies.base import Strategy


class ServerState(MutableMapping[torch.Tensor, Mapping[str, Any]]):
    """The state of the server's optimizer, fetched when the script reads it. A script cannot change it."""

    def __init__(self, parameters: list[torch.Tensor], strategy: Strategy) -> None:
        self._parameters, self._strategy = parameters, strategy
        self._fetched_at: tuple[int, ...] = ()
        self.is_read = False  # the script has read the state
        self._found: dict[torch.Tensor, Mapping[str, Any]] = {}
        self._versions: list[int] = []

    def _fetch(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        progress = self._strategy.progress
        if self._fetched_at != (now := (progress.num_received, progress.row.seq, progress.position)):
            found = self._strategy.optimizer_state(self._parameters)
            self._found = {self._parameters[index]: MappingProxyType(state) for index, state in found.items()}
            self._versions, self._fetched_at, self.is_read = self._count(), now, True
        return self._found

    def _count(self) -> list[int]:
        """How often each tensor was changed in place."""
        values = [value for state in self._found.values() for value in state.values()]
        return [value._version for value in values if isinstance(value, torch.Tensor)]

    def forget(self) -> None:
        """The next reading fetches again."""
        self._fetched_at = ()

    def check(self) -> None:
        """Raises UsageError if the script has changed the state."""
        if self._versions != self._count():
            raise state_is_the_servers()

    def __getitem__(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        return self._fetch().get(parameter, MappingProxyType({}))  # torch's state has no missing keys, too

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Accepts the state that is there: a trainer at its end writes each back, after it moved it to another device.

        Raises UsageError for another state."""
        known = self[parameter]
        if known.keys() != state.keys() or not all(_is_equal(state[key], value) for key, value in known.items()):
            raise state_is_the_servers()

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise state_is_the_servers()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())


def _is_equal(value: Any, known: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return torch.equal(value.to(known.device), known)
    return bool(value == known)


def state_is_the_servers() -> UsageError:
    return UsageError(
        "the state of the optimizer was changed, but the server keeps it and would not see the change",
        fix=f"leave it as it is; or {IN_WORKERS}",
    )
