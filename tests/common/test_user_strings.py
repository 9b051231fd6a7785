"""Names and sentences of users are text in every output: they end nothing, and begin nothing."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paramserver.common.errors import plain
from paramserver.common.reporting import log, markdown
from paramserver.common.reporting.curve import Point, metric_fields, text_of
from paramserver.common.reporting.pictures import png, svg
from paramserver.common.reporting.report import comparison_table, report_console, summary_table
from paramserver.common.reporting.summary import Summary
from paramserver.common.wire.json_text import to_json
from paramserver.tests.tags import Tags
from paramserver.web.stored import page, write_report

NAMES = (
    "acc[/val]", "f1[macro]", "[red]x", "[/]", "</script><b>", "<!--", "a|b", "$x$", "$", "\x1b[31m", "a\nb", "a\r\nb",
    "# a", "- a", "1. a", "> a", "`a`", "*a*", "_a_", "__a", "![a](b)", "&lt;", "a\\|b", "\\", ":smile:",
    "\x00", "\u202e", "{{data}}", "a,b", 'a"b', "=1+1", "step", "version", "event", "level", "---", "é", "a" * 300,
)  # fmt: skip
hostile = st.sampled_from(NAMES) | st.text("[]/<>|$`*_\\\x1b\n\r#&;!-=\"', ab1", min_size=1, max_size=12)
wherever = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def runs(name: str) -> list[tuple[str, Summary]]:
    points = [Point(step=at, version=at, elapsed_s=at, metrics={name: 1.0 / at}) for at in (1, 2, 3)]
    return [(f"{name}{number}", Summary(mode="sync", wall_s=1.0, final={name: number}, curve=points, ended_by=name))
            for number in (1.0, 2.0)]  # fmt: skip


@given(hostile)
@wherever
def test_a_terminal_shows_every_character_of_a_name_and_obeys_none(name: str) -> None:
    out = io.StringIO()
    console = report_console(out)
    console.print(comparison_table(runs(name)))
    console.print(summary_table(runs(name)[0][1]))
    console.print(name)
    text = out.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    squeezed = re.sub(r"\s+", "", text)
    assert all(re.sub(r"\s+", "", plain(line)) in squeezed for line in name.split("\n"))


@given(hostile)
@wherever
def test_markdown_has_as_many_lines_cells_and_tags_as_without_the_name(name: str) -> None:
    (_, head, rule, row) = markdown.table([name, "b"], [[name, "c"]])
    for line in (head, row):
        assert line.isprintable() and re.sub(r"\\.", "", line).count("|") == 3
    for line in (markdown.items([name])[1], markdown.heading(2, name)[1], markdown.image(name, "a.png")[1]):
        bare = re.sub(r"\\.", ",", line)
        assert line.isprintable() and not re.search(r"[`*|~$]|<[A-Za-z/!?]|&#?\w+;", bare)
        assert bare.count("](") == line.count("(a.png)")
    assert rule == "| --- | --- |"
    words = markdown.text(name)
    assert re.sub(r"\\([\W_])", r"\1", words) == plain(name).strip(), "and nothing is lost"
    assert not re.match(r"(#+|>|[-+]|\d+[.)])(\s|$)", words)


@given(hostile)
@wherever
def test_a_page_has_the_tags_that_it_has_without_the_name(name: str) -> None:
    shown, plainly = (Tags(page(text, [text], {"runs": [text]})) for text in (name, "a"))
    assert shown.found == plainly.found and json.loads(shown.data) == {"runs": [name]}


@given(hostile)
@wherever
def test_files_of_numbers_give_the_names_back(name: str) -> None:
    points = [Point(step=7, version=8, elapsed_s=9.0, metrics={name: 0.5, "loss": 1.5})]
    text = text_of(points, "c.csv")
    (row,) = csv.DictReader(io.StringIO(text, newline=""))
    column = f"metrics.{name}" if name in ("step", "version") else name
    numbers = [row[key] for key in ("step", "version", "elapsed_s", plain(column), "loss")]
    assert numbers == ["7", "8", "9.0", "0.5", "1.5"] and all(line.isprintable() for line in text.split("\n"))
    (line,) = text_of(points, "c.jsonl").splitlines()
    assert json.loads(line)[column] == 0.5 and json.loads(line)["step"] == 7
    assert json.loads(to_json({name: name})) == {name: name}
    fields = {"event": "evaluated", "step": 7, "version": 8, "best": True}
    assert len({**fields, **metric_fields({name: 0.5})}) == 5, "no field of an event is replaced"
    event = log._printable(None, "info", {"event": "evaluated", **metric_fields({name: name})})
    assert all(key.isprintable() and value.isprintable() for key, value in event.items())


@given(hostile)
@wherever
def test_an_svg_is_xml_whose_texts_are_the_names(name: str) -> None:
    curves = [(name, [(0.0, 1.0), (1.0, 2.0)])]
    found = ElementTree.fromstring(svg(curves, name).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    assert plain(name) in [node.text for node in found.iter("{http://www.w3.org/2000/svg}text")]
    assert len(list(found)) == 6


@pytest.mark.parametrize("name", NAMES)
def test_a_report_of_any_name_is_written_whole(tmp_path: Path, name: str) -> None:
    write_report(str(tmp_path), name, runs(name), [name], {name: [name, "other"]})
    text = (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.html").exists() and text.count("\n## ") == 2
    tables = re.findall(r"(?m)^\|.*\n(?:\| --- )+\|$", text)[1:]  # of the settings, and two of points
    counts = [[re.sub(r"\\.", "", line).count("|") for line in table.splitlines()] for table in tables]
    assert counts == [[4, 4], [5, 5], [5, 5]]


def test_every_picture_has_a_file_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [Point(step=at, version=at, elapsed_s=at, metrics={"loss": 1.0, "accuracy": 0.5}) for at in (1, 2)]
    picture = ("loss-over-s.png", "time", "s", [("$a$", [(0.0, 1.0), (1.0, 1.0)])])
    run = Summary(mode="sync", wall_s=1.0, final={"loss": 1.0}, curve=points)
    write_report(str(tmp_path), "a", [("_a", run), ("b", run)], extra=([], [picture]))
    assert {"loss-over-s.png", "loss-over-s-1.png"} <= {path.name for path in tmp_path.glob("*.png")}
    assert png(tmp_path / "x.png", "$\x1b_", [("__a", [(0.0, 1.0), (1.0, 2.0)])], "s")
