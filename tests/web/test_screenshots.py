"""The pictures of docs/page.md are of a real run in a real browser: `make screenshots` keeps what this test sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.common.runstore.reading import RunStore
from paramserver.tests.cluster import Cluster
from paramserver.tests.web.conftest import STEP, Tab
from paramserver.tests.web.test_page import opened, until

FIGURES = Path(__file__).parents[2] / "docs/figures"
_MOST_BYTES = 200_000


def keep(shown: Tab, name: str, folder: Path) -> None:
    path = folder / name
    shown.page.screenshot(path=path)
    assert 10_000 < path.stat().st_size < _MOST_BYTES, path.stat().st_size


def folder_of(tmp_path: Path) -> Path:
    return FIGURES if os.environ.get("KEEP_SCREENSHOTS") else tmp_path


@pytest.mark.slow
def test_the_page_in_both_colours(cluster: Cluster, tab: Callable[..., Tab], tmp_path: Path) -> None:
    flags = ("--mode", "ssp", "--staleness", "2", "--task", "digits", "--set", "server.status_interval_s=0.2",
             "--checkpoint-dir", "snapshots")  # fmt: skip
    server = cluster.server(
        *flags, "--workers", "3", "--steps", "2000", "--eval-every", "30", "--web", "127.0.0.1:0", PS_WEB_TOKEN="kept"
    )
    for rank, base_s in enumerate((0.01, 0.02, 0.05)):
        cluster.worker(rank, "--set", f"slowdown.base_s={base_s}")
    for scheme in ("light", "dark"):
        shown = opened(tab, server, color_scheme=scheme, viewport={"width": 1280, "height": 1060})
        until(shown, f"() => ({STEP})() > 300")
        until(shown, "() => document.querySelector('#waits line')")
        keep(shown, f"page-{scheme}.png", folder_of(tmp_path))


@pytest.mark.slow
def test_the_comparison_in_both_colours(cluster: Cluster, tab: Callable[..., Tab], tmp_path: Path) -> None:
    """Real runs: five modes, two of them with two seeds."""
    for mode, seed in (
        ("sync", 0),
        ("sync", 1),
        ("async", 0),
        ("async", 1),
        ("ssp", 0),
        ("localsgd", 0),
        ("diloco", 0),
    ):
        done = cluster.command("launch", "-n", "2", "--task", "digits", "--mode", mode, "--seed", str(seed), "--steps",
                               "300", "--eval-every", "20", "--set", "server.status_interval_s=0.1")  # fmt: skip
        assert done.returncode == 0, done.stderr
    with RunStore(cluster.folder / "runs/paramserver.db") as store:
        runs = ",".join(run.id for run in store.runs())
    dashboard = cluster.start("dashboard", "-m", "paramserver.catalog", "ui", "runs/paramserver.db")
    dashboard.until(lambda: "runs of" in dashboard.output and dashboard.output.endswith("\n"), "address")
    url = dashboard.output.split()[-1]
    for scheme in ("light", "dark"):
        shown = tab(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        shown.page.goto(url)
        shown.page.goto(f"{url.partition('?')[0]}?sel={runs}&smooth=0.5")
        until(shown, "() => document.querySelectorAll('#comparison tr [aria-expanded]').length === 2")
        until(shown, "() => document.querySelectorAll('#comparison-charts canvas').length > 2")
        keep(shown, f"compare-{scheme}.png", folder_of(tmp_path))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["page", "compare"])
def test_the_pictures_are_there_and_small(page: str, scheme: str) -> None:
    assert 10_000 < (FIGURES / f"{page}-{scheme}.png").stat().st_size < _MOST_BYTES
