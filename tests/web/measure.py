"""How soon a browser shows the page of a run, and the list of 1,000 runs: medians, of a real Chromium.

    python tests/web/measure.py

Each time is of a new window with an empty cache. first paint: from the click until there is something to see
(first-contentful-paint); metrics: until the first numbers are there; bytes: all that came over the connection.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paramserver.tests.catalog.test_runs import write_many
from paramserver.tests.cluster import Cluster
from paramserver.tests.web.conftest import started_browser

_TIMES = 15
_PAINT = "() => performance.getEntriesByName('first-contentful-paint').map(one => one.startTime)[0] ?? null"
_BYTES = "() => performance.getEntries().reduce((sum, one) => sum + (one.transferSize || 0), 0)"


def opened(browser: Any, url: str, ready: str) -> tuple[float, float, float]:
    """Milliseconds to first paint and until `ready` holds, and KB."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_function(ready)
    took_ms = (time.perf_counter() - began) * 1e3
    page.wait_for_function(f"() => ({_PAINT})() !== null")
    paint_ms, num_bytes = page.evaluate(_PAINT), page.evaluate(_BYTES)
    context.close()
    return paint_ms, took_ms, num_bytes / 1e3


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-web-")))
        cluster = Cluster(folder)
        stack.callback(cluster.stop)
        browser = stack.enter_context(started_browser())
        server = cluster.server("--mode", "ssp", "--workers", "2", "--steps", "1000000", "--web", "127.0.0.1:0",
                                PS_WEB_TOKEN="measured")  # fmt: skip
        for rank in range(2):
            cluster.worker(rank, "--task", "xor", "--set", "slowdown.base_s=0.2")
        server.event("training_started")
        write_many(folder / "paramserver.db", 1000)
        dashboard = cluster.start("dashboard", "-m", "paramserver.catalog", "ui", "paramserver.db")
        dashboard.until(lambda: "runs of" in dashboard.output and dashboard.output.endswith("\n"), "address")
        wanted = {
            "page of a live run": (
                server.event("dashboard")["url"] + "?token=measured",
                "() => document.querySelectorAll('#workers tbody tr').length === 2",
            ),
            "list of 1,000 runs": (
                dashboard.output.split()[-1],
                "() => document.querySelectorAll('#runs tbody tr').length >= 200",
            ),
        }
        for name, (url, ready) in wanted.items():
            found = [opened(browser, url, ready) for _ in range(_TIMES)]
            paint_ms, took_ms, kb = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"{name:20} first paint {paint_ms:5.0f} ms   metrics {took_ms:5.0f} ms   {kb:6.1f} kB")


if __name__ == "__main__":
    main()
