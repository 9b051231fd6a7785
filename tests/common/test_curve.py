"""When it is evaluated, which evaluation was the best, and what is enough."""

from __future__ import annotations

import pytest

from paramserver.common.config.conditions import Condition, Every, condition, every
from paramserver.common.reporting.curve import Curve, Point, is_up, text_of
from paramserver.common.reporting.summary import Summary


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


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1.5epochs", "3 days", "s", "9" * 400 + "s"])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(ValueError, match="no interval"):
        every(text)


def test_conditions() -> None:
    assert condition("accuracy >= 0.98") == Condition("accuracy", ">=", 0.98)
    assert condition("loss<1e-2").holds({"loss": 0.009}) and not condition("loss<1e-2").holds({"accuracy": 0})
    assert condition("val/acc@5 >= 0.9") == Condition("val/acc@5", ">=", 0.9)
    for text in ("accuracy", "accuracy = 1", "accuracy >= high", ">= 1", "loss < nan", "loss >= -inf", "loss < 1e999"):
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
    worse = curve(3.0, 1.0, 1.0, 2.0, patience=2)
    assert worse.why_enough == "no better loss in 2 evaluations (run.patience), 1 at step 2"
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


@pytest.mark.parametrize(
    ("up", "names"),
    [
        (True, "accuracy answer_accuracy val/acc top-1.acc lower_f1 maestro_f1 semseg_iou reward AUC acc@5"),
        (False, "loss eval_loss val/loss error perplexity nll ppl fid cer kl wer rmse bits_per_byte bpc train_loss"),
        (None, "torque answer total lossless flower maestro semseg mastery newer accuracy_loss val_accuracy_error x"),
    ],
)
def test_whole_words_of_a_name_say_what_is_better_and_two_that_differ_say_nothing(up: bool | None, names: str) -> None:
    assert {name: is_up(name) for name in names.split()} == dict.fromkeys(names.split(), up)
    assert {is_up(name, {name: way}) for name in names.split() for way in ("max", "min")} == {True, False}


def test_a_task_or_the_setting_states_what_is_better() -> None:
    for found in (curve(1.0, 2.0, 0.5, metric="power:max"), curve(1.0, 2.0, 0.5, metric="power", best_of="power:max")):
        assert found.best is not None and (found.best.step, found.metric, found.unclear()) == (2, "power", ("", ""))
        assert found.best.metrics == {"power": 2.0} and found.best.better == {"power": "max"}
        assert Point.model_validate(found.best.model_dump()) == found.best and found.best.named() == {"power:max": 2.0}
    assert curve(1.0, 2.0, 0.5, metric="accuracy:min").best.step == 3, "a statement counts more than the name"
    summary = Summary(mode="sync", final={"power:min": 1.0, "loss": 2.0}, curve=found.points)
    assert summary.final == {"power": 1.0, "loss": 2.0}
    assert (summary.is_up("power"), summary.is_up("loss"), summary.is_up("other")) == (False, False, None)
    assert Summary.model_validate_json(summary.text()).is_up("power") is False


def test_without_a_direction_nothing_is_the_best_and_nothing_ends_the_run() -> None:
    found = curve(1.0, 2.0, 0.5, metric="torque", patience=1)
    assert (found.best, found.why_enough) == (None, "")
    why, fix = found.unclear()
    assert "is more or less torque better?" in why and "torque:max" in fix
    assert Curve().unclear() == ("", "")
    both = Curve()
    both.add(Point(step=1, version=1, metrics={"torque": 3.0, "ppl": 5.0}))
    assert both.metric == "ppl", "the first whose direction is known decides"


def test_no_infinite_value_is_the_best() -> None:
    inf = float("inf")
    assert curve(0.5, inf, 0.4, metric="accuracy").best.step == 1 and curve(-inf, 1.0).best.step == 2
