"""The site: figures are what the simulator draws, the reference is of everything, and it builds without a warning."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from paramserver.common.config.flags import settings
from paramserver.common.config.schema import mode_options
from paramserver.common.registry import MODES
from paramserver.docs.making import figures, reference
from paramserver.tests.docs.blocks import ROOT


def test_the_figures_are_those_of_today() -> None:
    """`make docs-figures` makes them again."""
    drawn = figures.drawn()
    assert {path.name: path.read_text() for path in figures.FOLDER.glob("*.svg")} == drawn
    assert max(map(len, drawn.values())) < 20_000


def test_every_mode_has_a_page_with_its_picture_and_settings() -> None:
    for mode in (*MODES.names(), "single"):
        text = (ROOT / f"docs/modes/{mode}.md").read_text()
        assert f"figures/{mode}.svg" in text and f"<!-- settings of {mode} -->" in text
        assert "**When to use it.**" in text and "**When not.**" in text
        table = reference.on_page_markdown(text)
        for option in mode_options()[mode].model_fields if mode in MODES.names() else ():
            assert f"`policy.{option}`" in table


def test_the_reference_has_every_key_and_every_flag() -> None:
    page = reference.settings_page()
    assert [key for key in settings() if f"| `{key}` |" not in page] == []
    page = reference.commands_page()
    for text in ("## ps-server", "## ps-launch doctor", "## ps-runs compare", "`--local-steps`", "`--bandwidth` RATE"):
        assert text in page


def test_every_page_is_in_the_navigation() -> None:
    named: set[str] = set()

    def look(entry: object) -> None:
        if isinstance(entry, dict | list):
            for item in entry.values() if isinstance(entry, dict) else entry:
                look(item)
        else:
            named.add(str(entry))

    look(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert named - {"reference/settings.md", "reference/commands.md"} == pages


def test_the_changes_name_the_newest_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first, *_ = (ROOT / "docs/changes.md").read_text().split("\n## ")
    assert f"version {version}" in first


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    pytest.importorskip("mkdocstrings", reason="make docs installs it")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    older = tmp_path / "site" / "0.0.9"
    older.mkdir(parents=True)
    (older / "index.html").write_text("built before")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site" / version
    assert "Join the run at" in (site / "reference/api.html").read_text()
    assert "policy.staleness" in (site / "modes/ssp.html").read_text()
    assert not (site / "making").exists()
    header = (site / "index.html").read_text().partition("<header")[2].partition("</header>")[0]
    assert f"paramserver {version}" in header
    assert [item["version"] for item in json.loads((tmp_path / "site/versions.json").read_text())] == [version, "0.0.9"]
    assert f"url={version}/index.html" in (tmp_path / "site/index.html").read_text()
    assert (older / "index.html").read_text() == "built before"
