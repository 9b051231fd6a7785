"""Text of tokens, piece by piece: the pieces together are the text, up to the first stop string."""

from __future__ import annotations

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


@pytest.mark.parametrize("tokens", [[0xE2, 0x82], [0xFF] * 6, [0xF0, 0x9F, 0x98, 65]])
def test_bytes_that_are_no_character_do_not_hold_the_text_back(tokens: list[int]) -> None:
    pieces, _ = pieces_of(tokens)
    assert "".join(pieces) == decode(tokens)
