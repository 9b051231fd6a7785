"""What the processes of a worker say to each other, over Gloo. Each channel is used by one thread of a process at a
time, in the same order in all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...common.errors import ParamServerError, UnreachableError
from ...common.wire.json_text import read_json

_SAID_BYTES = 2048  # of what group rank 0 tells the others, that come in one message
_WATCH_S = 1.0


class Channel:
    """`words` is torch's group. Blocking; UnreachableError when it is over."""

    def __init__(self, words: Any, rank: int, size: int) -> None:
        self._words, self.rank, self.size = words, rank, size

    def say(self, words: Sequence[float]) -> list[list[float]]:
        """What each says: as many numbers, exact up to 2^53."""
        mine = torch.tensor(words, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: self._words.allgather([found], [mine]))
        return [item.tolist() for item in found]

    def tell(self, told: Mapping[str, Any]) -> None:
        """To the others, by group rank 0."""
        payload = json.dumps(told).encode()
        first = torch.zeros(_SAID_BYTES, dtype=torch.uint8)
        begin = len(payload).to_bytes(8, "little") + payload[: _SAID_BYTES - 8]
        first[: len(begin)] = torch.frombuffer(bytearray(begin), dtype=torch.uint8)
        self._broadcast(first, self._words)
        if rest := payload[_SAID_BYTES - 8 :]:
            self._broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), self._words)

    def hear(self) -> dict[str, Any]:
        """What group rank 0 tells. The error that has ended it, if that is what it tells."""
        first = torch.zeros(_SAID_BYTES, dtype=torch.uint8)
        self._broadcast(first, self._words)
        begin = first.numpy().tobytes()
        size = int.from_bytes(begin[:8], "little")
        payload = begin[8 : 8 + size]
        if len(payload) < size:
            rest = torch.empty(size - len(payload), dtype=torch.uint8)
            self._broadcast(rest, self._words)
            payload += rest.numpy().tobytes()
        told: dict[str, Any] = read_json(payload, nan=True)
        if "error" in told:
            ended = ParamServerError(f"group rank {self.rank}: group rank 0 has ended: {told['error']}")
            ended.exit_code = told["exit_code"]
            raise ended
        return told

    def tell_error(self, error: ParamServerError) -> None:
        """That has ended group rank 0: the others hear it as theirs."""
        self.tell({"error": error.message, "exit_code": error.exit_code})

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """Of the host, contiguous; to be waited for (`wait`)."""
        return self._begin(lambda: self._words.send([tensor], to, tag))

    def receive(self, tensor: torch.Tensor, by: int, tag: int) -> Any:
        """As `send`, in its place."""
        return self._begin(lambda: self._words.recv([tensor], by, tag))

    def wait(self, works: Iterable[Any]) -> None:
        """Until all of them are done."""
        for work in works:
            self._wait(lambda work=work: work)  # type: ignore[misc]

    def _broadcast(self, tensor: torch.Tensor, by: Any) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: by.broadcast([tensor], options))

    def _begin(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:
            self._is_over(error)

    def _wait(self, collective: Callable[[], Any]) -> None:
        try:
            collective().wait()
        except RuntimeError as error:
            self._is_over(error)

    def _is_over(self, error: RuntimeError) -> None:
        time.sleep(_WATCH_S)  # the watch ends this process, and says whom it lost
        raise UnreachableError(
            f"group rank {self.rank}: the {self.size} processes of this worker lost each other: {first_line(error)}"
        ) from None


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
