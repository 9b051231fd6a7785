"""Times, bandwidths and named numbers, read from text with units."""

from __future__ import annotations

import math
import re

from ...common.errors import UsageError

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([+-]?[\d.]+(?:e[+-]?\d+)?)\s*([a-z/]*)", re.IGNORECASE)


def seconds(flag: str, text: str) -> float:
    """`40ms`, `1.5s`. Raises UsageError."""
    return _quantity(flag, text, _SECONDS, "a time", "40ms")


def bandwidth(flag: str, text: str) -> tuple[float, float]:
    """`100mbit` or `500mbit/110mbit`, down and up: (down, up) in bytes per second. Raises UsageError."""
    item, is_two, other = text.partition("/") if not text.lower().endswith("b/s") else (text, "", "")
    down = _bytes_per_s(flag, item)
    return down, _bytes_per_s(flag, other) if is_two else down


def _bytes_per_s(flag: str, text: str) -> float:
    if text.strip().lower() in ("none", "inf"):
        return math.inf
    units = {unit: value / 8 for unit, value in _BITS.items()} | _BYTES
    return _quantity(flag, text, units, "a bandwidth", "100mbit, 12.5MB/s, or 500mbit/110mbit for down and up")


def _quantity(flag: str, text: str, units: dict[str, float], noun: str, example: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    try:
        value = float(found[1]) * units[unit] if found else math.nan
    except (KeyError, ValueError):
        value = math.nan
    is_positive = value > 0 or (value == 0 and units is _SECONDS)
    if not math.isfinite(value) or not is_positive:
        known = ", ".join(units)
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
