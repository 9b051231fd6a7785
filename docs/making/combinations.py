"""Writes docs/combinations.md from the table: python -m paramserver.docs.making.combinations."""

from __future__ import annotations

import re
from pathlib import Path

from paramserver.common.combinations import REFUSALS

PAGE = Path(__file__).parents[1] / "combinations.md"
_HEAD = """# What goes together

Every option goes with every other, except for the pairs below. `make combinations SEED=1` tries the others: it draws a
covering array of modes, data loops, optimizers, codecs, faults and so on, runs each row with real processes, and judges
it by a second implementation of the training in plain torch and by the batches that the script itself noted.

A refused pair ends with exit code 2 before anything starts, or at the call of the script that makes it. This page is
made from the table in `common/combinations.py`.

| this | with this | is refused, because | instead |
|---|---|---|---|
"""


def page() -> str:
    """Return the page."""
    rows = []
    for row in REFUSALS:
        why = row.why.replace("{c.upstream_every}", "K")
        fix = re.sub(r"\{c\.(?:policy\.)?(\w+)\}", lambda found: found[1].upper(), row.fix)
        rows.append(f"| {row.first} | {row.second} | {why} | {fix.replace('{able}', row.able_modes)} |")
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
