"""Reports of runs side by side."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paramserver.common.errors import OutputError
from paramserver.common.reporting.compared import prepare_report, write_report
from paramserver.common.reporting.curve import Point
from paramserver.common.reporting.findings import findings, target_of
from paramserver.common.reporting.summary import Summary, WorkerSummary

CURVE = [Point(step=at, version=at, elapsed_s=at * 1.5, figures={"loss": 2.0 / at}) for at in (1, 2, 4)]
RUNS = [
    ("<sync>", Summary(mode="sync", wall_s=6.0, final={"loss": 0.5}, curve=CURVE)),
    ("async", Summary(mode="async")),
]


def test_a_report_says_all_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    write_report(str(tmp_path / "new"), "Two runs", RUNS, ["a note"])
    html, text = ((tmp_path / "new" / name).read_text() for name in ("report.html", "report.md"))
    assert "&lt;sync&gt;" in html and "<sync>" not in html and html.count("<polyline") == 2, (
        "over seconds and over steps"
    )
    assert "http" not in html and "src=" not in html and "a note" in html
    assert "| 6.0 | 4 | 0.5000 |" in text and "| async | - |" in text


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_report(str(tmp_path / "file"), "Two runs", RUNS)


def run(accuracy: float, wall_s: float, curve: dict[int, float] | None = None, sent: int = 0) -> Summary:
    points = [
        Point(step=step, version=step, elapsed_s=step / 10, figures={"accuracy": of})
        for step, of in (curve or {}).items()
    ]
    workers = [WorkerSummary(rank=0, compute_s=1.0, bytes_sent=sent)]
    return Summary(mode="any", wall_s=wall_s, final={"accuracy": accuracy}, curve=points, workers=workers)


def test_what_is_best_is_said_with_what_the_others_have() -> None:
    told = findings([("a", run(0.9, 4.0, {10: 0.5, 20: 0.9}, 1000)), ("b", run(0.8, 2.0, {10: 0.6, 20: 0.8}, 4000))])
    assert told == [
        "Accuracy at the end: a is best with 0.900; b 0.800.",
        "Seconds to accuracy 0.800, which every run reached: no difference beyond the spread; a 2.0 s, b 2.0 s.",
        "Seconds in all: b is best with 2.0 s; a 4.0 s.",
        "Traffic: least in a, 1.0 kB; most in b, 4.0 kB, 4.0 times as much.",
    ]


def test_ranges_that_overlap_are_no_difference() -> None:
    """Two seeds each: c is beyond the spread of a, b is not."""
    seeds = {"a": (0.90, 0.96), "b": (0.88, 0.91), "c": (0.70, 0.89)}
    told = findings([(name, run(value, 1.0)) for name, values in seeds.items() for value in values])
    assert told == [
        "Accuracy at the end: a is best (not beyond the spread of b) with 0.930 (0.900 to 0.960); "
        "b 0.895 (0.880 to 0.910), c 0.795 (0.700 to 0.890).",
        "Seconds in all: no difference beyond the spread; a 1.0 s, b 1.0 s, c 1.0 s.",
    ]


@pytest.mark.parametrize("runs", [[], [("a", run(0.5, 1.0))], [("a", run(0.5, 1.0)), ("a", run(0.6, 1.0))]])
def test_one_way_of_training_is_compared_with_nothing(runs: list[tuple[str, Summary]]) -> None:
    assert findings(runs) == []


def test_who_has_no_figures_is_compared_by_time() -> None:
    told = findings([("a", run(0.5, 1.0)), ("b", Summary(mode="b", wall_s=2.0))])
    assert told == ["Seconds in all: a is best with 1.0 s; b 2.0 s."]


def test_who_diverged_is_named_and_not_ranked() -> None:
    """Its value is no number, and the best that it had on its way counts."""
    curve = {10: 0.5, 20: 0.7, 30: math.nan}
    told = findings([("a", run(0.8, 1.0, {10: 0.6, 20: 0.8})), ("b", run(0.9, 1.0)), ("c", run(math.nan, 1.0, curve))])
    assert told[:2] == [
        "Accuracy at the end: b is best with 0.900; a 0.800.",
        "c diverged: accuracy at the end is not finite.",
    ]
    both = [("a", run(0.8, 1.0, {10: 0.6, 20: 0.8})), ("c", run(math.nan, 1.0, curve))]
    assert target_of(both) == ("accuracy", 0.7)
    assert findings(both)[0] == "c diverged: accuracy at the end is not finite."


def test_a_report_is_tried_before_anything_is_trained_and_the_old_one_stays(tmp_path: Path) -> None:
    write_report(str(tmp_path / "new"), "Before", RUNS)
    before = {path: path.read_text() for path in (tmp_path / "new").iterdir()}
    prepare_report(str(tmp_path / "new"))
    assert {path: path.read_text() for path in (tmp_path / "new").iterdir()} == before
    prepare_report(str(tmp_path / "other" / "place"))
    assert list((tmp_path / "other" / "place").iterdir()) == []
