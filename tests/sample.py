"""Samples of tests, drawn from a seed."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable
from pathlib import Path

SEPARATORS = {"test": "[", "file": "::"}  # what ends a group's name in the name of a case


def commit() -> str:
    """The hash of the commit that is checked out, or a constant where there is none."""
    argv = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip() or "no-commit"


def draw(names: Iterable[str], each: str, seed: str) -> set[str]:
    """One name of each test or file; the draw depends on the seed and the group's names only."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(name.partition(SEPARATORS[each])[0], []).append(name)
    return {random.Random(f"{seed} {group}").choice(members) for group, members in groups.items()}
