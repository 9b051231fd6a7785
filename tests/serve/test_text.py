"""Text of tokens, piece by piece: the pieces together are the text, up to the first stop string."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.serve.text import TextPieces


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def pieces_of(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    found, texts = TextPieces(decode, stop), []
    for token in tokens:
        texts.append(found.push(token))
        if found.is_stopped:
            return texts, True
    return [*texts, found.rest()], False


@given(st.text())
def test_pieces_are_whole_characters_and_together_the_text(text: str) -> None:
    text = text.encode(errors="replace").decode()
    pieces, _ = pieces_of(list(text.encode()))
    assert "".join(pieces) == text and all("\N{REPLACEMENT CHARACTER}" not in piece or "\ufffd" in text
                                           for piece in pieces)  # fmt: skip


@given(st.text("ab"), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_piece_has_anything_of_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, is_stopped = pieces_of(list(text.encode()), tuple(stop))
    # The stop string that is complete first ends the reply; of those complete at once, the longest.
    ends = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    assert is_stopped == bool(ends)
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)


PARTS = [
    b"\xe2", b"\x82", b"\xac", b"\xe2\x82\xac", b"\xf0\x9f", b"\x98\x80a", b"a\xe2", b"\xff", b" b", b"\xed\xa0", b"",
]  # fmt: skip
DECODERS = {
    "replace": lambda data: data.decode(errors="replace"),
    "ignore": lambda data: data.decode(errors="ignore"),
    "each byte": lambda data: re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape")),
}


@pytest.mark.parametrize("name", DECODERS)
@given(tokens=st.lists(st.integers(0, len(PARTS) - 1), max_size=12))
def test_wrong_bytes_swallow_no_character(name: str, tokens: list[int]) -> None:
    """Tokens are whole characters, parts of them, and bytes that are none; pieces together are the decoded text."""
    pieces = TextPieces(lambda found: DECODERS[name](b"".join(PARTS[token] for token in found)))
    texts = [pieces.push(token) for token in tokens]
    assert "".join([*texts, pieces.rest()]) == DECODERS[name](b"".join(PARTS[token] for token in tokens))
