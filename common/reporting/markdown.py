"""Markdown in which strings of users are text: no markup, no HTML, no mathematics, no new line. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import plain

# `<` opens a tag only before a letter, `/`, `!` or `?`; `_` within a word is text.
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<!\w)_|_(?!\w)")
_BLOCK = re.compile(r"^(?:#+(?!\S)|>|[+-](?!\S)|[-=]{2,}$|\d+(?=[.)](?:\s|$)))")  # at the beginning of a line


def text(words: str) -> str:
    """Returns a string as text of one line."""
    return _BLOCK.sub(_escaped, _cell(words))


def _cell(words: str) -> str:
    return _SPECIAL.sub(_escaped, plain(words).strip())


def _escaped(found: re.Match[str]) -> str:
    if found[0].isdigit():
        return f"{found[0]}\\"  # `1. x` begins a list, `1\\. x` does not
    return "".join(f"\\{letter}" for letter in found[0])


def heading(level: int, words: str) -> list[str]:
    return ["", f"{'#' * level} {text(words)}"]


def items(sentences: Iterable[str]) -> list[str]:
    return ["", *(f"- {text(sentence)}" for sentence in sentences)]


def image(words: str, file: str) -> list[str]:
    """`file`: a name of letters, digits, `-` and `.`."""
    return ["", f"![{text(words)}]({file})"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(_cell, cells))} |"

    return ["", row(head), f"| {' | '.join(['---'] * len(head))} |", *map(row, rows)]
