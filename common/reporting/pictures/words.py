"""Formats numbers, durations and sizes for people."""

from __future__ import annotations


def short_number(value: float) -> str:
    """Returns a loss or an accuracy with three decimals, or with an exponent if it is very small or large."""
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 10_000 else f"{value:.2e}"


def share(part: float) -> str:
    return f"{part:.0%}"


def duration(seconds: float) -> str:
    """`4.2 s`, `48 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(num_bytes: float) -> str:
    """Bytes in powers of ten: `812 B`, `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def about(seconds: float) -> str:
    """An estimate: `4 s`, `50 s`, `3 min`, `2 h 05 min`."""
    if seconds < 57.5:
        return f"{seconds:.0f} s" if seconds < 9.5 else f"{5 * round(seconds / 5)} s"
    return f"{max(1, round(seconds / 60))} min" if seconds < 3570 else duration(seconds)
