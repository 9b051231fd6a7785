"""Reports of runs side by side; the HTML in a real browser, as a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.common.config.conditions import condition
from paramserver.common.reporting.comparison import compare, comparison_cells, findings, target_of
from paramserver.common.reporting.curve import TRAINED, Point, add_trained
from paramserver.common.reporting.pictures import band
from paramserver.common.reporting.summary import Cost, Status, Summary, WorkerStatus
from paramserver.tests.web.conftest import Tab
from paramserver.web.stored import bundled, prepare_report, write_report

CURVE = [Point(step=at, version=at, elapsed_s=at * 1.5, metrics={"loss": 2.0 / at}) for at in (1, 2, 4)]
RUNS = [
    ("<sync>", Summary(mode="sync", wall_s=6.0, final={"loss": 0.5}, curve=CURVE)),
    ("async", Summary(mode="async")),
]


def test_a_report_says_all_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    write_report(str(tmp_path / "new"), "Two runs", RUNS, ["a note"])
    html, text = ((tmp_path / "new" / name).read_text() for name in ("report.html", "report.md"))
    assert "<sync>" not in html and "a note" in html
    # SVG has its name space, uPlot its address in a comment; nothing is loaded.
    assert not re.search(r"""<link|<img|<script[^>]+src|import ['"(]|url\(""", html)
    assert "| 6.0 | 4 | 0.5000 |" in text and "| async | - |" in text


def run(accuracy: float, wall_s: float, curve: dict[int, float] | None = None, sent: int = 0) -> Summary:
    points = [
        Point(step=step, version=step, elapsed_s=step / 10, metrics={"accuracy": of})
        for step, of in (curve or {}).items()
    ]
    workers = [WorkerStatus(rank=0, compute_s=1.0, bytes_sent=sent)]
    return Summary(mode="any", wall_s=wall_s, final={"accuracy": accuracy}, curve=points, workers=workers)


def test_what_is_best_is_said_with_what_the_others_have() -> None:
    sentences = findings(
        [("a", run(0.9, 4.0, {10: 0.5, 20: 0.9}, 1000)), ("b", run(0.8, 2.0, {10: 0.6, 20: 0.8}, 4000))]
    )
    assert sentences == [
        "Accuracy at the end: a is best with 0.900; b 0.800.",
        "Seconds in all: b is best with 2.0 s; a 4.0 s.",
        "Traffic: least in a, 1.0 kB; most in b, 4.0 kB, 4.0 times as much.",
    ]


def test_ranges_that_overlap_are_no_difference() -> None:
    """Two seeds each: c is beyond the spread of a, b is not."""
    seeds = {"a": (0.90, 0.96), "b": (0.88, 0.91), "c": (0.70, 0.89)}
    sentences = findings([(name, run(value, 1.0)) for name, values in seeds.items() for value in values])
    assert sentences == [
        "Accuracy at the end: a is best (not beyond the spread of b) with 0.930 (0.900 to 0.960); "
        "b 0.895 (0.880 to 0.910), c 0.795 (0.700 to 0.890)."
    ]


@pytest.mark.parametrize("runs", [[], [("a", run(0.5, 1.0))], [("a", run(0.5, 1.0)), ("a", run(0.6, 1.0))]])
def test_one_way_of_training_is_compared_with_nothing(runs: list[tuple[str, Summary]]) -> None:
    assert findings(runs) == []


def test_who_has_no_metrics_is_compared_by_time() -> None:
    sentences = findings([("a", run(0.5, 1.0)), ("b", Summary(mode="b", wall_s=2.0))])
    assert sentences == ["b has no accuracy at the end, so it is not ranked."]
    bare = [(name, Summary(mode=name, wall_s=wall_s)) for name, wall_s in (("a", 1.0), ("b", 2.0))]
    assert findings(bare) == ["Seconds in all: a is best with 1.0 s; b 2.0 s."]


def test_who_diverged_is_named_and_not_ranked() -> None:
    """Its value is no number, and the best that it had on its way counts."""
    curve = {10: 0.5, 20: 0.7, 30: math.nan}
    sentences = findings(
        [("a", run(0.8, 1.0, {10: 0.6, 20: 0.8})), ("b", run(0.9, 1.0)), ("c", run(math.nan, 1.0, curve))]
    )
    assert sentences[:2] == [
        "Accuracy at the end: b is best with 0.900; a 0.800.",
        "c diverged: accuracy at the end is not finite.",
    ]
    both = [("a", run(0.8, 1.0, {10: 0.6, 20: 0.8})), ("c", run(math.nan, 1.0, curve))]
    assert target_of(both) == ("accuracy", ">=", 0.7)
    assert findings(both)[0] == "c diverged: accuracy at the end is not finite."


def test_a_report_is_tried_before_anything_is_trained_and_the_old_one_stays(tmp_path: Path) -> None:
    write_report(str(tmp_path / "new"), "Before", RUNS)
    before = {path: path.read_text() for path in (tmp_path / "new").iterdir()}
    prepare_report(str(tmp_path / "new"))
    assert {path: path.read_text() for path in (tmp_path / "new").iterdir()} == before
    prepare_report(str(tmp_path / "other" / "place"))
    assert list((tmp_path / "other" / "place").iterdir()) == []


def trained(losses: list[float]) -> list[Point]:
    points: list[Point] = []
    for at, loss in enumerate(losses, 1):
        worker = WorkerStatus(rank=0, loss=loss)
        add_trained(points, Status(step=10 * at, elapsed_s=at / 2, num_bytes=1000 * at, workers=[worker]))
    return points


def test_runs_that_were_not_evaluated_have_curves_of_their_training_loss(tmp_path: Path) -> None:
    runs = [(name, Summary(mode=name, wall_s=9.0, trained=trained(losses))) for name, losses in
            (("a", [2.0, 1.0, 0.5]), ("b", [2.0, 1.5, 1.0]))]  # fmt: skip
    write_report(str(tmp_path), "Two runs", runs)
    html, text = ((tmp_path / name).read_text() for name in ("report.html", "report.md"))
    assert "train_loss is drawn" in html and "| 1.5 | 30 | 0.5000 | 3.0 kB |" in text
    assert "Seconds to train_loss 1.000, which every run reached: a is best with 1.0 s; b 1.5 s." in text
    assert "s to train_loss <= 1" in text
    assert "trained" not in runs[0][1].model_dump()
    write_report(str(tmp_path), "Evaluated", [(name, run.model_copy(update={"curve": CURVE})) for name, run in runs])
    assert "train_loss is drawn" not in (tmp_path / "report.html").read_text(), "of all there is something better"


def test_a_long_run_and_one_that_went_back_keep_what_counts() -> None:
    points = trained([1.0] * 5000)
    assert 1000 <= len(points) < 2000 and points[-1].step > 49_000
    add_trained(points, Status(step=100, workers=[WorkerStatus(rank=0, loss=0.5)]))
    steps = [point.step for point in points]
    assert points[-1].metrics[TRAINED] == 0.5 and steps == sorted(steps)
    num = len(points)
    add_trained(points, Status(step=110))
    assert len(points) == num, "no loss, no point"


def test_a_target_of_ones_own_says_when_each_came_to_it_and_who_did_not() -> None:
    runs = [("a", run(0.9, 4.0, {10: 0.5, 20: 0.9})), ("b", run(0.8, 2.0, {10: 0.6, 20: 0.8}))]
    head, rows = comparison_cells(runs, condition("accuracy>=0.85"))
    assert [row[head.index("s to accuracy >= 0.85")] for row in rows] == ["2.0", "-"]
    sentences = findings(runs, condition("accuracy>=0.85"))
    assert {"Only a reached accuracy >= 0.85, after 2.0 s.", "b did not reach accuracy >= 0.85."} <= set(sentences)
    sentences = findings(runs, condition("accuracy >= 0.6"))
    assert "Seconds to accuracy >= 0.6: b is best with 1.0 s; a 2.0 s." in sentences


def test_one_worker_with_the_batch_of_four_takes_as_many_steps_as_four() -> None:
    """Both take 10 steps of 128 samples a second, once loading is over, which takes one 5 s and the others 1 s."""

    def of(mode: str, num_workers: int, load_s: float) -> Summary:
        batch = 128 // num_workers
        workers = [
            WorkerStatus(rank=rank, training_steps=300, contributions=300, samples=300 * batch)
            for rank in range(num_workers)
        ]
        steady = {"steady_s": 29.9, "steady_samples": 299 * 128, "steady_steps": 299 * num_workers}
        return Summary(mode=mode, wall_s=load_s + 29.9, workers=workers, **steady)

    runs = [("single", of("single", 1, 5.0)), ("sync", of("sync", 4, 1.0))]
    head, rows = comparison_cells(runs)
    assert [row[head.index("samples/s")] for row in rows] == ["1,280", "1,280"]
    assert [row[head.index("steps/s")] for row in rows] == ["10.0", "10.0"]
    assert not [line for line in findings(runs) if "a second" in line], "there is no difference"


def test_why_the_fastest_was_is_what_it_did_less_of() -> None:
    def of(mode: str, wall_s: float, wait_s: float, sent: int) -> Summary:
        worker = WorkerStatus(rank=0, training_steps=100, compute_s=1.0, wait_s=wait_s, bytes_sent=sent)
        cost = Cost(currency="USD", total=wall_s, waiting=0.0)
        return Summary(mode=mode, wall_s=wall_s, workers=[worker], cost=cost)

    sentences = findings([("sync", of("sync", 4.0, 1.0, 9000)), ("async", of("async", 2.0, 0.0, 9000))])
    why = "0% waiting instead of 50%, 50.0 steps of the union batch a second instead of 25.0"
    assert f"async was faster than sync with {why}." in sentences
    assert "Cost, USD: least in async, 2.00; most in sync, 4.00, 2.0 times as much." in sentences
    sentences = findings([("a", of("a", 2.0, 0.0, 9000)), ("b", of("b", 2.0, 0.0, 100))])
    assert not [text for text in sentences if "faster" in text], "neither was"


def test_seeds_have_a_mean_a_range_and_a_band() -> None:
    runs = [("a", run(value, 1.0, {10: value - 0.2, 20: value})) for value in (0.8, 0.9)] + [("b", run(0.7, 1.0))]
    head, rows = comparison_cells(runs)
    assert [row[0] for row in rows] == ["a", "a", "b", "a: mean of 2"]
    assert rows[-1][head.index("accuracy")] == "0.850 (0.800 to 0.900)"
    first, second = [(0.0, 0.0), (2.0, 2.0)], [(1.0, 5.0), (3.0, 7.0)]
    assert band([first, second]) == [(1.0, 1.0, 5.0), (2.0, 2.0, 6.0)], "where both are"
    assert band([first]) == []


def test_the_report_is_the_comparison_of_the_dashboard(tab: Callable[..., Tab], tmp_path: Path) -> None:
    """As a file: the best first, seeds folded, curves over time, traffic in units; it asks for nothing."""
    sync, other = {10: 0.5, 20: 0.8}, {10: 0.6, 20: 0.95}
    runs = [("sync", run(0.8, 4.0, sync, 3_000_000)), ("async", run(0.95, 2.0, other, 1000)),
            ("sync", run(0.78, 4.5, sync, 3_000_000))]  # fmt: skip
    for _, item in runs:
        item.trained = trained([2.0, 1.0, 0.5])
    table = (["mode", "computing"], [["sync", "40%"]])
    picture = ("time.png", "where the time went", "s", [("computing", [(0.0, 0.5), (1.0, 0.6)])])
    differences = {"run.mode": ["sync", "async", "sync"], "run.seed": [0, 0, 1]}
    write_report(str(tmp_path), "Two ways </script>", runs, ["a note"], differences, extra=([table], [picture]))
    shown = tab(viewport={"width": 1280, "height": 900})
    shown.page.goto(f"file://{tmp_path}/report.html")
    rows = shown.page.locator("#results tbody tr")
    rows.nth(1).wait_for()
    assert [text.split(" ")[0] for text in rows.locator("th").all_text_contents()] == ["async", "sync"]
    assert "6.0 MB" not in rows.nth(1).text_content() and "3.0 MB" in rows.nth(1).text_content()
    assert rows.nth(0).locator("td.best").count() >= 2
    rows.nth(1).get_by_role("button").click()
    assert rows.locator("th").all_text_contents()[2:] == ["seed 0", "seed 1"]
    assert shown.page.locator("#findings li").first.text_content().startswith("Accuracy at the end: async is best")
    assert shown.page.locator("#comparison-charts .chart").count() == 2 and "40%" in shown.page.content()
    shown.page.locator("#x").select_option("bytes")
    shown.page.wait_for_function(
        "() => document.querySelector('[data-chart=loss]').getAttribute('aria-label').includes('from 1.00 kB to')"
    )
    assert shown.page.locator("#extra .chart canvas").count() == 1
    shown.page.set_viewport_size({"width": 320, "height": 800})
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 320


def test_a_module_comes_after_those_that_it_imports() -> None:
    code = bundled("report.js")
    assert "import {" not in code and "export " not in code
    assert (
        code.index("modules['text.js'] =") < code.index("modules['charts.js'] =") < code.index("modules['report.js']")
    )


def results(runs: list[tuple[str, Summary]], target: str | None = None) -> dict[str, dict[str, str]]:
    """The cells of each row by column; the best ends with `*`."""
    found = compare(runs, None if target is None else condition(target))
    labels = [column.label for column in found.columns]
    return {row.label: {label: cell.text + "*" * cell.is_best for label, cell in zip(labels, row.cells, strict=True)}
            for row in found.rows}  # fmt: skip


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_mode_that_diverged_is_best_in_nothing_and_is_last(lost: float | None, seeds: int) -> None:
    diverged = run(0.99, 0.5, {10: 0.7, 20: 0.99})
    diverged.final = {} if lost is None else {"accuracy": lost}
    first = [("c", run(0.99, 0.5, {10: 0.7, 20: 0.99}))] * (seeds - 1)
    runs = [*first, ("c", diverged), ("a", run(0.8, 1.0)), ("b", run(0.9, 2.0))]
    table = results(runs)
    assert [*table] == ["b", "a", "c"] and "*" not in "".join(table["c"].values())
    assert table["b"]["accuracy"] == "0.900*" and table["a"]["wall s"] == "1.0*"
    where = " in 1 of 2 runs" if seeds == 2 else ""
    why = "c has no accuracy at the end" if lost is None else "c diverged: accuracy at the end is not finite"
    sentences = findings(runs)
    assert any(text.startswith(f"{why}{where}") for text in sentences) and "c is best" not in " ".join(sentences)


def test_costs_of_two_currencies_are_apart() -> None:
    costs = [("a", "EUR"), ("a", "USD"), ("b", "USD")]
    runs = [(name, run(0.5, 3600.0).model_copy(update={"cost": Cost(currency=currency, total=2.0, waiting=0.0)}))
            for name, currency in costs]  # fmt: skip
    table = results(runs)
    assert (table["a"]["cost, EUR"], table["a"]["cost, USD"], table["b"]["cost, USD"]) == ("-", "-", "2.00 USD")
    assert not [text for text in findings(runs) if "Cost" in text]
    head, rows = comparison_cells(runs)
    assert [row[head.index("cost, EUR")] for row in rows] == ["2.00 EUR", "-", "-", "-"]


def test_nothing_is_said_where_values_are_written_alike() -> None:
    runs = [("a", run(0.9, 4.00, sent=100_000)), ("b", run(0.9, 4.01, sent=101_000))]
    assert findings(runs) == ["Traffic: least in a, 100 kB; most in b, 101 kB."]


def test_a_metric_of_unknown_direction_has_no_best_value() -> None:
    runs = [(name, Summary(mode=name, final={"torque": value})) for name, value in (("a", 1.0), ("b", 2.0))]
    assert [results(runs)[name]["torque"] for name in "ab"] == ["1.000", "2.000"] and findings(runs) == []
    stated = [(name, Summary(mode=name, final={"torque:max": of})) for name, of in (("a", 1.0), ("b", 2.0))]
    assert results(stated)["b"]["torque"] == "2.000*"
    assert findings(stated) == ["Torque at the end: b is best with 2.000; a 1.000."]


def test_throughput_has_one_definition_in_a_comparison() -> None:
    """Of two runs with 1,000 samples in 10 s each, one knows its steady part."""
    runs = [(name, Summary(mode=name, wall_s=10.0, steady_s=steady_s, steady_samples=900,
             workers=[WorkerStatus(rank=0, samples=1000)])) for name, steady_s in (("a", 0.5), ("b", 0.0))]  # fmt: skip
    assert {row["samples/s"] for row in results(runs).values()} == {"100"}
