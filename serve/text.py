"""Turns tokens into text piece by piece, without incomplete characters and without stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no whole character
_MOST_PENDING = 4  # tokens of one character: bytes, or a byte-level vocabulary


class TextPieces:
    """The text of one reply. `decode` returns the text of tokens. Each text in `stop` ends the reply."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._begin = 0  # tokens before it are only context
        self._read = 0  # tokens before it are in the text
        self._pending = ""  # text that may be the start of a stop string
        self.is_stopped = False

    def push(self, token: int, is_last: bool = False) -> str:
        """Return the new text that no later token changes. A stop string sets `is_stopped`."""
        self._tokens.append(token)
        # A decoder may treat the first token of a text differently, so the tokens before are decoded too.
        before = self._decode(self._tokens[self._begin : self._read])
        text = self._decode(self._tokens[self._begin :])
        is_half = text.endswith(_HALF) and len(self._tokens) - self._read < _MOST_PENDING
        if is_half and not is_last:
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return self._without_stop(text[len(before) :], is_last)

    def _without_stop(self, new: str, is_last: bool) -> str:
        text = self._pending + new
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.is_stopped, self._pending = True, ""
            return text[: min(ends)]
        num_pending = 0 if is_last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - num_pending :]
        return text[: len(text) - num_pending]

    def rest(self) -> str:
        """Return the text that was held back, after the last token."""
        unread, self._read = self._tokens[self._read :], len(self._tokens)
        pending, self._pending = self._pending, ""
        return pending + (self._decode(unread) if unread and not self.is_stopped else "")


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the start of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)
