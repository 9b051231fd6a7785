"""Times, bandwidths and named numbers, read from text with units."""

from __future__ import annotations

import math
import re
from contextlib import suppress

from ...common.errors import UsageError

_SIZES = {"k": 1e3, "m": 1e6, "g": 1e9}
# Bytes per second of a unit; the letter decides: b is a bit, B a byte.
_BANDWIDTHS = {f"{size}{unit}": value / 8 for size, value in _SIZES.items() for unit in ("bit", "bit/s", "b/s", "bps")}
_BANDWIDTHS |= {f"{size}{unit}": value for size, value in _SIZES.items() for unit in ("B/s", "Bps")}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)", re.IGNORECASE)
_DOWN_UP = re.compile(r"/(?!s(?:/|$))")  # not the one of MB/s


def seconds(flag: str, text: str) -> float:
    """`40ms`, `1.5s`. Raises UsageError."""
    return _quantity(flag, text, _SECONDS, "a time", "40ms")


def bandwidth(flag: str, text: str) -> tuple[float, float]:
    """`100mbit` or `12.5MB/s/5MB/s`, down and up: (down, up) in bytes per second. Raises UsageError."""
    example = "100mbit, 12.5MB/s, or 500mbit/110mbit for down and up; b is a bit, B a byte"
    found = []
    for item in _DOWN_UP.split(text.strip(), maxsplit=1):
        is_unlimited = item.strip().lower() in ("none", "inf")
        found.append(math.inf if is_unlimited else _quantity(flag, item, _BANDWIDTHS, "a bandwidth", example))
    return found[0], found[-1]


def _quantity(flag: str, text: str, units: dict[str, float], noun: str, example: str) -> float:
    value = math.nan
    if found := _QUANTITY.fullmatch(text.strip()):
        # Case has a meaning only where b stands for a bit and B for a byte.
        name, is_byte = found[2].lower(), "B" in found[2] and "bit" not in found[2].lower()
        scale = next((units[unit] for unit in units if unit.lower() == name and ("B" in unit) == is_byte), math.nan)
        with suppress(ValueError):
            value = float(found[1]) * scale
    is_positive = value > 0 or (value == 0 and units is _SECONDS)
    if not math.isfinite(value) or not is_positive:
        known = ", ".join(units if units is _SECONDS else ("kbit", "mbit", "gbit", "kB/s", "MB/s", "GB/s"))
        raise UsageError(f"flag {flag}: '{text}' is not {noun}: a positive number with {known}", fix=f"e.g. {example}")
    return value


def named(flag: str, text: str, names: tuple[str, ...]) -> dict[str, str]:
    """`p=0.1,x=5` with exactly these names. Raises UsageError."""
    parts = text.replace(" ", "").split(",")
    found = dict(part.partition("=")[::2] for part in parts)
    if set(found) != set(names) or len(parts) != len(names) or not all(found.values()):
        form = ",".join(f"{name}=..." for name in names)
        raise UsageError(f"flag {flag}: '{text}' is not of the form {form}")
    return found


def number(flag: str, text: str, least: float, most: float = math.inf) -> float:
    """A number in [least, most]. Raises UsageError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or math.isinf(value):
        limit = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise UsageError(f"flag {flag}: '{text}' is not a number {limit}")
    return value
