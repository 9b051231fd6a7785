"""Reports of runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.common.errors import UsageError
from paramserver.common.reporting.compared import write_report
from paramserver.common.reporting.curve import Point
from paramserver.common.reporting.summary import Summary

CURVE = [Point(step=at, version=at, elapsed_s=at * 1.5, figures={"loss": 2.0 / at}) for at in (1, 2, 4)]
RUNS = [
    ("<sync>", Summary(mode="sync", wall_s=6.0, final={"loss": 0.5}, curve=CURVE)),
    ("async", Summary(mode="async")),
]


def test_a_report_says_all_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    write_report(str(tmp_path / "new"), "Two runs", RUNS, ["a note"])
    html, text = ((tmp_path / "new" / name).read_text() for name in ("report.html", "report.md"))
    assert "&lt;sync&gt;" in html and "<sync>" not in html and html.count("<polyline") == 1
    assert "http" not in html and "src=" not in html and "a note" in html
    assert "| 6.0 | 0.5000 |" in text and "| async | - |" in text


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(str(tmp_path / "file"), "Two runs", RUNS)
