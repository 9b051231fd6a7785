"""Counts lines of code: those without blank lines, comments and docstrings."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "proto",
    "ps",
    "worker",
    "common",
    "launch",
    "simulate",
    "web",
    "drills",
    "catalog",
    "integrations",
    "serve",
    "relay",
)
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """How many lines of a Python source have code: neither comments alone nor docstrings."""
    texts = source.splitlines()
    lines = {at for at, text in enumerate(texts, 1) if text.strip() and not text.lstrip().startswith("#")}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))  # also those that look like comments
        elif isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines - docstrings)


def lines_by_package(*packages: str) -> dict[str, int]:
    """Lines of the Python files of each package, without generated files."""
    found: Counter[str] = Counter()
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            if "_pb2" not in path.name and "node_modules" not in path.parts:
                found[package] += code_lines(path.read_text(encoding="utf-8"))
    return dict(found)


if __name__ == "__main__":
    counts = lines_by_package(*(sys.argv[1:] or (*PRODUCT, "benchmarks", "tests")))
    for package, count in counts.items():
        print(f"{package:14} {count:6}")
    print(f"{'product':14} {sum(counts.get(package, 0) for package in PRODUCT):6}")
