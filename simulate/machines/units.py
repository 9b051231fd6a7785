"""Times, bandwidths and named numbers, read from text with units."""

from __future__ import annotations

import math
import re

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
    down, *up = [_bytes_per_s(flag, item) for item in _DOWN_UP.split(text.strip(), maxsplit=1)]
    return down, up[0] if up else down


def _bytes_per_s(flag: str, text: str) -> float:
    if text.strip().lower() in ("none", "inf"):
        return math.inf
    example = "100mbit, 12.5MB/s, or 500mbit/110mbit for down and up; b is a bit, B a byte"
    return _quantity(flag, text, _BANDWIDTHS, "a bandwidth", example)


def _quantity(flag: str, text: str, units: dict[str, float], noun: str, example: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    unit = _unit(found[2], units) if found else ""
    try:
        value = float(found[1]) * units[unit] if found else math.nan
    except (KeyError, ValueError):
        value = math.nan
    is_positive = value > 0 or (value == 0 and units is _SECONDS)
    if not math.isfinite(value) or not is_positive:
        known = ", ".join(units if units is _SECONDS else ("kbit", "mbit", "gbit", "kB/s", "MB/s", "GB/s"))
        raise UsageError(f"flag {flag}: '{text}' is not {noun}: a positive number with {known}", fix=f"e.g. {example}")
    return value


def _unit(text: str, units: dict[str, float]) -> str:
    """Returns the unit as it is in `units`. Case has a meaning only where b stands for a bit and B for a byte."""
    is_byte = "B" in text and "bit" not in text.lower()
    return next((unit for unit in units if unit.lower() == text.lower() and ("B" in unit) == is_byte), "")


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
