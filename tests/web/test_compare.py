"""The list of runs in a real browser: sort, filter, tag, select, overlay; all of it in the address."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.runstore import reading
from paramserver.common.runstore.reading import RunStore
from paramserver.common.security import WEB_TOKEN_VARIABLE
from paramserver.tests.catalog.test_runs import EVIL, write
from paramserver.tests.web.conftest import SHOWN, Client, Tab
from paramserver.tests.web.test_page import until

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")
from paramserver.web import stored
from paramserver.web.app import Dashboard

SYNC, AGAIN, ASYNC, GPT = "aaaa00000001", "aaaa00000002", "bbbb00000003", "cccc00000004"
NAMES = "() => [...document.querySelectorAll('#runs tbody tr')].map(row => row.dataset.run).join()"
LEGEND = "() => [...document.querySelectorAll('#comparison-legend button')].map(button => button.textContent)"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "paramserver.db"
    write(path, SYNC)
    write(path, AGAIN, seed=1)
    write(path, ASYNC, mode="async", lr=0.2)
    write(path, GPT, work="gpt")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for run, accuracy, at in ((SYNC, 0.7, 1), (AGAIN, 0.8, 2), (ASYNC, 0.9, 3), (GPT, 0.4, 4)):
            row = json.dumps({"accuracy": accuracy}), at, run
            db.execute("UPDATE runs SET metrics = ?, started_at = ? WHERE id = ?", row)
            final = "json_set(body, '$.final.accuracy', ?) WHERE name = 'summary'"
            db.execute(
                f"UPDATE documents SET body = {final} AND run = (SELECT key FROM runs WHERE id = ?)", (accuracy, run)
            )
    return path


@pytest.fixture
def dashboard(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(WEB_TOKEN_VARIABLE, "secret")
    found = Dashboard(Config.model_validate({"server": {"web": "127.0.0.1:0"}}), file, "/runs")
    found.start()
    yield found
    found.close()


def opened(tab: Callable[..., Tab], dashboard: Any, query: str = "", **options: Any) -> Tab:
    shown = tab(**options)
    shown.page.goto(f"http://{dashboard.address}/runs{query}")
    until(shown, "() => document.querySelector('#runs tbody tr, #notes p')")
    return shown


def names(shown: Tab, *runs: str) -> None:
    """Wait until the table has these runs in this order."""
    until(shown, f"names => ({NAMES})() === names", ",".join(runs))


def legend(shown: Tab, *labels: str) -> None:
    until(shown, f"labels => JSON.stringify(({LEGEND})()) === JSON.stringify(labels)", list(labels))


def test_the_heads_of_columns_sort(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard)
    names(shown, GPT, ASYNC, AGAIN, SYNC)
    head = shown.page.locator("#runs th").filter(has_text="mode")
    head.get_by_role("button").click()
    names(shown, ASYNC, GPT, AGAIN, SYNC)
    assert head.get_attribute("aria-sort") == "ascending" and "sort=mode" in shown.page.url
    head.get_by_role("button").click()
    names(shown, GPT, AGAIN, SYNC, ASYNC)
    assert head.get_attribute("aria-sort") == "descending"
    shown.page.locator("#runs th").filter(has_text="accuracy").get_by_role("button").click()
    names(shown, GPT, SYNC, AGAIN, ASYNC)
    again = opened(tab, dashboard, "?sort=-run.seed")  # a setting, which is read only where it is asked for
    until(again, f"first => ({NAMES})().startsWith(first)", AGAIN)


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("gpt", [GPT]), ("mode=async", [ASYNC]), ("accuracy>=0.7 -mode=async", [AGAIN, SYNC]),
        ("accuracy > 0.85", [ASYNC]),
        ("lr=0.2", [ASYNC]), ("optimizer.lr!=0.2 task=digits", [AGAIN, SYNC]), ("run.seed=1", [AGAIN]),
        ("mode=a* ", [ASYNC]), ("loss<", [GPT, ASYNC, AGAIN, SYNC]), ("bbbb", [ASYNC]), ("mode=nothing", []),
    ],
)  # fmt: skip
def test_a_filter_has_words_and_terms(dashboard: Any, tab: Callable[..., Tab], text: str, runs: list[str]) -> None:
    shown = opened(tab, dashboard)
    shown.page.get_by_role("searchbox").fill(text)
    names(shown, *runs)
    assert shown.page.locator("#count").text_content() == f"{len(runs)} of 4 runs"
    assert shown.page.locator("#notes p").count() == 0


def test_a_term_that_nothing_has_is_named(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard, "?q=lrr%3D0.1")
    until(shown, "() => document.getElementById('notes').textContent.startsWith('No run has lrr: a term is a column')")


def test_numbers_in_a_filter_have_units(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard)
    read = "async text => (await import('/static/query.js')).numberOf(text)"
    found = [shown.page.evaluate(read, text) for text in ("20%", "1.5MB", "2min", "1e-3", "-4")]
    assert found == [0.2, 1.5e6, 120, 0.001, -4]


def test_columns_are_chosen(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard)
    shown.page.locator("#columns summary").click()
    shown.page.locator("#columns").get_by_label("optimizer.lr").check()
    shown.page.locator("#columns").get_by_label("traffic", exact=True).uncheck()
    heads = "() => [...document.querySelectorAll('#runs th button')].map(node => node.textContent)"
    until(shown, f"() => ({heads})().includes('optimizer.lr') && !({heads})().includes('traffic')")
    assert "0.2" in shown.page.locator(f"[data-run={ASYNC}]").text_content()
    again = opened(tab, dashboard, f"?{shown.page.url.partition('?')[2]}")
    until(again, f"wanted => JSON.stringify(({heads})()) === JSON.stringify(wanted)", shown.page.evaluate(heads))


def select(shown: Tab, *runs: str) -> None:
    for run in runs:
        shown.page.locator(f"[data-run={run}]").get_by_role("checkbox").check()


def test_selected_runs_are_drawn_over_each_other(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard)
    select(shown, SYNC, AGAIN, ASYNC)
    legend(shown, "async", "sync (2 seeds)")
    chart = shown.page.locator("[data-chart='eval.accuracy']")
    chart.locator("canvas").wait_for()
    label = chart.get_attribute("aria-label")
    assert label.startswith("async over steps: 2 points from 50 to 100, first 0.250, newest 0.500")
    assert "; sync (2 seeds) over steps: 2 points" in label
    rows = shown.page.locator("#results tbody tr")
    rows.nth(1).wait_for()  # the results with the last selected run
    assert rows.locator(".best").all_text_contents() == ["0.900 best"], "the ranges of time and traffic are equal"
    assert "0.750 0.700 – 0.800" in rows.filter(has_text="sync (2 seeds)").text_content()
    rows.get_by_role("button").click()
    members = shown.page.locator("#results tr.member th").all_text_contents()
    assert [text[:7] for text in members] == ["seed 0:", "seed 1:"]
    differing = shown.page.locator("#differences tbody tr").all_text_contents()
    assert differing == ["optimizer.lr0.20.1", "run.modeasyncsync"]
    shown.page.get_by_label("seeds as bands").uncheck()
    until(shown, f"() => ({LEGEND})().length === 3")
    assert "run.seed" in shown.page.locator("#differences").text_content()
    shown.page.locator("#x").select_option("bytes")
    shown.page.get_by_label("log y").check()
    drawn = "document.querySelector(\"[data-chart='eval.accuracy']\").ariaLabel"
    until(shown, f"() => {drawn}.includes(' over traffic: 2 points')")
    shown.page.locator("#comparison-legend button").first.click()
    until(shown, "() => document.querySelector('#comparison-legend button').ariaPressed === 'false'")
    for part in (f"sel={SYNC},{AGAIN},{ASYNC}", "x=bytes", "log=y", "seeds=0", f"hide={ASYNC}"):
        assert part in shown.page.url
    shown.page.get_by_role("button", name="Clear selection").click()
    shown.page.locator("#comparison").wait_for(state="hidden")
    assert "sel=" not in shown.page.url


def test_the_address_shows_somebody_else_the_same(dashboard: Any, tab: Callable[..., Tab]) -> None:
    query = f"?q=task%3Ddigits&sel={SYNC},{AGAIN},{ASYNC}&x=time&y=loss,num_bytes&smooth=0.6&log=xy"
    shown = opened(tab, dashboard, query)
    legend(shown, "async", "sync (2 seeds)")
    names(shown, ASYNC, AGAIN, SYNC)
    until(shown, "() => document.querySelectorAll('#comparison-charts canvas').length === 2")
    page = shown.page
    assert page.locator("#runs tbody input:checked").count() == 3
    assert [page.locator(f"#{name}").is_checked() for name in ("log-x", "log-y", "seeds")] == [True, True, True]
    assert (page.locator("#x").input_value(), page.locator("#smooth").input_value()) == ("time", "0.6")
    assert page.locator("#comparison-charts h3").all_text_contents() == ["training loss", "traffic"]
    page.locator("#chart-menu summary").click()
    page.locator("#chart-menu").get_by_label("accuracy, evaluated").check()
    until(shown, "() => document.querySelectorAll('#comparison-charts canvas').length === 3")
    assert "y=loss,num_bytes,eval.accuracy" in page.url


def test_runs_that_are_gone_are_named(dashboard: Any, file: Path, tab: Callable[..., Tab]) -> None:
    with RunStore(file) as store:
        key = store.find(AGAIN).key
    reading.remove(file, [key])
    shown = opened(tab, dashboard, f"?sel={SYNC},{AGAIN}")
    until(shown, "() => document.querySelector('#notes p')")
    assert (
        shown.page.locator("#notes").text_content()
        == f"A run of this address is gone ({AGAIN}): deleted, or in another run store."
    )
    legend(shown, "sync")
    gone = opened(tab, dashboard, "?sel=x1,x2")
    notes = "document.getElementById('notes').textContent"
    until(gone, f"() => {notes}.startsWith('2 runs of this address are gone (x1, x2)')")
    assert gone.page.locator("#comparison").is_hidden()


def test_runs_of_different_tasks_get_one_sentence(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard, f"?sel={SYNC},{GPT},{ASYNC}")
    legend(shown, "async digits", "sync digits", "sync gpt")
    notes = shown.page.locator("#comparison-notes p").all_text_contents()
    assert notes == [
        "The runs have different tasks (digits, gpt): compare times, waits and traffic, not losses and accuracies."
    ]
    assert shown.page.locator("#results .best").count() == 0


def test_runs_are_tagged(dashboard: Any, file: Path, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard, f"?sel={SYNC}")
    legend(shown, "sync")
    assert shown.page.locator("#tagging").is_hidden(), "without the token"
    shown = opened(tab, dashboard, "?token=secret")
    select(shown, SYNC, ASYNC)
    shown.page.locator("#tagging summary").click()
    shown.page.get_by_label("Tags for the selected runs").fill("baseline, quick")
    shown.page.get_by_role("button", name="Add").click()
    until(shown, f"() => document.querySelector('[data-run={SYNC}] .tags')?.textContent === 'baselinequick'")
    shown.page.locator(f"[data-run={SYNC}]").get_by_role("button", name="baseline").click()
    names(shown, ASYNC, SYNC)
    assert shown.page.get_by_role("searchbox").input_value() == "tag=baseline"
    shown.page.locator("#tagging summary").click()
    shown.page.get_by_label("Tags for the selected runs").fill("quick")
    shown.page.get_by_role("button", name="Remove").click()
    until(shown, f"() => document.querySelector('[data-run={SYNC}] .tags')?.textContent === 'baseline'")
    with RunStore(file) as store:
        assert {run.id: run.tags for run in store.runs() if run.tags} == {SYNC: ["baseline"], ASYNC: ["baseline"]}


@pytest.mark.parametrize(
    ("run", "body", "status", "error"),
    [
        (SYNC, {"tags": "a b, a"}, 200, None), (SYNC, {"tags": ""}, 200, None), 
        ("nope", {"tags": "a"}, 404, "no run nope"),
        (SYNC, {"tags": 3}, 400, "tags are one text"), (SYNC, {"tags": "x" * 41}, 400, "at most 40 printable"),
        (SYNC, {"tags": " ".join(map(str, range(11)))}, 400, "at most 10 tags"), (SYNC, [], 400, "another kind"),
    ],
)  # fmt: skip
def test_tags_that_cannot_be_are_refused(dashboard: Any, run: str, body: Any, status: int, error: str | None) -> None:
    client, text = Client(dashboard.address), json.dumps(body).encode()
    assert client.ask("POST", f"/api/runs/{run}/tags", text)[0] == 401
    found = client.ask("POST", f"/api/runs/{run}/tags", text, **SHOWN)
    assert found[0] == status, found
    assert error is None or error in found[1]["error"]


def test_tags_of_a_store_that_may_only_be_read_are_refused(dashboard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr(reading, "set_tags", refuse)
    status, body = Client(dashboard.address).ask("POST", f"/api/runs/{SYNC}/tags", b'{"tags": "a"}', **SHOWN)
    assert status == 409 and "cannot be written: attempt to write" in body["error"]


def test_bands_smoothing_and_runs_that_went_back(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard)
    module = "async given => { const m = await import('/static/curves.js'); return "
    band = shown.page.evaluate(f"{module} m.band(given); }}", [[[0, 0.0], [10, 10.0]], [[5, 9.0], [10, 20.0]]])
    assert band == {"xs": [0, 5, 10], "mean": [0, 7, 15], "low": [0, 5, 10], "high": [0, 9, 20]}
    points = [[0, 4.0], [1, 0.0], [2, 0.0]]
    soft = shown.page.evaluate(f"{module} m.smoothed(given, 0.5); }}", points)
    assert [y for _, y in soft] == pytest.approx([4, 4 / 3, 4 / 7])
    data = {"series": {"step": [0, 5, 9, 6, 10, None], "loss": [5.0, 4.0, 3.0, 2.0, None, 1.0]}, "evaluations": []}
    assert shown.page.evaluate(f"{module} m.pointsOf(given, 'loss', 'step'); }}", data) == [[0, 5], [5, 4], [6, 2]]


@pytest.mark.parametrize("width", [320, 390, 2560])
def test_the_comparison_fits_every_screen(dashboard: Any, tab: Callable[..., Tab], width: int) -> None:
    for scheme in ("light", "dark"):
        screen = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
        shown = opened(tab, dashboard, f"?sel={SYNC},{AGAIN},{ASYNC}", **screen)
        shown.page.locator("#comparison-charts canvas").first.wait_for()
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert all(chart.get_attribute("aria-label") for chart in shown.page.locator(".chart[role=img]").all())


def test_the_comparison_by_keyboard(dashboard: Any, tab: Callable[..., Tab]) -> None:
    shown = opened(tab, dashboard)
    keys = shown.page.keyboard
    for _ in range(40):
        if shown.page.evaluate("() => document.activeElement.ariaLabel") == "compare digits-async-3":
            break
        keys.press("Tab")
    keys.press("Space")
    legend(shown, "async")
    assert shown.page.evaluate("() => document.activeElement.ariaLabel") == "compare digits-async-3", "the focus stays"
    chart = shown.page.locator("[data-chart=loss]")
    chart.locator("canvas").wait_for()
    chart.focus()
    keys.press("+")
    chart.get_by_role("button", name="show all").wait_for()
    keys.press("0")
    chart.get_by_role("button", name="show all").wait_for(state="hidden")


def test_names_are_text(file: Path, dashboard: Any, tab: Callable[..., Tab]) -> None:
    write(file, "dddd00000005", work=EVIL, mode="<b>bold</b>")
    with RunStore(file) as store:
        reading.rename(file, store.find("dddd00000005").key, EVIL)
    shown = opened(tab, dashboard, f"?sel=dddd00000005,{SYNC}")
    until(shown, f"() => ({LEGEND})().length === 2")
    assert EVIL.split("\x1b")[0] in shown.page.locator("#comparison-legend").text_content()
    assert shown.page.locator("main script, main b:not(.tip b)").count() == 0


def test_settings_are_those_that_differ() -> None:
    settings = {"a": {"x": 1, "y": [1], "z": 1}, "b": {"x": 1, "y": [2], "z": 1, "new": float("inf")}, "c": {}}
    assert stored.differing(settings) == {"a": {"y": "[1]"}, "b": {"y": "[2]", "new": "inf"}, "c": {}}


def test_a_run_that_goes_on_is_compared_as_it_is(page: Any, client: Client) -> None:
    """A run of this process, which the run store does not have yet."""
    status, found = client.ask("GET", "/api/runs/live/curves")
    assert status == 200 and found["run"]["id"] == "r1" and found["series"]["step"] == [1]
    assert client.ask("GET", "/api/settings") == (200, {"r1": {}})
    assert client.ask("GET", "/api/runs/nope/curves")[0] == 404


def test_a_run_store_of_another_version_is_said(dashboard: Any, tab: Callable[..., Tab], file: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 2")
    shown = opened(tab, dashboard)
    until(shown, "() => document.getElementById('notes').textContent.includes('has tables of version 2')")
    assert "move it away" in shown.page.locator("#notes").text_content()
    assert "no runs yet" not in shown.page.locator("#notes").text_content()
