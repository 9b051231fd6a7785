"""A real browser, and pages to look at. Without Chromium or Playwright the tests of the page say so and are skipped."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.reporting.summary import About, Status, Tick, View, WorkerStatus
from paramserver.common.security import WEB_TOKEN_VARIABLE
from paramserver.tests.cluster import DEADLINE_S

CONTROL = "/api/runs/live/controls"
SHOWN = {"Authorization": "Bearer secret"}
_TEXT = "(document.querySelector('[data-metric=step] dd') || {}).textContent"
STEP = f"() => Number({_TEXT}?.split('/')[0].replace(/,/g, ''))"

# What a browser would ask of others by itself is switched off: whatever leaves the machine is the page's doing.
_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")  # while it is there, a loop runs in this thread, and asyncio.run cannot
def browser() -> Iterator[Any]:
    """A Chromium; skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="no browser: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()


class Tab:
    """One page, and what went wrong in it: errors of its own, and requests that would leave this machine."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.wrong: list[str] = []
        self._context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self._context.route(lambda url: "//127.0.0.1:" not in url and not url.startswith("file:"), self._leaves)
        self.page = self._context.new_page()
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._on_console)

    def _leaves(self, route: Any) -> None:
        self.wrong.append(f"asks for {route.request.url}")
        route.abort()

    def _on_console(self, message: Any) -> None:
        # A server that is gone for a moment is no mistake of the page's.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.wrong.append(message.text)

    def metric(self, name: str) -> str:
        return str(self.page.locator(f'[data-metric="{name}"] dd').text_content())

    def cells(self, column: str) -> list[str]:
        """Of the table of workers."""
        box = self.page.locator(f'#worker-columns input[value="{column}"]')
        if box.count() and not box.is_checked():
            box.evaluate("box => box.click()")  # the menu may be closed
        names = [text.strip() for text in self.page.locator("#workers th").all_text_contents()]
        return [row.locator("td").nth(names.index(column)).text_content() for row in self._rows()]

    def _rows(self) -> list[Any]:
        return list(self.page.locator("#workers tbody tr").all())

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def opened(**options: Any) -> Tab:
        tabs.append(Tab(browser, **options))
        return tabs[-1]

    yield opened
    for item in tabs:
        item.close()
        assert item.wrong == []


@contextmanager
def served(folder: Path, web: str = "127.0.0.1:0", **security: str) -> Iterator[Any]:
    """A page of this process, with no runs on record."""
    serve = pytest.importorskip("paramserver.web.app", reason="pip install 'paramserver[web]'")
    settings = {"server": {"web": web}, "output": {"track_dir": str(folder)}, "security": security}
    page = serve.Dashboard(Config.model_validate(settings))
    page.start()
    try:
        yield page
    finally:
        page.close()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """One with the token `secret`."""
    monkeypatch.setenv(WEB_TOKEN_VARIABLE, "secret")
    with served(tmp_path) as page:
        yield page


@pytest.fixture
def looks(page: Any, tab: Callable[..., Tab]) -> Callable[..., Tab]:
    """Opens the page of a run after these ticks."""

    def opened(*ticks: Tick, of: About | None = None, **options: Any) -> Tab:
        page.begin(View(about=of or about()))
        for tick in ticks:
            page.push(tick)
        shown = tab(**options)
        shown.page.goto(f"http://{page.address}/")
        shown.page.wait_for_function(
            f"step => ({STEP})() === step", arg=ticks[-1].status.step, timeout=DEADLINE_S * 1e3
        )
        return shown

    return opened


def about(**fields: Any) -> About:
    return About(**{"run": "r1", "mode": "async", "task": "digits", "controls": ["drain"], **fields})


def tick(number: int, num_workers: int = 2, **fields: Any) -> Tick:
    """The run after so many steps."""
    workers = [
        WorkerStatus(
            rank=rank, state="computing", step=number, loss=1.0 / (number + 1), samples_per_s=100.0 + rank,
            contributions=number, samples=32 * number,
        )
        for rank in range(num_workers)
    ]  # fmt: skip
    status = Status(mode="async", step=number, steps=1000, version=number, elapsed_s=float(number), workers=workers)
    update: dict[str, Any] = {"at": 1.7e9 + number, "clock_s": float(number), "status": status}
    return Tick(**{**update, "staleness": {0: number, 1: 2}, **fields})


class Client:
    def __init__(self, address: str) -> None:
        self.address = address

    def connect(self, data: bytes | str = b"") -> socket.socket:
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        with suppress(OSError):  # it may be closed already
            connection.sendall(data if isinstance(data, bytes) else data.encode())
        return connection

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith((b"{", b"[")) else text
        finally:
            connection.close()


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def client(page: Any, asked: list[dict[str, Any]]) -> Client:
    async def control(command: dict[str, Any]) -> str:
        asked.append(command)
        return "done"

    page.begin(View(about=about()), control)
    page.push(tick(1))
    client = Client(page.address)
    until(lambda: client.ask("GET", "/api/runs")[1] != [])
    return client


def until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
