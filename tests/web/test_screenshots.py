"""The pictures of docs/page.md are of a real run in a real browser: `make screenshots` keeps what this test sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster
from paramserver.tests.web.conftest import Tab
from paramserver.tests.web.test_page import STEP, opened, until

FIGURES = Path(__file__).parents[2] / "docs/figures"
_MOST_BYTES = 150_000


@pytest.mark.slow
def test_the_page_in_both_colours(cluster: Cluster, tab: Callable[..., Tab], tmp_path: Path) -> None:
    folder = FIGURES if os.environ.get("KEEP_SCREENSHOTS") else tmp_path
    flags = ("--mode", "ssp", "--staleness", "2", "--task", "digits", "--set", "server.status_interval_s=0.2")
    server = cluster.server(
        *flags, "--workers", "3", "--steps", "2000", "--eval-every", "60", "--web", "127.0.0.1:0", PS_WEB_TOKEN="kept"
    )
    for rank, base_s in enumerate((0.01, 0.02, 0.05)):
        cluster.worker(rank, "--set", f"slowdown.base_s={base_s}")
    for scheme in ("light", "dark"):
        shown = opened(tab, server, color_scheme=scheme, viewport={"width": 1100, "height": 1000})
        until(shown, f"() => ({STEP})() > 150")
        until(shown, "() => document.querySelector('#waits line')")
        path = folder / f"page-{scheme}.png"
        shown.page.screenshot(path=path)
        assert 10_000 < path.stat().st_size < _MOST_BYTES, path.stat().st_size


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pictures_are_there_and_small(scheme: str) -> None:
    assert 10_000 < (FIGURES / f"page-{scheme}.png").stat().st_size < _MOST_BYTES
