"""The code blocks of the pages, found by sybil, and what must hold of each.

    python      run, in the order of the page, in a process of its own; what it needs beforehand is in an
                `<!--- invisible-code-block: python` comment
    yaml        read as a configuration, or as the hosts of a lab
    sh          its commands are parsed by the programs' own command lines, and their settings checked
    text        is none
    (indented)  is sh

A comment before a block says more. `<!-- run -->`: run by bash, with those before it on the page. `<!-- not run: why
-->`: it needs what is not here, so commands of others in it are not looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sybil import Document, Region, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "yaml", "sh", "text")
_FENCES = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))
_INDENTED = re.compile(r"(?:\A|\n[ \t]*\n)((?: {4}[^\n]*\n)+)")
_MARK = re.compile(r"<!-- (?P<what>run|not run: .+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    page: str  # from the root
    line: int
    language: str
    text: str
    mark: str = ""  # "run", "not run: why"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _regions(document: Document) -> Iterable[Region]:
    """Every block of a page, for sybil, with what stands before it as its mark."""
    fences = list(_FENCES(document))
    found = [
        (fence.start, fence.end, fence.lexemes["language"].strip(), str(fence.lexemes["source"])) for fence in fences
    ]
    for match in _INDENTED.finditer(document.text):
        start, end = match.span(1)
        if not any(fence.start <= start < fence.end for fence in fences) and "<!---" not in match[1]:
            text = "".join(line[4:] for line in match[1].splitlines(keepends=True))
            if not _is_in_list(document.text, start) and not _is_in_comment(document.text, start):
                found.append((start, end, "sh", text))
    for start, end, language, text in sorted(found):
        mark = _MARK.search(document.text[:start])
        yield Region(start, end, parsed=(language, text, mark["what"] if mark else ""), evaluator=lambda example: None)


def _is_in_list(text: str, start: int) -> bool:
    """Indented text after an item of a list goes on with that."""
    before = [line for line in text[:start].splitlines() if line.strip()]
    return bool(before) and re.match(r"\s*(?:[-*]|\d+\.)\s|\s", before[-1]) is not None


def _is_in_comment(text: str, start: int) -> bool:
    return text.rfind("<!--", 0, start) > text.rfind("-->", 0, start)


def blocks(page: Path) -> list[Block]:
    """All of a page."""
    document = Sybil([_regions]).parse(page)
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    return [Block(name, example.line, *example.parsed) for example in document.examples()]


def run_python(page: Path) -> None:
    """Run the page's python blocks, the invisible ones too, but not those that say that they are not to be run."""
    document = Sybil([PythonCodeBlockParser()]).parse(page)
    for example in document.examples():
        found: Any = _MARK.search(document.text[: example.start])
        if found is None:
            print(f"{page.name}:{example.line}", flush=True)
            example.evaluate()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run_python(Path(name))
