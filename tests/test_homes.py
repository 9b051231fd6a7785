"""How many files name a capability outside of its home. A bound only ever goes down: a capability should be named in
its own files and at one seam.

A file names a capability if an identifier of its code has one of the words. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from paramserver.tests.code_lines import PRODUCT, ROOT

# The words of each capability, its home, and how many other files may name it.
HOMES = {
    "regions": (r"regions?|upstream|relays?|above|elsewhere|num_behind", ("relay/*", "*/regions.py"), 16),
    "fragments": (r"fragments?", ("ps/policies/averaging/*",), 12),
    "delayed update": (r"delayed|delayed_update", ("worker/strategies/delayed_update.py", "*/delayed.py"), 11),
    "all-reduce peers": (r"has_peers", ("worker/strategies/*", "ps/policies/allreduce.py"), 7),
    "evaluation": (r"evaluat(e|es|ed|or|ors|ion|ions)", ("worker/training/evaluation.py", "*/evaluator.py"), 25),
    "moving average": (r"polyak", (), 8),
}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


@cache
def words_by_file() -> dict[Path, frozenset[str]]:
    """The words of the identifiers of each file of the product: `num_behind` has itself and its two words."""
    found = {}
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            names = {} if "_pb2" in path.name else set(identifiers(ast.parse(path.read_text(encoding="utf-8"))))
            plain = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_") for name in names}
            found[path.relative_to(ROOT)] = frozenset(plain | {word for name in plain for word in name.split("_")})
    return found


@pytest.mark.parametrize("capability", HOMES)
def test_a_capability_is_named_in_few_files_outside_of_its_home(capability: str) -> None:
    words, home, most = HOMES[capability]
    naming = {path for path, found in words_by_file().items() if any(re.fullmatch(words, word) for word in found)}
    abroad = sorted(str(path) for path in naming if not any(path.match(pattern) for pattern in home))
    assert len(abroad) <= most, f"{len(abroad)} files: {abroad}"
