"""JSON that is written has no NaN and no Infinity, and what reads it back knows what null stood for."""

import json
import math

import pytest

from paramserver.common.reporting.curve import Point, text_of
from paramserver.common.reporting.history import HistoryFile
from paramserver.common.reporting.summary import Summary, WorkerStatus
from paramserver.common.wire.json_text import to_json

WRONG = (math.nan, math.inf, -math.inf)


def strictly(text):
    return json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} in {text}"))


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_that_are_not_finite_are_null(wrong):
    value = {"a": wrong, "b": [1.5, {"c": (wrong, "NaN")}], "d": None, "e": 1e308}
    assert strictly(to_json(value)) == {"a": None, "b": [1.5, {"c": [None, "NaN"]}], "d": None, "e": 1e308}


def test_a_summary_comes_back_with_what_was_lost():
    point = Point(step=1, version=1, metrics={"loss": math.nan, "accuracy": 0.5})
    summary = Summary(
        mode="sync", final={"loss": math.inf}, curve=[point], best=point, cosine=math.nan,
        workers=[WorkerStatus(rank=0, residual_norm=math.inf)],
    )  # fmt: skip
    again = Summary.model_validate(strictly(summary.text()))
    assert math.isnan(again.final["loss"])
    assert math.isnan(again.curve[0].metrics["loss"])
    assert again.curve[0].metrics["accuracy"] == 0.5
    assert again.workers[0].residual_norm is None
    assert strictly(text_of([point], "c.jsonl"))["loss"] is None


def test_lines_of_a_history(tmp_path):
    file = HistoryFile(str(tmp_path / "h.jsonl"), "server")
    assert strictly(file.line("control", 1.0, {"value": math.nan}).decode())["value"] is None
