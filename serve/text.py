"""Turns tokens into text piece by piece, without incomplete characters and without stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no whole character
_MOST_HALVES = 3  # of a character that is not complete: it lacks at least one of four bytes


class TextPieces:
    """The text of one reply. `decode` returns the text of tokens. Each text in `stop` ends the reply."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._begin = 0  # tokens before it are decoded no more
        self._whole = 0  # the text of the tokens before it has been read to its end
        self._num_read = 0  # characters of the text of the tokens from `_begin` on
        self._pending = ""  # text that may be the start of a stop string
        self.is_stopped = False

    def push(self, token: int, is_last: bool = False) -> str:
        """Return the new text that no later token changes. A stop string sets `is_stopped`."""
        self._tokens.append(token)
        return self._without_stop(self._read(is_last), is_last)

    def rest(self) -> str:
        """Return the text that was held back, after the last token."""
        return "" if self.is_stopped else self._without_stop(self._read(is_last=True), is_last=True)

    def _read(self, is_last: bool) -> str:
        """Return the text after what has been read, up to characters that the next token may complete."""
        text = self._decode(self._tokens[self._begin :])
        num_halves = 0 if is_last else min(len(text) - len(text.rstrip(_HALF)), _MOST_HALVES)
        new = text[self._num_read : len(text) - num_halves]
        self._num_read += len(new)
        if new and not num_halves:
            # A decoder may treat the first token of a text differently, so the tokens before are decoded too.
            self._begin, self._whole = self._whole, len(self._tokens)
            self._num_read = len(self._decode(self._tokens[self._begin :]))
        return new

    def _without_stop(self, new: str, is_last: bool) -> str:
        text = self._pending + new
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.is_stopped, self._pending = True, ""
            return text[: min(ends)]
        num_pending = 0 if is_last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - num_pending :]
        return text[: len(text) - num_pending]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the start of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)
