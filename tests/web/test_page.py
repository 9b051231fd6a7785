"""The page in a real browser, with real runs: what moves, what controls do, what is there after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.reporting.summary import EvaluatedPoint, Event, Snapshot, Span, View, Wait
from paramserver.common.security import WEB_TOKEN_VARIABLE
from paramserver.tests.certificates import certs
from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.late import come_late
from paramserver.tests.web.conftest import STEP, Tab, about, served, tick

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")
from paramserver.web import app
from paramserver.web.files import read_files

RUN = ("--mode", "ssp", "--task", "digits", "--set", "server.status_interval_s=0.1")
TOKEN = "kept"


def opened(tab: Callable[..., Tab], server: Process, **options: Any) -> Tab:
    shown = tab(**options)
    shown.page.goto(f"{server.event('dashboard')['url']}?token={TOKEN}")
    shown.page.locator("#connection[data-state=live]").wait_for()
    return shown


def until(shown: Tab, expression: str, argument: Any = None) -> None:
    shown.page.wait_for_function(expression, arg=argument, timeout=120_000)
    come_late()


def test_values_move_controls_act_and_the_end_is_the_summary(cluster: Cluster, tab: Callable[..., Tab]) -> None:
    flags = (*RUN, "--workers", "2", "--steps", "100000", "--eval-every", "50", "--checkpoint-dir", "snapshots")
    server = cluster.server(
        *flags, "--web", "127.0.0.1:0", "--summary", "s.json", "--set", "cost.per_hour=3600", "--history", "h.jsonl",
        "--set", "checkpoint.keep=100", PS_WEB_TOKEN=TOKEN,
    )  # fmt: skip
    workers = [cluster.worker(rank, "--set", "slowdown.base_s=0.01") for rank in range(2)]
    shown = opened(tab, server)
    page = shown.page
    until(shown, f"first => ({STEP})() > first + 10", 5)
    assert "token" not in page.url
    page.get_by_role("button", name="Snapshot now").click()
    until(shown, "() => document.querySelector('#events li[data-kind=snapshot]')")
    page.locator("#settings-menu summary").click()
    page.get_by_label("new value of staleness").fill("9")
    page.get_by_role("button", name="Set staleness").click()
    until(shown, "() => document.getElementById('reply').textContent === 'staleness is 9, was 3'")
    until(shown, "() => document.querySelector('[data-setting=staleness] b').textContent === '9'")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Pause worker 1").click()
    until(shown, '() => document.querySelector(\'#waits line[data-from="0"][data-to="1"]\')')
    assert "10 contributions ahead; the next may begin at most 9 ahead" in page.locator("#waits-text").text_content()
    page.get_by_role("button", name="Resume worker 1").click()
    until(shown, f"first => ({STEP})() > first + 10", page.evaluate(STEP))
    page.get_by_text("Another worker").click()
    page.get_by_label("rank of another worker").fill("7")
    page.get_by_role("button", name="Evict that worker").click()
    page.get_by_role("dialog").get_by_role("button", name="Evict").click()
    until(shown, "() => document.getElementById('reply').textContent.startsWith('no worker 7 is in the run')")
    sure(shown, "Drain")
    until(shown, "() => document.getElementById('connection').dataset.state === 'over'")
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, 0], server.output
    is_the_summary(shown, json.loads((cluster.folder / "s.json").read_text()), per_s=1)
    asked = [json.loads(line) for line in (cluster.folder / "h.jsonl").read_text().splitlines() if '"control"' in line]
    done = [(event["do"], event["done"]) for event in asked]
    assert done == [
        ("snapshot", True), ("set", True), ("pause", True), ("resume", True), ("evict", False), ("drain", True)
    ]  # fmt: skip
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def sure(shown: Tab, button: str) -> None:
    """What cannot be taken back is asked once more."""
    shown.page.get_by_role("button", name=button, exact=True).click()
    shown.page.get_by_role("dialog").get_by_role("button", name=button).click()


def size(num_bytes: float) -> str:
    """As the page writes it."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes} B" if unit == "B" else f"{num_bytes:.{2 if num_bytes < 10 else 1}f} {unit}"
        num_bytes /= 1000
    raise AssertionError(num_bytes)


def seconds(text: str) -> float:
    """Of what the page writes as `9.8 s`, `12 s` or `1 min 05 s`."""
    minutes, _, rest = text.rpartition("min")
    return 60 * float(minutes or 0) + float(rest.removesuffix(" s"))


def label(shown: Tab, chart: str) -> str:
    """What a screen reader says of it."""
    return str(shown.page.locator(f"#{chart}[role=img]").get_attribute("aria-label"))


def bins(shown: Tab) -> dict[str, int]:
    counts = re.findall(r"([0-9,]+) at (\d+)", label(shown, "staleness"))
    return {behind: int(count.replace(",", "")) for count, behind in counts}


def is_the_summary(shown: Tab, summary: dict[str, Any], per_s: float = 0) -> None:
    """Every number of the page at the end, as people read it. `per_s`: what a second costs."""
    workers = summary["workers"]
    sums = {
        name: sum(worker[name] for worker in workers)
        for name in ("samples", "contributions", "bytes_sent", "bytes_received")
    }
    assert shown.metric("version") == f"{summary['version']:,}"
    assert shown.metric("samples") == f"{sums['samples']:,}"
    assert seconds(shown.metric("time")) == pytest.approx(
        summary["wall_s"], abs=0.51 if summary["wall_s"] > 9.9 else 0.051
    )
    assert shown.metric("stale max") == f"{max(worker['staleness_max'] for worker in workers)}"
    mean = sum(worker["staleness_mean"] * worker["contributions"] for worker in workers) / sums["contributions"]
    assert float(shown.metric("stale mean")) == pytest.approx(mean, abs=0.0051)
    total = sum(worker["compute_s"] + worker["wait_s"] + worker["transfer_s"] for worker in workers)
    wait_share = sum(worker["wait_s"] for worker in workers) / total
    assert int(shown.metric("waiting").split()[0]) == pytest.approx(100 * wait_share, abs=0.51)
    assert shown.metric("traffic") == size(sums["bytes_sent"] + sums["bytes_received"])
    if per_s:
        cost = summary["cost"]
        assert cost["total"] == pytest.approx(summary["wall_s"] * per_s)
        assert float(shown.metric("cost").split()[0]) == pytest.approx(cost["total"], abs=0.0051)
        assert float(shown.metric("for waiting")) == pytest.approx(cost["total"] * wait_share, abs=0.0051)
        # Rounded to 0.01, of a time that was read a little later.
        assert float(shown.metric("an epoch")) == pytest.approx(cost["per_epoch"], abs=0.006)
    for name, value in summary["final"].items():
        assert float(shown.metric(f"final {name}")) == pytest.approx(value, abs=0.00051)
    for column, name in (
        ("stale max", "staleness_max"),
        ("transport", "transport"),
        ("codec", "codec"),
        ("restarts", "restarts"),
    ):
        assert shown.cells(column) == [f"{worker[name]}" for worker in workers], column
    for column, name in (("contributions", "contributions"), ("samples", "samples")):
        assert shown.cells(column) == [f"{worker[name]:,}" for worker in workers], column
    for column, name in (("sent", "bytes_sent"), ("received", "bytes_received")):
        assert shown.cells(column) == [size(worker[name]) for worker in workers], column
    assert [float(text) for text in shown.cells("stale mean")] == pytest.approx(
        [worker["staleness_mean"] for worker in workers], abs=0.0051
    )
    assert bins(shown) == dict(list(summary["staleness"].items())[:8])  # as many as the sentence has
    assert sum(summary["staleness"].values()) == sums["contributions"]
    late = sum(int(behind) * count for behind, count in summary["staleness"].items())
    assert late == pytest.approx(mean * sums["contributions"], abs=0.01 * sums["contributions"])
    versions = [f"{shard['shard']}: version {shard['version']:,}" for shard in summary["shards"]]
    row = shown.page.locator("#more [data-key=shards] dd")
    assert row.count() == min(1, len(versions))
    if versions:
        assert [text.rpartition(",")[0] for text in row.text_content().split("; ")] == versions


@pytest.mark.slow
def test_the_page_of_several_shards_is_the_summary(cluster: Cluster, tab: Callable[..., Tab]) -> None:
    flags = ("--mode", "ssp", "--set", "server.status_interval_s=0.1")
    server = cluster.server(*flags, "--shards", "2", "--workers", "2", "--steps", "100000", "--web", "127.0.0.1:0",
                            "--summary", "s.json", PS_WEB_TOKEN=TOKEN)  # fmt: skip
    shard = cluster.shard(1, 2, *flags)
    workers = [cluster.worker(rank, "--task", "digits", "--set", "slowdown.base_s=0.01") for rank in range(2)]
    shown = opened(tab, server)
    until(shown, f"first => ({STEP})() > first", 20)
    sure(shown, "Drain")
    until(shown, "() => document.getElementById('connection').dataset.state === 'over'")
    assert [worker.wait() for worker in (*workers, shard, server)] == [0, 0, 0, 0], server.output
    summary = json.loads((cluster.folder / "s.json").read_text())
    assert len(summary["shards"]) == 2
    is_the_summary(shown, summary)


@pytest.mark.slow
def test_it_is_there_again_when_the_server_is_killed_and_goes_on(cluster: Cluster, tab: Callable[..., Tab]) -> None:
    flags = (*RUN, "--workers", "2", "--steps", "100000", "--checkpoint-dir", "snapshots", "--checkpoint-every", "5",
             "--eval-every", "10", "--summary", "s.json")  # fmt: skip
    server = cluster.server(*flags, "--web", "127.0.0.1:0", PS_WEB_TOKEN=TOKEN)
    workers = [cluster.worker(rank, "--set", f"slowdown.base_s={base_s}") for rank, base_s in ((0, 0.01), (1, 0.02))]
    shown = opened(tab, server)
    label = "(document.getElementById('evaluations').ariaLabel || '')"
    until(shown, f"() => Number(({label}.match(/: ([0-9]+) points/) || [])[1]) >= 2")
    text, version = shown.page.locator("#events").text_content(), int(shown.metric("version").replace(",", ""))
    newest = "(document.querySelector('#snapshots tbody td') || {}).textContent"
    until(shown, f"version => Number({newest}?.replace(/,/g, '')) > version", version)
    first = points(shown, "loss")[1], points(shown, "evaluations")[1]
    server.kill()
    until(shown, "() => document.getElementById('connection').dataset.state === 'lost'")
    address = server.event("dashboard")["address"]
    before = shown.page.evaluate(STEP)
    kept = points(shown, "loss"), points(shown, "evaluations"), sum(bins(shown).values())
    again = cluster.server(*flags, "--listen", cluster.address, "--web", address, PS_WEB_TOKEN=TOKEN)
    until(shown, "() => document.getElementById('connection').dataset.state === 'live'")
    until(shown, f"first => ({STEP})() > first", before)
    until(shown, "() => document.getElementById('events').textContent.includes('continues from snapshots')")
    assert (points(shown, "loss")[1], points(shown, "evaluations")[1]) == first  # both begin where they began
    assert points(shown, "loss")[0] > kept[0][0] / 2 and points(shown, "evaluations")[0] >= 2
    assert sum(bins(shown).values()) > kept[2] / 2
    assert "joined" in text and "step 10: " in text
    for process in re.findall(r"(worker \d joined|step 10: [a-z]+ [0-9.]+)", text):
        assert process in shown.page.locator("#events").text_content()
    sure(shown, "Drain")  # the page that was open may still
    until(shown, "() => document.getElementById('connection').dataset.state === 'over'")
    assert [worker.wait() for worker in (*workers, again)] == [0, 0, 0], again.output
    is_the_summary(shown, json.loads((cluster.folder / "s.json").read_text()))


@pytest.mark.slow
def test_a_server_that_goes_back_shows_itself_where_it_did(cluster: Cluster, tab: Callable[..., Tab]) -> None:
    flags = ("--mode", "ssp", "--checkpoint-dir", "snapshots", "--checkpoint-every", "5", "--set", "server.lease_s=5",
             "--set", "server.status_interval_s=0.1")  # fmt: skip
    server = cluster.server(
        *flags, "--shards", "2", "--workers", "1", "--steps", "100000", "--web", "127.0.0.1:0", PS_WEB_TOKEN=TOKEN
    )
    shard = cluster.shard(1, 2, *flags)
    cluster.worker(0, "--task", "digits", "--set", "slowdown.base_s=0.01")
    shown = opened(tab, server)
    until(shown, "() => Number(document.querySelector('#snapshots tbody td')?.textContent) > 20")
    first = points(shown, "loss")[1]
    shard.kill()
    cluster.shard(1, 2, *flags)
    until(shown, "() => document.getElementById('events').textContent.includes('continues from snapshots')")
    assert len({event["address"] for event in server.events("dashboard")}) == 1
    until(shown, "() => document.getElementById('connection').dataset.state === 'live'")
    assert points(shown, "loss")[1] == first


def points(shown: Tab, chart: str) -> tuple[int, int]:
    """Of its first curve: how many, and where they begin."""
    found = re.search(r": (\d+) points? from ([0-9,]+) ", label(shown, chart))
    assert found is not None, label(shown, chart)
    return int(found[1]), int(found[2].replace(",", ""))


def test_two_pages_in_one_browser(
    page: Any, tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A browser gives one host's cookies to all its ports: the second page must not log the first one out."""
    monkeypatch.setenv(WEB_TOKEN_VARIABLE, "another")
    with served(tmp_path) as other:
        shown = tab()
        for item, token in ((page, "secret"), (other, "another")):
            item.begin(View(about=about()))
            item.push(tick(1))
            shown.page.goto(f"http://{item.address}/?token={token}")
            shown.page.get_by_role("button", name="Drain").wait_for()
        shown.page.goto(f"http://{page.address}/")
        shown.page.get_by_role("button", name="Drain").wait_for()


def test_everything_by_keyboard(page: Any, tab: Callable[..., Tab]) -> None:
    asked: list[dict[str, Any]] = []

    async def control(command: dict[str, Any]) -> str:
        asked.append(command)
        return f"done {len(asked)}"

    page.begin(View(about=about(controls=["snapshot", "drain", "pause", "evict", "set staleness"])), control)
    page.push(tick(1))
    shown = tab()
    shown.page.goto(f"http://{page.address}/?token=secret")
    shown.page.get_by_role("button", name="Drain").wait_for()
    keys = shown.page.keyboard

    def go_to(name: str) -> None:
        for _ in range(40):
            focused = "e => { const at = document.activeElement; return at.ariaLabel || at.textContent; }"
            if shown.page.evaluate(focused) == name:
                return
            keys.press("Tab")
        raise AssertionError(f"Tab does not lead to {name}")

    def answered(number: int) -> None:
        until(shown, "said => document.getElementById('reply').textContent === said", f"done {number}")

    go_to("Drain")
    keys.press("Enter")
    until(shown, "() => document.activeElement.textContent === 'Cancel'")
    keys.press("Enter")
    keys.press("Enter")  # the focus is back where it was
    keys.press("Escape")
    go_to("Snapshot now")
    keys.press("Space")
    answered(1)
    assert asked == [{"do": "snapshot"}]
    go_to("Evict worker 1")
    page.push(tick(2))  # the focus stays
    until(shown, f"() => ({STEP})() === 2")
    keys.press("Enter")
    until(shown, "() => document.activeElement.textContent === 'Cancel'")
    assert shown.page.get_by_role("dialog").text_content().startswith("Worker 1 ends, and may not come back")
    keys.press("Shift+Tab")
    keys.press("Enter")
    answered(2)
    go_to("Settings")
    keys.press("Enter")
    go_to("new value of staleness")
    keys.type("5")
    page.push(tick(3))  # what is being typed stays
    until(shown, f"() => ({STEP})() === 3")
    keys.press("Enter")
    answered(3)
    assert asked[1:] == [{"do": "evict", "rank": 1}, {"do": "set", "name": "staleness", "value": 5}]


def test_samples_that_nobody_said_are_a_dash(looks: Callable[..., Tab]) -> None:
    status = tick(1)
    status.status.samples = status.status.samples_per_s = None
    for worker in status.status.workers:
        worker.samples = worker.samples_per_s = None
    shown = looks(status)
    assert shown.metric("samples") == shown.metric("samples/s") == "–"
    cells = shown.page.locator("#workers tbody tr").first.locator("td").all_text_contents()
    assert cells.count("–") == 1  # the column `samples` is hidden at first


def test_relays_have_the_name_and_the_numbers_of_their_region(looks: Callable[..., Tab]) -> None:
    waits = [Wait(rank=0, ranks=[1], why="rank 1 of the round")]
    newest = tick(1, waits=waits)
    values = {"region_workers": 3, "region_ahead": 8, "region_bytes": 4e7, "region_staleness": 0.5}
    newest.status.workers = [
        worker.model_copy(update={"region": name, **values})
        for worker, name in zip(newest.status.workers, ("eu", "us"), strict=True)
    ]
    shown = looks(newest)
    assert shown.cells("worker") == ["▸ 0 eu", "▸ 1 us"]
    columns = ("in region", "ahead", "within", "stale within")
    assert [shown.cells(column)[1] for column in columns] == ["3", "8", "40.0 MB", "0.50"]
    assert shown.page.locator("#waits-text").text_content() == "region eu: rank 1 of the round"
    assert shown.page.locator("#waits text").all_text_contents() == ["0", "eu", "1", "us"]
    assert shown.page.get_by_label("log and details of region us").count() == 1


def test_what_changes_is_changed_in_place(page: Any, looks: Callable[..., Tab]) -> None:
    """Who reads a cell, a sentence or an event has it under the eyes still; every picture has a sentence of now."""
    happened = [Event(at=1.7e9, kind="joined", text="worker 0 joined")]
    saved = [Snapshot(version=1, at=1.7e9, path="snapshots/1")]
    point = EvaluatedPoint(step=1, version=1, elapsed_s=1.0, metrics={"accuracy": 0.5}, samples=64, num_bytes=10)
    shown = looks(tick(1, events=happened, snapshots=saved, evaluations=[point]))
    marked = "#metrics dd, #workers td, #events li, #snapshots tr, #more dd"
    shown.page.evaluate("marked => document.querySelectorAll(marked).forEach(one => one.isKnown = true)", marked)
    spans = [Span(rank=0, begin_s=5.0, compute_s=0.75, wait_s=0.25)]
    more = [Snapshot(version=9, at=1.7e9, path="snapshots/9")]
    page.push(tick(9, snapshots=more, spans=spans, events=[Event(at=1.7e9 + 1, kind="left", text="worker 1 is gone")]))
    until(shown, f"() => ({STEP})() === 9")
    lost = "marked => [...document.querySelectorAll(marked)].filter(one => !one.isKnown).map(one => one.textContent)"
    new = shown.page.evaluate(lost, marked)
    assert len(new) == 2 and new[0].endswith("worker 1 is gone") and new[1].endswith("snapshots/9")
    assert label(shown, "loss").startswith("loss over steps: 2 points from 1 to 9, first 0.500, newest 0.100")
    assert label(shown, "staleness") == "11 contributions by versions behind: 9 at 0, 2 at 1"
    assert label(shown, "stream") == "The last minute. worker 0: computing 75 %, transfer 0 %, waiting 25 %"
    named = {"time": "seconds", "bytes": "traffic"}
    for axis, x in (("samples", "64"), ("bytes", "10 B"), ("time", "1.0 s")):
        shown.page.locator("#axis").select_option(axis)
        assert f": 1 point from {x} to {x}, first 0.500" in label(shown, "evaluations")
        assert f" over {named.get(axis, axis)}: 2 points" in label(shown, "rate")
    shown.page.emulate_media(color_scheme="dark")


def test_over_tls_with_a_token(tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At an address of others: nothing without the token, everything with it."""
    certs("init", tmp_path / "certs")
    monkeypatch.setenv(WEB_TOKEN_VARIABLE, "secret")
    folder = tmp_path / "certs"
    security = {"cert": f"{folder}/server.crt", "key": f"{folder}/server.key", "token_file": f"{folder}/token"}
    with served(tmp_path, "0.0.0.0:0", **security) as secured:
        secured.begin(View(about=about()))
        secured.push(tick(1))
        address = secured.url.replace("0.0.0.0", "127.0.0.1")
        assert address.startswith("https://")
        shown = tab(ignore_https_errors=True)
        assert shown.page.goto(address.partition("?")[0]).status == 401
        shown.page.goto(address)
        shown.page.get_by_role("button", name="Drain").wait_for()
        until(shown, f"() => ({STEP})() === 1")
        (cookie,) = shown.page.context.cookies()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")


def test_what_a_page_weighs() -> None:
    """All that is sent for the page of a run, compressed and before its metrics; docs/page.md says it."""
    files = {name: len(compressed) for name, (_, compressed, _) in read_files().items()}
    index = (Path(app.__file__).parent / "static/index.html").read_text()
    asked = {"index.html", *re.findall(r'(?:href|src)="/static/([^"]+)"', index)} - {"style.css"}
    weight = sum(files[name] for name in asked)
    assert weight < 60_000, weight
    assert f"{weight / 1000:.0f} kB" in (Path(__file__).parents[2] / "docs/page.md").read_text(), weight


@pytest.mark.parametrize(("width", "height"), [(360, 740), (3840, 2160)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(looks: Callable[..., Tab], width: int, height: int, scheme: str) -> None:
    ticks = [tick(number, 8) for number in range(30)]
    shown = looks(*ticks, viewport={"width": width, "height": height}, color_scheme=scheme)
    assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    back = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", back)[:3])) / 3
    assert lightness > 200 if scheme == "light" else lightness < 60
    pictures = shown.page.locator("canvas#stream, svg[role=img], .shares").all()
    assert len(pictures) == 10
    assert all(picture.get_attribute("aria-label") or picture.get_attribute("aria-labelledby") for picture in pictures)


def test_64_workers_and_text_that_looks_like_html(looks: Callable[..., Tab]) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    waits = [Wait(rank=0, ranks=[1], why=evil)]
    events = [Event(at=1.7e9, kind="left", text=evil)]
    ticks = [tick(number, 64, waits=waits, events=events) for number in range(20)]
    for newest in ticks:
        newest.status.workers[3].waiting_for = newest.status.workers[4].transport = evil
    shown = looks(*ticks, of=about(task=evil, mode=evil))
    assert shown.page.locator("#workers tbody tr").count() == 64
    assert shown.page.locator("img:not(h1 img), main script").count() == 0
    assert "owned" not in shown.page.title() or "<img" in shown.page.title()
    assert evil in shown.page.locator("#events").text_content()


def test_only_those_with_the_token_are_shown_controls(page: Any, looks: Callable[..., Tab]) -> None:
    shown = looks(tick(1))
    assert "is read-only" in shown.page.locator("#buttons").text_content()
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
    dashboard = cluster.start("dashboard", "-m", "paramserver.catalog", "ui", "runs/paramserver.db")
    dashboard.until(lambda: "runs of" in dashboard.output and dashboard.output.endswith("\n"), "address")
    url = dashboard.output.split()[-1]
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
    is_the_summary(shown, summary)
    shown.page.get_by_role("link", name="all runs").click()
    shown.page.get_by_role("row").filter(has_text="running").locator("a").click()
    until(shown, "() => document.getElementById('connection').dataset.state === 'live'")
    until(shown, f"first => ({STEP})() > first + 10", shown.page.evaluate(STEP) or 0)
    assert shown.page.locator("#controls").is_hidden()
