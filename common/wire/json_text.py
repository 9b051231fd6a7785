"""JSON between processes and in files: `read_json` reads it strictly, `to_json` writes JSON that any parser reads.

Python's own parser raises RecursionError for deep nesting. It accepts NaN, 1e999, whole numbers of thousands of digits
and single surrogates, which fail later in `float()`, in `encode()` or in a file. `read_json` raises ValueError for all
of them.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 200  # nested lists and objects
_LEAST, _MOST, _MOST_DIGITS = -(2**63), 2**64 - 1, 20  # with a sign; int() has a limit of its own


def read_json(text: str | bytes | bytearray, *, nan: bool = False, big: bool = False) -> Any:
    """Return the value in `text`.

    Raises ValueError with the reason if `text` is not JSON, nests deeper than MAX_DEPTH, or has characters that UTF-8
    cannot encode. Numbers that are not finite need `nan`, and whole numbers of more than 64 bits need `big`.
    """
    read = text if isinstance(text, str) else text.decode()
    finite = None if nan else _finite
    try:
        value = json.loads(read, parse_int=None if big else _whole, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError(f"nests deeper than {MAX_DEPTH} levels") from None
    if read.count("[") + read.count("{") > MAX_DEPTH:
        _check_depth(value)
    if not read.isascii() or "\\u" in read:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, by `json.dumps` with these `options`.

    A number that is not finite becomes null. JSON has no NaN and no Infinity, so a strict parser would refuse the text.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    raise ValueError(f"nests deeper than {MAX_DEPTH} levels")


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS or not _LEAST <= (value := int(text)) <= _MOST:
        raise ValueError(f"a whole number of {len(text)} characters; at most 64 bits are possible")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value
