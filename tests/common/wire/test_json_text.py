"""JSON of another process: whatever the bytes are, a value that every later line can use, or ValueError."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paramserver.common.wire.json_text import MAX_DEPTH, read_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_json_can_say_is_read(value: object) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[" * MAX_DEPTH + "[1]" + "]" * MAX_DEPTH, '"\\ud800"',
        '{"\\udfff": 1}', b'"\xed\xa0\x80"', b"\xff", "NaN", "[-Infinity]", "1e999", str(2**64), str(-(2**63) - 1),
        "9" * 10_000, "", "{", "\x00",
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_the_rest_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        read_json(text)


def test_the_reason_is_of_json_and_not_of_this_language() -> None:
    for text in ("9" * 10_000, str(2**64)):
        with pytest.raises(ValueError, match=f"a whole number of {len(text)} characters; at most 64 bits"):
            read_json(text)


def test_depth_is_of_the_nesting_and_not_of_the_number_of_lists() -> None:
    assert read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert len(read_json("[" + ",".join(["[]"] * 1000) + "]")) == 1000


def test_a_caller_that_can_use_them_gets_nan_and_large_numbers() -> None:
    assert math.isnan(read_json("NaN", nan=True))
    assert read_json("[Infinity,1e999]", nan=True) == [math.inf, math.inf]
    assert read_json(str(2**128), big=True) == 2**128
    for text in ("9" * 10_000, "[" * 100_000, '"\\ud800"'):
        with pytest.raises(ValueError):
            read_json(text, nan=True, big=True)


_DUST = st.text(alphabet='[]{}",:\\ud80eE+-.0123456789NaInfity \n', max_size=200)


@given(_DUST | st.binary(max_size=200))
@example('{"a": "\\ud83d\\ude00"}')
def test_what_is_read_can_be_written_and_encoded(text: str | bytes) -> None:
    try:
        value = read_json(text)
    except ValueError:
        return
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
