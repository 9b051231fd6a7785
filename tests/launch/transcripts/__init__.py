"""Transcripts of the supervisor: `event -> decisions`, line by line, below the name of the case."""

from __future__ import annotations

from pathlib import Path


def transcripts(name: str) -> dict[str, str]:
    """Returns the cases of a file by name: indented lines below an unindented one; # begins a comment."""
    cases: dict[str, str] = {}
    title = ""
    for line in (Path(__file__).parent / name).read_text().splitlines():
        if line.startswith(" "):
            cases[title] = f"{cases.get(title, '')}{line}\n"
        elif line and not line.startswith("#"):
            title = line
    return cases
