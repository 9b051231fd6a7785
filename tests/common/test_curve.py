"""When it is evaluated, which evaluation was the best, and what is enough."""

from __future__ import annotations

import pytest

from paramserver.common.config.conditions import Condition, Every, condition, every
from paramserver.common.reporting.curve import Curve, Point, text_of


def curve(*values: float, metric: str = "loss", **options: object) -> Curve:
    found = Curve(**options)  # type: ignore[arg-type]
    for step, value in enumerate(values, start=1):
        found.add(Point(step=step, version=step, metrics={metric: value}))
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [("100", Every(100, "steps")), ("100steps", Every(100, "steps")), ("1 step", Every(1, "steps")),
     ("30s", Every(30, "seconds")), ("0.5s", Every(0.5, "seconds")), ("1epoch", Every(1, "epochs")),
     ("2epochs", Every(2, "epochs"))],
)  # fmt: skip
def test_intervals(text: str, found: Every) -> None:
    assert every(text) == found


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1.5epochs", "3 days", "s"])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(ValueError, match="no interval"):
        every(text)


def test_conditions() -> None:
    assert condition("accuracy >= 0.98") == Condition("accuracy", ">=", 0.98)
    assert condition("loss<1e-2").holds({"loss": 0.009}) and not condition("loss<1e-2").holds({"accuracy": 0})
    for text in ("accuracy", "accuracy = 1", "accuracy >= high", ">= 1"):
        with pytest.raises(ValueError, match="no condition"):
            condition(text)


def test_the_best_is_accuracy_up_or_loss_down_or_what_is_asked_for() -> None:
    assert curve(3.0, 1.0, 2.0).best.step == 2
    assert curve(0.3, 0.9, 0.9, metric="accuracy").best.step == 2
    both = Curve(best_of="loss")
    for step, (loss, accuracy) in enumerate([(1.0, 0.5), (0.5, 0.4), (float("nan"), 0.9)]):
        both.add(Point(step=step, version=step, metrics={"loss": loss, "accuracy": accuracy}))
    assert both.best.step == 1


def test_enough() -> None:
    assert curve(3.0, 1.0, stop_when="loss < 0.5").why_enough == ""
    assert curve(3.0, 0.4, stop_when="loss < 0.5").why_enough == "loss < 0.5 (run.stop_when): 0.4 at step 2"
    assert curve(3.0, 1.0, 1.0, patience=2).why_enough == ""
    assert (
        curve(3.0, 1.0, 1.0, 2.0, patience=2).why_enough
        == "no better loss in 2 evaluations (run.patience), 1 at step 2"
    )
    assert curve(1.0, stop_when="f1 > 1").lacks() == "f1: the evaluation gave loss"


def test_it_survives_a_snapshot_and_an_older_one_has_none() -> None:
    item, other = curve(3.0, 1.0, 2.0), Curve()
    other.restore(item.saved())
    assert (other.points, other.best, other.saved()) == (item.points, item.best, item.saved())
    other.restore(None)
    assert other.points == []


def test_files() -> None:
    points = curve(3.0, 1.0).points
    assert text_of(points, "c.csv").splitlines()[:2] == ["step,version,elapsed_s,loss", "1,1,0.0,3.0"]
    assert text_of(points, "c.jsonl").count("\n") == 2
