"""The page in a real browser, with real runs: what moves, what controls do, what is there after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.reporting.watched import Happened, Wait
from paramserver.tests.late import come_late
from paramserver.tests.loopback.conftest import Cluster, Process
from paramserver.tests.web.conftest import Tab, about, tick

RUN = ("--mode", "ssp", "--task", "digits", "--set", "server.status_interval_s=0.1")
_TEXT = "(document.querySelector('[data-figure=step] dd') || {}).textContent"
STEP = f"() => Number({_TEXT}?.split('/')[0].replace(/,/g, ''))"


def opened(tab: Callable[..., Tab], server: Process, **options: Any) -> Tab:
    shown = tab(**options)
    shown.page.goto(server.event("page")["url"])
    shown.page.locator("#connection[data-state=live]").wait_for()
    return shown


def until(shown: Tab, expression: str, argument: Any = None) -> None:
    shown.page.wait_for_function(expression, arg=argument, timeout=120_000)
    come_late()


def test_values_move_controls_act_and_the_end_is_the_summary(cluster: Cluster, tab: Callable[..., Tab]) -> None:
    flags = (*RUN, "--workers", "2", "--steps", "100000", "--eval-every", "50", "--checkpoint-dir", "snapshots")
    server = cluster.server(
        *flags,
        "--web",
        "127.0.0.1:0",
        "--summary",
        "s.json",
        "--set",
        "cost.per_hour=3600",
        "--history",
        "h.jsonl",
        "--set",
        "checkpoint.keep=100",
    )
    workers = [cluster.worker(rank, "--set", "slowdown.base_s=0.01") for rank in range(2)]
    shown = opened(tab, server)
    page = shown.page
    until(shown, f"first => ({STEP})() > first + 10", 5)
    assert "token" not in page.url
    page.get_by_role("button", name="Snapshot now").click()
    until(shown, "() => document.querySelector('#events li[data-kind=snapshot]')")
    page.get_by_label("setting", exact=True).select_option("staleness")
    page.get_by_label("new value").fill("9")
    page.get_by_role("button", name="Set", exact=True).click()
    until(shown, "() => document.getElementById('answer').textContent === 'staleness is 9, was 3'")
    page.get_by_label("rank to hold").fill("1")
    page.get_by_role("button", name="Hold").click()
    until(shown, '() => document.querySelector(\'#waits line[data-from="0"][data-to="1"]\')')
    assert "10 contributions ahead, at most 9 allowed" in page.locator("#waits-text").text_content()
    page.get_by_label("rank to release").fill("1")
    page.get_by_role("button", name="Release").click()
    until(shown, f"first => ({STEP})() > first + 10", page.evaluate(STEP))
    page.get_by_label("rank to evict").fill("7")
    page.get_by_role("button", name="Evict").click()
    until(shown, "() => document.getElementById('answer').textContent.startsWith('no worker 7 is in the run')")
    page.get_by_role("button", name="Drain").click()
    until(shown, "() => document.getElementById('connection').dataset.state === 'over'")
    assert [one.wait() for one in (*workers, server)] == [0, 0, 0], server.output
    is_the_summary(shown, json.loads((cluster.folder / "s.json").read_text()))
    asked = [json.loads(line) for line in (cluster.folder / "h.jsonl").read_text().splitlines() if '"control"' in line]
    done = [(one["do"], one["done"]) for one in asked]
    assert done == [
        ("snapshot", True), ("set", True), ("hold", True), ("release", True), ("evict", False), ("drain", True)
    ]  # fmt: skip
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def is_the_summary(shown: Tab, summary: dict[str, Any]) -> None:
    """Every number of the page at the end, as people read it."""
    workers = summary["workers"]
    sums = {name: sum(one[name] for one in workers) for name in ("samples", "steps", "bytes_sent", "bytes_received")}
    assert shown.figure("version") == f"{summary['version']:,}"
    assert shown.figure("updates") == f"{summary['updates']:,}"
    assert shown.figure("samples") == f"{sums['samples']:,}"
    assert shown.figure("stale max") == f"{max(one['staleness_max'] for one in workers)}"
    mean = sum(one["staleness_mean"] * one["steps"] for one in workers) / sums["steps"]
    assert float(shown.figure("stale mean")) == pytest.approx(mean, abs=0.0051)
    total = sum(one["compute_s"] + one["wait_s"] + one["transfer_s"] for one in workers)
    waiting = int(shown.figure("waiting").split()[0])
    assert waiting == pytest.approx(100 * sum(one["wait_s"] for one in workers) / total, abs=0.51)
    megabytes = (sums["bytes_sent"] + sums["bytes_received"]) / 1e6
    assert float(shown.figure("traffic").split()[0]) == pytest.approx(megabytes, rel=0.01)
    assert float(shown.figure("cost").split()[0]) == pytest.approx(summary["wall_s"], abs=0.0051)  # 1 a second
    for name, value in summary["final"].items():
        assert float(shown.figure(f"final {name}")) == pytest.approx(value, abs=0.00051)
    assert shown.cells("contributions") == [f"{one['steps']:,}" for one in workers]
    assert shown.cells("samples") == [f"{one['samples']:,}" for one in workers]
    assert [float(text) for text in shown.cells("stale mean")] == pytest.approx(
        [one["staleness_mean"] for one in workers], abs=0.0051
    )
    assert shown.cells("restarts") == ["0", "0"]


def test_it_is_there_again_when_the_server_is_killed_and_goes_on(cluster: Cluster, tab: Callable[..., Tab]) -> None:
    flags = (*RUN, "--workers", "1", "--steps", "100000", "--checkpoint-dir", "snapshots", "--checkpoint-every", "5")
    server = cluster.server(*flags, "--web", "127.0.0.1:0", PS_WEB_TOKEN="kept")
    cluster.worker(0, "--set", "slowdown.base_s=0.01")
    shown = opened(tab, server)
    until(shown, f"first => ({STEP})() > first", 20)
    server.popen.kill()
    server.popen.wait()
    until(shown, "() => document.getElementById('connection').dataset.state === 'lost'")
    address = server.event("page")["address"]
    before = shown.page.evaluate(STEP)
    cluster.server(*flags, "--listen", cluster.address, "--web", address, PS_WEB_TOKEN="kept")
    until(shown, "() => document.getElementById('connection').dataset.state === 'live'")
    until(shown, f"first => ({STEP})() > first", before)
    until(shown, "() => document.getElementById('events').textContent.includes('goes on from snapshots')")
    shown.page.get_by_role("button", name="Drain").click()  # the page that was open may still
    until(shown, "() => document.getElementById('answer').textContent.includes('last')")


@pytest.mark.parametrize(("width", "height"), [(360, 740), (3840, 2160)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(page: Any, tab: Callable[..., Tab], width: int, height: int, scheme: str) -> None:
    page.begin(about())
    for number in range(30):
        page.push(tick(number, 8))
    shown = tab(viewport={"width": width, "height": height}, color_scheme=scheme)
    shown.page.goto(f"http://{page.address}/")
    until(shown, f"() => ({STEP})() === 29")
    assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    back = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", back)[:3])) / 3
    assert lightness > 200 if scheme == "light" else lightness < 60
    pictures = shown.page.locator("canvas#stream, svg[role=img], .shares").all()
    assert len(pictures) == 10
    assert all(one.get_attribute("aria-label") or one.get_attribute("aria-labelledby") for one in pictures)


def test_64_workers_and_text_that_looks_like_html(page: Any, tab: Callable[..., Tab]) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    page.begin(about(task=evil, mode=evil))
    waits = [Wait(rank=0, ranks=[1], why=evil)]
    events = [Happened(at=1.7e9, kind="left", text=evil)]
    for number in range(20):
        newest = tick(number, 64, waits=waits, events=events)
        newest.status.workers[3].waiting_for = newest.status.workers[4].lane = evil
        page.push(newest)
    shown = tab()
    shown.page.goto(f"http://{page.address}/")
    until(shown, f"() => ({STEP})() === 19")
    assert shown.page.locator("#workers tbody tr").count() == 64
    assert shown.page.locator("img:not(h1 img), main script").count() == 0
    assert "owned" not in shown.page.title() or "<img" in shown.page.title()
    assert evil in shown.page.locator("#events").text_content()


def test_only_those_with_the_token_are_shown_controls(page: Any, tab: Callable[..., Tab]) -> None:
    page.begin(about())
    page.push(tick(1))
    shown = tab()
    shown.page.goto(f"http://{page.address}/")
    until(shown, f"() => ({STEP})() === 1")
    assert "may only look" in shown.page.locator("#buttons").text_content()
    shown.page.goto(f"http://{page.address}/?token=secret")
    shown.page.get_by_role("button", name="Drain").wait_for()
    shown.page.keyboard.press("Tab")  # the first stop is the way past the head
    assert shown.page.evaluate("document.activeElement.textContent") == "Skip to the workers"


def test_the_vendored_library_is_what_was_published() -> None:
    """sha512 of the files of uplot 1.6.32 from npm (its integrity: sha512-KIMVnG68...)."""
    import hashlib

    folder = Path(__file__).parents[2] / "web/static/vendor"
    digests = {file.name: hashlib.sha512(file.read_bytes()).hexdigest()[:16] for file in folder.iterdir()}
    assert digests == {
        "uPlot.LICENSE": "26ad5134b24da27b", "uPlot.iife.min.js": "8df9b8c2bc60abbd",
        "uPlot.min.css": "c57618bc6a0fa8e8",
    }  # fmt: skip


@pytest.mark.slow
def test_runs_on_record_and_one_that_another_process_writes(cluster: Cluster, tab: Callable[..., Tab]) -> None:
    """A page without a server: a finished run as its summary was, and a live one that moves."""
    done = cluster.command("launch", "-n", "2", "--task", "xor", "--steps", "200", "--summary", "s.json")
    assert done.returncode == 0, done.stderr
    cluster.server("--mode", "async", "--steps", "100000", "--set", "server.status_interval_s=0.2")
    cluster.worker(0, "--task", "digits", "--set", "slowdown.base_s=0.01")
    board = cluster.start("board", "-m", "paramserver.catalog", "board", "runs/paramserver.db")
    board.until(lambda: "runs of" in board.output and board.output.endswith("\n"), "address")
    url = board.output.split()[-1]
    assert "/runs?token=" in url
    shown = tab()
    shown.page.goto(url)
    until(shown, "() => document.querySelectorAll('#runs tbody tr').length === 2")
    assert "token" not in shown.page.url
    shown.page.get_by_role("searchbox").fill("xor")
    until(shown, "() => document.querySelectorAll('#runs tbody tr').length === 1")
    shown.page.locator("#runs tbody a").click()
    until(shown, "() => document.getElementById('connection').dataset.state === 'over'")
    summary = json.loads((cluster.folder / "s.json").read_text())
    assert shown.figure("version") == f"{summary['version']:,}"
    assert shown.figure("samples") == f"{sum(one['samples'] for one in summary['workers']):,}"
    assert shown.cells("contributions") == [f"{one['steps']:,}" for one in summary["workers"]]
    shown.page.get_by_role("link", name="all runs").click()
    shown.page.get_by_role("row").filter(has_text="running").locator("a").click()
    until(shown, "() => document.getElementById('connection').dataset.state === 'live'")
    until(shown, f"first => ({STEP})() > first + 10", shown.page.evaluate(STEP) or 0)
    assert shown.page.locator("#controls").is_hidden()
